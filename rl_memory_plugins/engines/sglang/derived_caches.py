"""What forward passes of SGLang's models derive from weights once and keep: no load renews it.

After an update it is derived again where it lies, because CUDA graphs read it there. Read in SGLang 0.5.23: Kimi-K3's
attention residuals, Hunyuan-V3 with `--attention-backend hpc_ops`, and Qwen4's hyper-connections on Blackwell.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_memory_plugins.errors import WeightUpdateError

_RESIDUAL = "_attn_res_cw_cache"  # of a layer whose name ends with `_res_proj`, by dtype
_MIX = "_mix_up_weight_padded"
_NORMS = {"_hpc_q_norm_w_fp32": "q_norm", "_hpc_k_norm_w_fp32": "k_norm"}


class DerivedCaches:
    """Those of one model; most models have none.

    Args:
        model: The model, with all its layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Found once: a walk over thousands of layers takes milliseconds, and an update has few.
        self._layers = [(name, layer) for name, layer in model.named_modules() if _may_derive(layer)]

    def derive_again(self) -> None:
        """
        Raises:
            WeightUpdateError: something was derived in a way that is not known.
        """
        with torch.inference_mode():  # a forward pass has made it
            for name, layer in self._layers:
                for key, now, new in _derived(layer):
                    if new is None or new.shape != now.shape:
                        where = f"{name}.{key}"
                        raise WeightUpdateError(f"the engine derives {where} in a way that is not known", name=where)
                    now.copy_(new)


def _may_derive(layer: torch.nn.Module) -> bool:
    own = vars(layer).keys()
    return _MIX in own or not own.isdisjoint(_NORMS) or any(key.endswith("_res_proj") for key in layer._modules)


def _derived(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """What a layer keeps: its name, the tensor, and its new values; `None` if they are not known."""
    own = vars(layer)
    for key, norm in _NORMS.items():
        if own.get(key) is not None:
            yield key, own[key], _weight(layer, norm)
    if own.get(_MIX) is not None:
        from sglang.kernels.ops.gemm.hc_mix_splitk import permute_pad_up_weight

        up = _weight(layer, "input_mix_weight_up")
        yield _MIX, own[_MIX], None if up is None else permute_pad_up_weight(up, layer.hc_count)
    for key, child in layer.named_children():
        for now in vars(child).get(_RESIDUAL, {}).values():
            norm_weight = _weight(layer, f"{key.removesuffix('_proj')}_norm")
            product = None if norm_weight is None else norm_weight.float() * child.weight.squeeze().float()
            yield f"{key}.{_RESIDUAL}", now, product


def _weight(layer: torch.nn.Module, child: str) -> torch.Tensor | None:
    return getattr(getattr(layer, child, None), "weight", None)
