"""Which numbers of vLLM's attention layers its CUDA graphs hold.

A layer has the scales of an FP8 KV cache twice, as tensors and as numbers. Graphs hold the numbers if the backend gives
them to its kernels, as FlashInfer's does. They read the tensors anew if the backend gives these, as FlashAttention's
and Triton's do.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The backends that are known to give kernels the tensors; that they do not read the numbers is checked all the same.
READ_TENSORS = ("FlashAttentionImpl", "TritonAttentionImpl")
SCALES = ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float")


def held_by_graphs(layer: torch.nn.Module, name: str) -> bool:
    """Whether CUDA graphs may hold an attribute of a layer as a number."""
    backend = type(getattr(layer, "impl", None))
    if name not in SCALES or backend.__name__ not in READ_TENSORS:
        return True
    return _reads(backend, name) or _reads(type(layer), name)


def _reads(kind: type, name: str) -> bool:
    """Whether the modules of a class and its bases have code that reads an attribute of this name."""
    return any(_module_reads(one.__module__, name) for one in kind.__mro__ if one is not object)


@functools.cache
def _module_reads(module: str, name: str) -> bool:
    return any(_code_reads(code, name) for code in _codes(sys.modules[module]))


def _codes(module: Any) -> Iterator[CodeType]:
    """The code of the functions and classes that a module defines."""
    for member in vars(module).values():
        if getattr(member, "__module__", None) != module.__name__:
            continue
        for function in [member, *(vars(member).values() if inspect.isclass(member) else ())]:
            code = getattr(inspect.unwrap(_function(function)), "__code__", None)
            if code is not None:
                yield code


def _function(member: Any) -> Any:
    """The function of a method of any kind, or of a kernel that a decorator made of it."""
    for name in ("fget", "__func__", "fn"):
        member = getattr(member, name, None) or member
    return member


def _code_reads(code: CodeType, name: str) -> bool:
    for step in dis.get_instructions(code):
        several = step.argval if isinstance(step.argval, (tuple, frozenset)) else (step.argval,)
        if name in several and not step.opname.startswith(("STORE", "DELETE")):
            return True  # also as a constant, for `getattr`
    return any(_code_reads(one, name) for one in code.co_consts if isinstance(one, CodeType))
