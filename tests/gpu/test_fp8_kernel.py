"""The compiled kernel that rounds weights to FP8; the interpreter runs it in tests/unit."""

from __future__ import annotations

import json

import pytest
import torch

from integration.models import FP8_BLOCKS, SHAPES, checkpoint_shapes, fp8_checkpoint_names
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.trainer import QuantisedSource
from rl_memory_plugins.trainer.sources import formats, fp8_kernel
from rl_memory_plugins.trainer.sources.quantised import GROUP_VALUES
from rl_memory_plugins.weights.buffers import CudaStaging, typed
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.packing import Packing
from rl_memory_plugins.weights.routes import Route

BLOCK = (128, 128)
LAYER_7B = {  # the quantised weights of one layer: 0.23 G values
    name: shape
    for name, shape in checkpoint_shapes(SHAPES["7b"]).items()
    if name.startswith("model.layers.0.") and name.endswith("_proj.weight")
}
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = pytest.mark.parametrize("dtype", list(BITS), ids=str)


def same_as_torch(weight: torch.Tensor, block: tuple[int, int] = BLOCK, *, power_of_two: bool = False) -> None:
    [(values, scales)] = fp8_kernel.round_blocks([weight], block, power_of_two=power_of_two)
    expected, expected_scales = formats._by_operators(weight, block, power_of_two)
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).mul_(0.02).to(dtype)


