"""The kernel that rounds weights to FP8, run by Triton's interpreter (see conftest.py); tests/gpu runs it compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_memory_plugins.trainer.sources import formats
from rl_memory_plugins.trainer.sources.quantised import QuantisedSource
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of

kernel = pytest.importorskip("rl_memory_plugins.trainer.sources.fp8_kernel", exc_type=ModuleNotFoundError)

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
BLOCK = (128, 128)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there, for memory on the GPU alone"),
    pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning"),  # the interpreter divides by numpy
]


class Untraced:
    """A kernel whose steps no tracer sees: that of the coverage takes more time than they take themselves."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            trace = sys.gettrace()
            sys.settrace(None)
            try:
                self._kernel[grid](*arguments, **options)
            finally:
                sys.settrace(trace)

        return launch


@pytest.fixture(scope="module", autouse=True)
def untraced():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_round_blocks", Untraced(kernel._round_blocks))
        yield


def same_as_torch(weight: torch.Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> None:
    [(values, scales)] = kernel.round_blocks([weight], block, power_of_two=power_of_two)
    expected, expected_scales = formats._by_operators(weight, block, power_of_two)
    assert (values.dtype, scales.dtype) == (expected.dtype, expected_scales.dtype)
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def any_bits(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Every value of the dtype is equally likely: also infinities and NaNs, and subnormal values if readable."""
    size = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    return readable(torch.randint(size.min, size.max, shape, generator=generator, dtype=BITS[dtype]).view(dtype))


def readable(weight: torch.Tensor) -> torch.Tensor:
    """The interpreter reads subnormal values of bfloat16 wrongly. A GPU shifts their bits, see tests/gpu."""
    least = torch.finfo(weight.dtype).smallest_normal
    return torch.where(weight.abs() < least, 0, weight) if weight.dtype is torch.bfloat16 else weight


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(list(BITS)),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    more=st.integers(0, 5),
    block=st.sampled_from([BLOCK, (16, 48), (1, 32), (7, 11)]),
    power_of_two=st.booleans(),
    kind=st.sampled_from(["normal", "bits", "finite bits", "tiny", "zeros"]),
    seed=st.integers(0, 1 << 30),
)
def test_it_gives_the_bytes_that_torch_gives(dtype, rows, columns, more, block, power_of_two, kind, seed):
    shape = (rows, columns + more)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if "bits" in kind:
        weight = any_bits(dtype, shape, seed)
    if kind == "finite bits":
        weight[~weight.isfinite()] = 1
    if kind == "tiny":
        weight *= 1e-42
    if kind == "zeros":
        weight[weight.abs() < 1.5] = 0
    same_as_torch(weight[:, more:], block, power_of_two=power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(dtype, power_of_two):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    every = readable(every)
    same_as_torch(every, BLOCK, power_of_two=power_of_two)
    same_as_torch(every, (8, 128), power_of_two=power_of_two)
    same_as_torch(every.t().contiguous(), (8, 128), power_of_two=power_of_two)


def test_halfway_values_are_rounded_to_even():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(formats.FP8).float()
    halfway = (codes[1:] + codes[:-1]) / 2  # exact in float32
    near = [halfway, torch.nextafter(halfway, torch.tensor(0.0)), torch.nextafter(halfway, torch.tensor(1e3))]
    weight = torch.stack([*near, -halfway])
    weight[:, 0] = 448  # every scale is 1
    same_as_torch(weight, (4, 128))


def test_a_weight_beyond_32_bits_of_offsets():
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16)  # only the pages below are ever used
    weight = memory.as_strided((5, 64), (1 << 29, 1))
    weight.copy_(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
    same_as_torch(weight, (2, 32))


@pytest.mark.parametrize(
    ("weight", "block"),
    [
        (torch.ones(8, 8, dtype=torch.float64), BLOCK),
        (torch.ones(8, 8).t()[:, :4][:, ::2], BLOCK),
        (torch.ones(0, 8), BLOCK),
        (torch.ones(8, 8), (512, 512)),
    ],
    ids=["float64", "columns apart", "no value", "block too large for registers"],
)
def test_what_it_does_not_take(weight, block):
    assert kernel.round_blocks([weight], block, power_of_two=False) is None


class Noting:
    """A kernel, and the grids of its launches."""

    def __init__(self, kernel, grids):
        self._kernel = kernel
        self._grids = grids

    def __getitem__(self, grid):
        self._grids.append(grid)
        return self._kernel[grid]


@pytest.mark.parametrize("block", [BLOCK, (17, 31)])
@pytest.mark.parametrize("most", [65535, 3])
def test_many_weights_in_one_launch_are_rounded_as_each_alone(block, most, monkeypatch):
    grids, launch = [], kernel._round_blocks
    monkeypatch.setattr(kernel, "MOST_WEIGHTS", most)
    monkeypatch.setattr(kernel, "_round_blocks", Noting(launch, grids))
    generator = torch.Generator().manual_seed(3)
    shapes = [(40, 70), (1, 1), (128, 128), (13, 16), (5, 300), (9, 9)]
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    weights.append(weights[0][3:30, 5:60])
    together = kernel.round_blocks(weights, block, power_of_two=False)
    assert [number for _, number in grids] == ([7] if most > 7 else [3, 3, 1])
    for weight, made in zip(weights, together, strict=True):
        [alone] = kernel.round_blocks([weight], block, power_of_two=False)
        for one, other in zip(made, alone, strict=True):
            assert one.shape == other.shape and one.is_contiguous()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_one_weight_of_many_that_it_does_not_take():
    weights = [torch.ones(8, 8), torch.ones(8, 8).t()[:, :4][:, ::2]]
    assert kernel.round_blocks(weights, BLOCK, power_of_two=False) is None


@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "not aligned"])
def test_results_are_written_where_there_is_a_place(offset):
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in [(40, 64), (13, 16), (9, 48)]]
    expected = kernel.round_blocks(weights, (16, 16), power_of_two=False)
    memory, scales = torch.zeros(40 * 64 + offset, dtype=torch.uint8), torch.zeros(3, 4)
    place = memory[offset:].view(formats.FP8).view(40, 64), scales
    made = kernel.round_blocks(weights, (16, 16), power_of_two=False, into=[place, None, None])
    assert made[0][0] is place[0] and made[0][1] is scales
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8)) and torch.equal(one[1], other[1])


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on a GPU, as only `fp8_by_block` must believe."""

    is_cuda = True


@pytest.fixture
def weight(monkeypatch):
    monkeypatch.setattr(formats, "_kernel_errors", [])
    return torch.randn(40, 70, generator=torch.Generator().manual_seed(1)).bfloat16().as_subclass(OnGpu)


def quantised(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return formats.fp8_by_block(weight, block=(16, 48), power_of_two=False, scale="weight_scale_inv")


def test_weights_on_gpus_take_it(weight, monkeypatch):
    expected = quantised(weight.as_subclass(torch.Tensor))
    monkeypatch.setattr(formats, "_by_operators", None)  # cannot be called
    made = quantised(weight)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name].float(), expected[name].float()) for name in expected)


