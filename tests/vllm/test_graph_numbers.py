"""Which scales of a KV cache CUDA graphs hold, by vLLM's own backends."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from rl_memory_plugins.engines.vllm.graph_numbers import READ_TENSORS, SCALES, _reads, held_by_graphs

BACKENDS = {
    "FlashAttentionImpl": "vllm.v1.attention.backends.flash_attn",
    "TritonAttentionImpl": "vllm.v1.attention.backends.triton_attn",
    "CPUAttentionBackendImpl": "vllm.v1.attention.backends.cpu_attn",
}


def backend(name: str) -> type:
    found: type = getattr(importlib.import_module(BACKENDS[name]), name)
    return found


def layer_of(impl: type | None) -> torch.nn.Module:
    layer = torch.nn.Module()
    if impl is not None:
        layer.impl = impl.__new__(impl)
    return layer


@pytest.mark.parametrize("name", READ_TENSORS)
def test_backends_that_read_tensors(name: str) -> None:
    layer = layer_of(backend(name))
    assert not any(held_by_graphs(layer, scale) for scale in SCALES)
    assert held_by_graphs(layer, "num_heads")


def test_a_backend_that_reads_numbers() -> None:
    impl = backend("CPUAttentionBackendImpl")
    assert _reads(impl, "_k_scale_float")
    assert held_by_graphs(layer_of(impl), "_k_scale_float")


def test_no_backend() -> None:
    assert held_by_graphs(layer_of(None), "_k_scale_float")


CHANGED = """
class Base:
    def scale(self, layer):
        return [getattr(layer, one) for one in ("_k_scale_float",)][0]

class FlashAttentionImpl(Base):
    def __init__(self, layer):
        layer._v_scale_float = 1.0
"""


def test_a_known_name_whose_code_reads_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a future version of vLLM may have it, in a base class and by `getattr`."""
    module = types.ModuleType("changed")
    exec(CHANGED, vars(module))
    monkeypatch.setitem(sys.modules, "changed", module)
    layer = layer_of(module.FlashAttentionImpl)
    assert held_by_graphs(layer, "_k_scale_float")
    assert not held_by_graphs(layer, "_v_scale_float")
