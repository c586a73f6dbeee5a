"""The bytes of quantised weights, by the `quantization_config` of a configuration."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError
from rl_memory_plugins.plan.tensors import Tensor

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "bitsandbytes")


class Scheme(NamedTuple):
    """How the matrices are stored.

    Attributes:
        bits: Of each element.
        block: The rows and columns that share one scale; 0 rows stand for one scale a row, 0 columns for whole rows.
        scale_bits: Of each scale, with the zero point.
        skipped: Names, parts of names or globs of modules that are not quantised.
        only_experts: Whether all but the experts stay as they are.
    """

    bits: int
    block: tuple[int, int]
    scale_bits: int
    skipped: Sequence[str] = ()
    only_experts: bool = False

    def stored(self, tensor: Tensor) -> Tensor:
        if not tensor.is_matrix or self._skips(tensor.name):
            return tensor
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        scales = math.ceil(rows / (self.block[0] or 1)) * math.ceil(columns / (self.block[1] or columns))
        return tensor._replace(bits=self.bits, extra=math.ceil(scales * self.scale_bits / 8))

    def _skips(self, name: str) -> bool:
        if "lm_head" in name or ".gate." in name or "router" in name or "shared_expert_gate" in name:
            return True
        if self.only_experts:
            return ".experts." not in name
        plain = name.replace("model.layers.*", "model.layers.0").removesuffix(".weight")
        return any(part in plain or fnmatch.fnmatch(plain, part) for part in self.skipped)


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model's configuration; `None` if its weights are not quantised.

    Raises:
        InvalidRequestError: the method's values are no numbers, or of no size.
        UnsupportedError: a method that is not in `METHODS`.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(given, Mapping):
        return None
    try:
        scheme = _scheme(given)
        if not 1 <= scheme.bits <= 16 or min(scheme.block) < 0:
            raise ValueError(f"{scheme.bits} bits in blocks of {scheme.block}")
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the quantization_config is broken: {error}", field="model", got=str(given.get("quant_method"))
        ) from None
    return scheme


def _scheme(given: Mapping[str, Any]) -> Scheme:
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    skipped = [str(name) for name in given.get("modules_to_not_convert") or given.get("ignore") or []]
    if method in ("fp8", "fbgemm-fp8"):
        rows, columns = given.get("weight_block_size") or (0, 0)
        return Scheme(8, (int(rows), int(columns)), 32, skipped)
    if method == "compressed-tensors":
        groups = given.get("config_groups") or {}
        weights = next((group.get("weights") or {} for group in groups.values()), {})
        return Scheme(int(weights.get("num_bits") or 8), (0, int(weights.get("group_size") or 0)), 16, skipped)
    if method in ("gptq", "awq"):
        bits = int(given.get("bits") or given.get("w_bit") or 4)
        group = int(given.get("group_size") or given.get("q_group_size") or 128)
        return Scheme(bits, (0, max(group, 0)), 16 + bits, skipped)
    if method == "mxfp4":
        return Scheme(4, (0, 32), 8, skipped, only_experts=True)
    if method == "bitsandbytes":
        skipped = [str(name) for name in given.get("llm_int8_skip_modules") or []]
        return Scheme(4, (0, 64), 8, skipped) if given.get("load_in_4bit") else Scheme(8, (0, 0), 32, skipped)
    raise UnsupportedError(
        f"the plan does not know weights quantised by {method or 'a method without a name'!r}; give a folder that has "
        f"the safetensors files, or one of {', '.join(METHODS)}",
        method=method,
        allowed=list(METHODS),
    )