def test_a_weight_that_is_negated_without_a_copy_is_rounded_as_it_reads(weight, monkeypatch):
    monkeypatch.setattr(formats, "_by_operators", None)  # cannot be called
    config = {"quant_method": "fp8", "weight_block_size": [16, 48]}
    negated = torch._neg_view(-weight.as_subclass(torch.Tensor)).as_subclass(OnGpu)
    assert negated.is_neg()
    both = [QuantisedSource({"a.weight": one}, config, ["a.weight_scale_inv"]) for one in (negated, weight)]
    made, expected = (dict(source.tensors()) for source in both)
    assert len(expected) == 2
    assert all(torch.equal(made[name].float(), expected[name].float()) for name in expected)


class Launches:
    """A kernel that notes by which constants Triton would compile it."""

    def __init__(self):
        self.constants = []

    def __getitem__(self, grid):
        def launch(table, *constants, num_warps):
            assert table.data_ptr() % kernel.ALIGNMENT == 0  # Triton compiles another kernel for other addresses
            self.constants.append((*constants, num_warps))

        return launch


class Gathered:
    """A source whose tensors do not exist before an update."""

    def __init__(self, weight):
        self.weight = weight

    def specs(self):
        return [TensorSpec("a.weight", name_of(self.weight.dtype), tuple(self.weight.shape))]

    def tensors(self):
        yield "a.weight", self.weight


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_source_compiles_the_kernel_when_it_is_made(monkeypatch, dtype, is_gathered):
    """The engine is closed during an update."""
    launches, zeros, used = Launches(), torch.zeros, []

    def zeros_there(shape, *, dtype, device):
        used.append(device)
        return zeros(shape, dtype=dtype).as_subclass(OnGpu)

    monkeypatch.setattr(kernel, "_round_blocks", launches)
    monkeypatch.setattr(formats, "_kernel_errors", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    weight = torch.randn(256, 384).to(dtype).as_subclass(OnGpu)
    source = Gathered(weight) if is_gathered else {"a.weight": weight}
    arguments = source, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, ["a.weight_scale_inv"]
    QuantisedSource(*arguments)
    assert not launches.constants  # no GPU is in use, and to use it would take memory there

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "zeros", zeros_there)
    made = QuantisedSource(*arguments)
    compiled = list(launches.constants)
    assert {*used} == {torch.device("cuda:3") if is_gathered else weight.device}
    dict(made.tensors())
    assert launches.constants[-1] in compiled and len(launches.constants) == len(compiled) + 1


