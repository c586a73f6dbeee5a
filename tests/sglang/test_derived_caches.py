"""Caches of SGLang's models that no load renews, in modules like those of the models, by SGLang's own functions."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.gemm.hc_mix_splitk import permute_pad_up_weight
from sglang.srt.layers.attn_residual import get_cw
from torch import nn

from rl_memory_plugins.engines.sglang.derived_caches import DerivedCaches
from rl_memory_plugins.errors import WeightUpdateError

HIDDEN = 8


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN, dtype=torch.bfloat16), requires_grad=False)


class Layer(nn.Module):
    """With an attention residual as of Kimi-K3, norms as of Hunyuan-V3, and a hyper-connection as of Qwen4."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_res_norm, self.q_norm, self.k_norm = Norm(), Norm(), Norm()
        self.mlp_res_proj = nn.Linear(HIDDEN, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self._hpc_q_norm_w_fp32: torch.Tensor | None = None
        self._hpc_k_norm_w_fp32: torch.Tensor | None = None
        self.input_mix_weight_up = nn.Linear(3, 4 * HIDDEN, bias=False).requires_grad_(False)
        self.hc_count = 4
        self._mix_up_weight_padded: torch.Tensor | None = None

    def derive(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            self._hpc_q_norm_w_fp32 = self.q_norm.weight.detach().float()
            self._hpc_k_norm_w_fp32 = self.k_norm.weight.detach().float()
            residuals = [
                get_cw(self.mlp_res_proj, self.mlp_res_norm, dtype) for dtype in (torch.float32, torch.bfloat16)
            ]
            self._mix_up_weight_padded = permute_pad_up_weight(self.input_mix_weight_up.weight, self.hc_count)
        return [self._hpc_q_norm_w_fp32, self._hpc_k_norm_w_fp32, self._mix_up_weight_padded, *residuals]


def test_what_was_derived_is_derived_again_where_it_lies() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(2))})
    caches = DerivedCaches(model)  # before the first forward pass
    held = [layer.derive() for layer in model["layers"]]
    addresses = [[tensor.data_ptr() for tensor in one] for one in held]
    for parameter in model.parameters():
        parameter.copy_(torch.rand_like(parameter))
    caches.derive_again()
    for layer, tensors, before in zip(model["layers"], held, addresses, strict=True):
        fresh = Layer()
        fresh.load_state_dict(layer.state_dict())
        for now, expected in zip(tensors, fresh.derive(), strict=True):
            assert torch.equal(now, expected)
        assert [tensor.data_ptr() for tensor in tensors] == before


def test_what_was_not_derived_yet_is_left_to_the_next_forward_pass() -> None:
    layer = Layer()
    DerivedCaches(layer).derive_again()
    assert layer._hpc_q_norm_w_fp32 is None and not hasattr(layer.mlp_res_proj, "_attn_res_cw_cache")


def test_a_cache_of_another_form_is_an_error_and_not_stale_values() -> None:
    layer = Layer()
    layer.derive()
    del layer.mlp_res_norm
    with pytest.raises(WeightUpdateError, match="mlp_res_proj._attn_res_cw_cache in a way that is not known"):
        DerivedCaches(layer).derive_again()