@DTYPES
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [*dict.fromkeys(LAYER_7B.values()), (1, 1), (129, 127), (4097, 1000), (100, 18945)])
def test_it_gives_the_bytes_that_torch_gives(shape, dtype, power_of_two):
    same_as_torch(normal(*shape, dtype=dtype), power_of_two=power_of_two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_first_update_compiles_nothing(dtype, monkeypatch):
    config = {"quant_method": "fp8", "weight_block_size": [64, 128]}  # other tests compile for other blocks
    source = QuantisedSource({"a.weight": normal(512, 256, dtype=dtype)}, config, ["a.weight_scale_inv"])

    def compile_again(*arguments: object, **options: object) -> None:
        raise AssertionError("the kernel is compiled in an update")

    monkeypatch.setattr(fp8_kernel._round_blocks, "_do_compile", compile_again)
    monkeypatch.setattr(formats, "_kernel_errors", [])
    dict(source.tensors())
    assert not formats._kernel_errors


@DTYPES
@pytest.mark.parametrize("block", [BLOCK, (16, 48), (1, 128), (128, 1), (7, 11)])
@pytest.mark.parametrize("finite", [False, True])
def test_any_bits(dtype, block, finite):
    """Also subnormal values, infinities and NaNs."""
    size = torch.iinfo(BITS[dtype])
    weight = torch.randint(size.min, size.max, (700, 1000), dtype=BITS[dtype], device="cuda:0").view(dtype)
    if finite:
        weight[~weight.isfinite()] = 1
    same_as_torch(weight, block)
    same_as_torch(weight, block, power_of_two=True)
    tiny = weight.abs() < torch.finfo(dtype).smallest_normal * 8
    same_as_torch(torch.where(tiny, weight, 0), block)


@DTYPES
@pytest.mark.parametrize("exponent", [-61, -60, -59, 0, 59, 60, 61])
def test_quotients_next_to_the_middle_of_two_codes(dtype, exponent):
    """The kernel multiplies by the inverse of the scale. Errors of the last bit give other codes here."""
    info = torch.finfo(dtype)
    largest = torch.tensor([1.0, 1.3, 1.9921875], device="cuda:0", dtype=torch.float64) * 2.0**exponent
    if dtype is torch.float16 and exponent:
        largest = largest * 2.0 ** (-exponent + max(-10, min(10, exponent)))
    codes = torch.arange(1, 127, dtype=torch.uint8, device="cuda:0").view(torch.float8_e4m3fn).double()
    middles = torch.cat([(codes[1:] + codes[:-1]) / 2, codes])
    for most in largest.to(dtype):
        scale = (most.float() / 448).double()
        near = (middles * scale).to(dtype)
        around = torch.stack([torch.nextafter(near, near.new_zeros(())), near, torch.nextafter(near, near + info.max)])
        weight = torch.cat([around.flatten(), -around.flatten(), most.reshape(1), -torch.zeros_like(most).reshape(1)])
        weight = torch.where(weight.abs() <= most, weight, 0)
        same_as_torch(weight.reshape(1, -1), (1, weight.numel()))


def test_a_gpu_without_an_instruction_for_fp8(monkeypatch):
    monkeypatch.setattr(fp8_kernel, "_converts", lambda gpu: False)
    for shape in LAYER_7B.values():
        same_as_torch(normal(*shape))


def test_many_weights_in_one_launch():
    weights = [normal(*shape) for shape in [(3584, 3584), (1, 1), (129, 127), (512, 3584), (256, 4096)]]
    for weight, (values, scales) in zip(
        weights, fp8_kernel.round_blocks(weights, BLOCK, power_of_two=False), strict=True
    ):
        expected, expected_scales = formats._by_operators(weight, BLOCK, False)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


def test_parts_of_a_matrix():
    whole = normal(1000, 1003)
    for part in (whole[:, 1:], whole[3:900, 5:777], whole[::3], whole[7:8]):
        same_as_torch(part)


def test_a_weight_beyond_32_bits_of_offsets():
    weight = torch.empty(70_000, 32_768, dtype=torch.bfloat16, device="cuda:0").normal_()
    [(values, scales)] = fp8_kernel.round_blocks([weight], BLOCK, power_of_two=False)
    for first in (0, 65_536, 69_888):  # rows at the start, beyond 2**31 values, and at the edge
        expected, expected_scales = formats._by_operators(weight[first : first + 256], BLOCK, False)
        assert torch.equal(values[first : first + 256].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales[first // 128 :][: len(expected_scales)], expected_scales)


@DTYPES
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_trainer_in_host_memory_sends_the_same(dtype, power_of_two):
    weight = normal(513, 700, dtype=dtype)
    [made] = fp8_kernel.round_blocks([weight], BLOCK, power_of_two=power_of_two)
    for one, other in zip(made, formats._by_operators(weight.cpu(), BLOCK, power_of_two), strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def test_it_is_what_a_source_uses():
    names = fp8_checkpoint_names(SHAPES["7b"])
    tensors = {name: normal(*shape) for name, shape in LAYER_7B.items()}
    source = QuantisedSource(tensors, FP8_BLOCKS, names)
    dict(source.tensors())  # compiles the kernel
    torch.cuda.reset_peak_memory_stats(0)
    before, most = torch.cuda.memory_allocated(0), GROUP_VALUES + max(tensor.numel() for tensor in tensors.values())
    for _ in source.tensors():
        pass
    # At most two groups in FP8, the last one and the next. By torch's operators there is a copy in float32 too.
    assert torch.cuda.max_memory_allocated(0) - before < 2.1 * most
    assert not formats._kernel_errors


def test_results_are_written_where_there_is_a_place():
    weights = [normal(*shape) for shape in [(3584, 3584), (129, 127), (256, 4096)]]
    expected = fp8_kernel.round_blocks(weights, BLOCK, power_of_two=False)
    for offset in (256, 3):
        codes = torch.zeros(3584 * 3584 + offset, dtype=torch.uint8, device="cuda:0")[offset:]
        place = codes.view(formats.FP8).view(3584, 3584), torch.zeros(28, 28, device="cuda:0")
        made = fp8_kernel.round_blocks(weights, BLOCK, power_of_two=False, into=[place, None, None])
        assert made[0][0] is place[0] and made[0][1] is place[1]
        for one, other in zip(made, expected, strict=True):
            assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
            assert torch.equal(one[1], other[1])


def test_a_source_makes_its_tensors_in_the_bucket():
    tensors = {name: normal(*shape) for name, shape in LAYER_7B.items()}
    source = QuantisedSource(tensors, FP8_BLOCKS, fp8_checkpoint_names(SHAPES["7b"]))
    expected = dict(source.tensors())
    manifest = Manifest(source.specs(), 1 << 30)
    [entries] = manifest.buckets()
    staging = CudaStaging(gpu_name(0), manifest.slot_bytes(), 1, stable=True)
    packing = Packing(source, manifest, [Route("cuda_ipc", staging)])
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    packing.pack(0, entries)
    packing.finish()
    assert torch.cuda.max_memory_allocated(0) - before < 1 << 20
    for entry in entries:
        spec = manifest.tensors[entry.index]
        arrived = typed(staging._slots[0], entry.offset, entry.nbytes, spec.dtype, spec.shape)
        assert torch.equal(arrived.view(torch.uint8), expected[spec.name].view(torch.uint8)), spec.name
        del arrived
    staging.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU that is not the current one")
def test_another_gpu_than_the_current_one():
    same_as_torch(normal(300, 500, device="cuda:1"))


def test_it_reads_and_writes_faster_than_torch():
    """Prints gigabytes per second, for a layer of the 7B shape: two bytes in and one byte out for each value."""
    weights = [normal(*shape) for shape in LAYER_7B.values()]
    nbytes = 3 * sum(weight.numel() for weight in weights)

    def by_operators(weights: list[torch.Tensor], block: tuple[int, int], power_of_two: bool) -> None:
        for weight in weights:
            formats._by_operators(weight, block, power_of_two)

    ways = {"kernel": fp8_kernel.round_blocks, "torch": by_operators}
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(0), "bytes": nbytes}
    for name, way in ways.items():
        seconds = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way(weights, BLOCK, power_of_two=False)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        figures[f"{name}_GBps"] = round(nbytes / sorted(seconds[2:])[5] / 1e9, 1)
    print(json.dumps(figures))
    assert figures["kernel_GBps"] > 2 * figures["torch_GBps"]