def test_after_one_failure_torch_s_operators_do_the_work(weight, monkeypatch, caplog):
    tried = []

    def fails(*arguments, **options):
        tried.append(arguments)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernel, "round_blocks", fails)
    expected = quantised(weight.as_subclass(torch.Tensor))
    for _ in range(3):
        made = quantised(weight)
        assert all(torch.equal(made[name].float(), expected[name].float()) for name in expected)
    assert len(tried) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "C compiler" in caplog.text


def test_without_triton_torch_s_operators_do_the_work(weight, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, kernel.__name__, None)
    assert quantised(weight).keys() == {"weight", "weight_scale_inv"}
    assert "torch's operators" in caplog.text


def test_too_little_memory_is_no_reason_to_give_it_up(weight, monkeypatch):
    def fails(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel, "round_blocks", fails)
    with pytest.raises(torch.OutOfMemoryError):
        quantised(weight)
    assert not formats._kernel_errors


def test_a_scale_just_above_a_power_of_two_becomes_the_next_power():
    largest = torch.nextafter(torch.tensor(448 * 16.0), torch.tensor(1e9))
    made = formats.fp8_by_block(largest.reshape(1, 1), block=BLOCK, power_of_two=True, scale="scale")
    assert made["scale"].item() == 32
    made = formats.fp8_by_block(torch.tensor([[448 * 16.0]]), block=BLOCK, power_of_two=True, scale="scale")
    assert made["scale"].item() == 16


COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rl_memory_plugins.trainer.sources.fp8_kernel import _round_blocks

tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "TILE_ROWS": 128, "TILE_COLUMNS": 128, "POWER_OF_TWO": True}
for dtype, aligned in ((tl.bfloat16, True), (tl.float16, False), (tl.float32, True)):
    for capability, converts in ((80, False), (90, True), (100, True)) if aligned else ((90, True),):
        constants = {"DTYPE": dtype, **tile, "ALIGNED": aligned, "CONVERTS": converts}
        signature = {"table": "*i64"} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=_round_blocks, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4 if converts else 16})
        assert made.asm["cubin"]
        assert "div.rn.f32" in made.asm["ptx"] and "ftz" not in made.asm["ptx"]
        assert ("ld.global.v4" in made.asm["ptx"]) == aligned  # 16 bytes at a time
        assert ("cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]) == converts
"""


def test_it_compiles_for_gpus_and_divides_as_ieee_says():
    """The interpreter takes more of Python than the compiler does, which needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
