"""Updates of real engines, by kind of weights, against fresh engines of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from integration.engines.base import Launch, Server
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.trainer import QuantisedSource
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import spec_of
from tests.conformance.trainers import push
from tests.sglang import torch_kernels
from tests.weight_kinds import (
    PROMPT,
    TOKENS,
    Write,
    checkpoint,
    install_plugin,
    renew,
    started,
    state,
    write_dense,
    write_fp8_experts,
    write_gptq,
    write_int4,
    write_int4_experts,
    write_int8,
    write_moe,
    write_tensor_fp8,
    write_tied,
)

SEED, OTHER_SEED = 1, 2

#: An SGLang plugin: routing in torch, for which the CPU build has a kernel that the stand-in lacks.
ROUTING = """
    def register():
        from sglang.srt.layers.moe import topk

        def fused_topk_cpu(*args, **kwargs):
            known = ("hidden_states", "gating_output", "topk", "renormalize", "correction_bias", "scoring_func")
            return topk.fused_topk_torch_native(*args, **{name: kwargs[name] for name in known if name in kwargs})

        topk.fused_topk_cpu = fused_topk_cpu
"""

#: An SGLang plugin: a linear method that packs after loading, as quantising ones do.
PACKING = """
    def register():
        import torch
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        def process_weights_after_loading(self, layer):
            layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.weight.t(), bias)

        UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
        UnquantizedLinearMethod.apply = apply
"""

#: An SGLang plugin: a linear method whose kernel copies the weights into memory that no tensor shows.
KEEPING = """
    import torch

    library = torch.library.Library("keeping_kernel", "DEF")

    def register():
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        library.define("pack(Tensor weight) -> int")
        library.impl("pack", lambda weight: 7, "CompositeImplicitAutograd")

        def process_weights_after_loading(self, layer):
            layer.handle = torch.ops.keeping_kernel.pack(layer.weight)

        UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
"""

TORCH_KERNELS = Path(torch_kernels.__file__).read_text()


def start(folder: Path, log: Path, plugin: str = "", *arguments: str, tp: int = 1) -> AbstractContextManager[Server]:
    sites = [install_plugin(log.with_suffix(".site"), "sglang.srt.plugins", plugin)] if plugin else []
    launch = Launch(folder, tp=tp, options={"poison": True}, forked=True)
    return started("sglang", launch, log, *arguments, sites=sites)


@pytest.mark.parametrize(("write", "plugin"), [(write_tied, ""), (write_moe, ROUTING)], ids=["tied", "moe"])
def test_after_an_update_an_engine_is_a_fresh_one_of_these_weights(write: Write, plugin: str, tmp_path: Path) -> None:
    folders = [write(tmp_path / name, seed, "float32") for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    with start(folders[1], tmp_path / "fresh.log", plugin) as fresh:
        other = fresh.generate(PROMPT, TOKENS)
    with start(folders[0], tmp_path / "server.log", plugin) as server:
        first = server.generate(PROMPT, TOKENS)
        assert first != other
        for folder, tokens in ((folders[1], other), (folders[0], first), (folders[1], other)):
            renew(server, folder)
            assert server.generate(PROMPT, TOKENS) == tokens
            own = {name: tensor_checksum(tensor) for name, tensor in checkpoint(folder).items()}
            assert server.control.checksums()["tensors"] == own


class Quantised(NamedTuple):
    """A checkpoint whose weights SGLang transforms, and what the engine needs to run it here."""

    write: Write
    dtype: str = "bfloat16"
    plugin: str = TORCH_KERNELS
    arguments: tuple[str, ...] = ()
    rounds: bool = False  # as `QuantisedSource` does


QUANTISED = {
    "transposed": Quantised(write_dense, "float32", PACKING),
    "fp8 by tensor": Quantised(write_tensor_fp8, rounds=True),
    "fp8 experts": Quantised(write_fp8_experts, rounds=True),
    "fp8 by the engine": Quantised(write_dense, arguments=("--quantization", "fp8")),
    "int8": Quantised(write_int8, rounds=True),
    "int4": Quantised(write_int4),
    "int4 experts": Quantised(write_int4_experts),
    "gptq": Quantised(write_gptq, rounds=True),
}


@pytest.mark.parametrize("kind", QUANTISED.values(), ids=QUANTISED)
def test_transformed_weights_are_those_of_a_fresh_engine(kind: Quantised, tmp_path: Path) -> None:
    """A copy would fit too: a square matrix fits where it lies transposed, and would be garbage there."""
    folders = [kind.write(tmp_path / name, seed, kind.dtype) for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    arguments = ("--dtype", kind.dtype, *kind.arguments)
    with start(folders[1], tmp_path / "fresh.log", kind.plugin, *arguments) as fresh:
        other = state(fresh)
    with start(folders[0], tmp_path / "server.log", kind.plugin, *arguments) as server:
        first = state(server)
        assert first.tokens != other.tokens
        report = push(server, checkpoint(folders[1]))
        assert report["receivers"][0]["opaque"] > 0
        assert state(server) == other
        with pytest.raises(WeightUpdateError):
            # in buckets that are small enough for several to arrive before
            server.control.update_weights(Breaking(checkpoint(folders[0])), bucket_bytes=1 << 18)
        assert server.control.memory()["content"] == "failed"
        for number in (0, 1):
            renew(server, folders[number])
            assert state(server) == (first, other)[number]
        server.control.sleep(1)
        server.control.wake_up()
        assert state(server) == other
        if kind.rounds:
            plain = write_moe if kind.write is write_fp8_experts else write_dense
            scales = {
                name: one for name, one in checkpoint(folders[0]).items() if name.endswith((".k_scale", ".v_scale"))
            }
            trained = {**checkpoint(plain(tmp_path / "trained", SEED, kind.dtype)), **scales}
            push(server, QuantisedSource.for_checkpoint(trained, folders[1]))
            assert state(server) == first


class Breaking:
    """A trainer that breaks before the last tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self._tensors.items()):
            if number == len(self._tensors) - 1:
                raise WeightUpdateError("the trainer broke")
            yield item


def test_weights_that_a_kernel_keeps_for_itself_are_refused(tmp_path: Path) -> None:
    first = write_dense(tmp_path / "first", SEED, "float32")
    with start(first, tmp_path / "server.log", KEEPING) as server:
        before = state(server)
        with pytest.raises(UnsupportedError, match="packed copies in memory of their own") as error:
            push(server, checkpoint(write_dense(tmp_path / "other", OTHER_SEED, "float32")))
        assert error.value.details["layers"]["model.layers.0.self_attn.o_proj"] == "UnquantizedLinearMethod"
        assert server.control.memory()["content"] == "valid"
        assert state(server) == before
        with pytest.raises(UnsupportedError, match=r"sleep\(level=2\)"):
            server.control.sleep(2)
        assert server.http.post("/release_memory_occupation", json={}).status_code == 400
        assert server.control.memory()["admitting"]
        assert server.control.memory()["engines"][0]["capabilities"]["fixed_weights"]
        assert state(server) == before
        server.control.sleep(1)
        server.control.wake_up()
        assert state(server) == before
