"""Marks in parameters of undefined content, which show from the memory alone whether every byte has been overwritten.

A mark in a floating-point parameter is a NaN in every element. A result that depends on old elements stays NaN, so a
parameter without a NaN has been overwritten, by whatever means: an operator, a kernel, NCCL, another thread. Weights
that hold NaNs of their own count as not overwritten.

Other dtypes have no NaN. There the mark is a pattern of 8 elements; a write that changes any of them removes the mark.

All work is linear in the number of parameters and in their bytes: most calls look at a single element.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

_NAN_BITS = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
}
"""The NaNs of dtypes that torch cannot compute with."""

_PATTERN = 0xA7
"""The byte that marks integers."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
"""Elements that are searched at a time. The search needs two bytes of memory for each."""


class UnwrittenMarks:
    """The parameters that still hold marks.

    The constructor overwrites every parameter.

    Args:
        parameters: Gives the parameters of the model. The engine may replace some of them during a load; the new
            parameters count as written, unless they are on the meta device.
        padded: Parameters with padding, each with views of what a load fills. The padding becomes zero.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        padded: Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]] = (),
    ) -> None:
        self._parameters = parameters
        with _plain():
            marked = [one for one in parameters() if one.numel()]
            # With a parameter on the meta device vLLM keeps them elsewhere, and nothing is marked.
            self._is_possible = not any(one.is_meta for one in marked)
            views = {id(parameter): filled for parameter, filled in padded}
            for parameter in marked if self._is_possible else ():
                if id(parameter) in views:
                    _bits(parameter).zero_()
                for view in views.get(id(parameter), [parameter]):
                    _mark(view)
        self._left = [weakref.ref(one) for one in marked]
        self._last = -1  # an element that held a mark in the last parameter that is left
        self._checks = 0
        self._every = max(1, len(marked))  # checks, after which replaced parameters are looked for

    @property
    def are_gone(self) -> bool:
        """Whether every parameter has been overwritten."""
        if not self._is_possible:
            return False
        with _plain():
            is_due = self._checks % self._every == 0
            self._checks += 1
            if self._left and self._is_marked_still() and not is_due:
                return False
            present = list(self._parameters())
            if any(one.is_meta for one in present):  # vLLM has put the marked parameters aside
                return False
            found = set(map(id, present))
            self._left = [ref for ref in self._left if id(ref()) in found]
            self._drop_written()
        return not self._left

    def _is_marked_still(self) -> bool:
        """Whether the one element that was marked is so still. Loads come in the order of the parameters."""
        parameter = self._left[-1]()
        if parameter is None:
            return False
        if parameter.is_meta:
            return True
        if not parameter.is_contiguous():
            return _last_mark(parameter) >= 0
        flat, last = parameter.data.view(-1), self._last % parameter.numel()
        if _has_nan(flat):
            value = flat[last].item()
            return bool(value != value)
        return _last_mark(flat[last - last % 8 :][:8]) >= 0

    def _drop_written(self) -> None:
        """Look at all parameters that are left, and keep those with marks."""
        left = [(ref, one) for ref in self._left if (one := ref()) is not None]
        marked = _with_marks([one for _, one in left])
        self._left = [ref for (ref, _), is_marked in zip(left, marked, strict=True) if is_marked]
        if self._left:
            last = self._left[-1]()
            self._last = -1 if last is None or last.is_meta else _last_mark(last)


@contextmanager
def _plain() -> Iterator[None]:
    """Compute with parameters as with plain tensors. vLLM's classes of parameters make every access slow."""
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        yield


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(_INTEGERS[tensor.element_size()])


def _pattern(tensor: torch.Tensor) -> int:
    size = tensor.element_size()
    mark = int.from_bytes(bytes([_NAN_BITS.get(tensor.dtype, _PATTERN)] * size), "big")
    return mark if size == 1 else mark - (1 << (8 * size))


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether torch can compute with the dtype of the tensor, which then has NaNs."""
    return bool(tensor.is_floating_point() and tensor.element_size() > 1)


def _mark(parameter: torch.Tensor) -> None:
    if _has_nan(parameter):
        parameter.data.fill_(float("nan"))
    else:
        _bits(parameter).fill_(_pattern(parameter))


def _with_marks(parameters: list[torch.Tensor]) -> list[bool]:
    """For each parameter, whether it holds a mark."""
    marked = [one.is_meta for one in parameters]
    maxima: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, one in enumerate(parameters):
        if _has_nan(one):
            maxima[one.device, one.dtype].append((number, one.data.max()))
        elif not one.is_meta:
            marked[number] = _last_mark(one) >= 0
    for (device, _), of_device in maxima.items():  # the maximum of a tensor with a NaN is NaN
        if device.type != "meta":
            found = torch.stack([maximum for _, maximum in of_device]).isnan().tolist()  # one wait for all of them
            for (number, _), is_nan in zip(of_device, found, strict=True):
                marked[number] = is_nan
    return marked


def _last_mark(tensor: torch.Tensor) -> int:
    """The index of the last marked element, in row-major order; -1 if there is none."""
    flat = tensor.data.contiguous().view(-1)
    for start in range((flat.numel() - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
        marked = _marked(flat[start : start + _CHUNK])
        if marked.any():
            from_end = int(marked.flip(0).to(torch.uint8).argmax())
            return int(start + marked.numel() - 1 - from_end)
    return -1


def _marked(flat: torch.Tensor) -> torch.Tensor:
    """For each element, whether it is marked."""
    if _has_nan(flat):
        return flat.isnan()
    marked = _bits(flat) == _pattern(flat)
    if flat.dtype not in _NAN_BITS:  # any element may hold the pattern: 8 in a row do not
        whole = len(marked) // 8 * 8
        for part in (marked[:whole].view(-1, 8), marked[whole:].view(1, -1)):
            part &= part.all(dim=1, keepdim=True)
    return marked
