"""Runs a model's loader under a tracer, name by name where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.pools import inline, intercepted
from rl_memory_plugins.weights.trace import PythonGuard, Tracer

if TYPE_CHECKING:
    import torch

Loader: TypeAlias = "Callable[[Iterable[tuple[str, torch.Tensor]]], Any]"
"""A model's `load_weights`."""

MAX_FAILURES = 64
"""The trace stops after this many failed names in a row. Each costs a call of the loader, and all names with a wrong
prefix would take minutes."""

LONGEST_SAID = 400
"""The most characters of a loader's own error in a mismatch. vLLM's lists all parameters, for each unknown name."""


def run_traced(load_weights: Loader, tracer: Tracer, names: Sequence[str]) -> tuple[dict[str, Mismatch], Sequence[str]]:
    """Feed all names to the loader. Skip each name that the loader fails on, and go on.

    Returns: the mismatch of each failed name, and the names that were not tried (see `MAX_FAILURES`).
    """
    failures: dict[str, Mismatch] = {}
    in_a_row = 0
    singly = False  # feed the remaining names one at a time, because the loader defers names

    def load(batch: Sequence[str]) -> Exception | None:
        tracer.current = None
        try:
            with intercepted(inline), PythonGuard(tracer), tracer:
                load_weights(tracer.feed(batch))
        except RLMemoryError:
            raise
        except Exception as error:
            return error
        return None

    first = 0
    while first < len(names) and in_a_row < MAX_FAILURES:
        batch = names[first : first + 1] if singly else names[first:]
        if singly:
            tracer.forget(batch[0])
        error = load(batch)
        if error is None:
            first += len(batch)
            in_a_row = 0
            continue
        name = batch[0] if singly else tracer.current
        if name is None:  # the loader failed before it read a name
            raise manifest_error([Mismatch("loader", "", _said(error))])
        position = batch.index(name)
        tracer.forget(name)
        if position > 0:  # this name may have failed, or an earlier name that the loader deferred
            in_a_row = 0
            error = load([name])
            if error is None:
                singly = True
                continue
            tracer.forget(name)
        first += position + 1
        if name in tracer.opaque or _needs_values(error):
            tracer.mark_opaque([name], f"the loader needs its values: {error}")
            tracer.unseen_writes = True
            in_a_row = 0
        else:
            failures[name] = _mismatch(name, error)
            in_a_row += 1
    return failures, names[first:]


def insists_on_others(load_weights: Loader, specs: Sequence[TensorSpec]) -> bool:
    """Whether a loader fails if it gets these tensors alone, e.g. because it counts at its end what it has loaded."""
    tracer = Tracer(specs, casts=CastRule(any=True))
    try:
        with intercepted(inline), PythonGuard(tracer), tracer:
            load_weights(tracer.feed(spec.name for spec in specs))
    except Exception as error:
        return not _needs_values(error)
    return False


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error) or "meta device" in str(error)


def _mismatch(name: str, error: Exception) -> Mismatch:
    """The mismatch for a loader's exception. Loaders look up names in dicts and assert shapes."""
    text = _said(error)
    says_unknown = any(word in str(error).lower() for word in ("no module", "no parameter", "unexpected", "unknown"))
    if isinstance(error, (KeyError, AttributeError)) or says_unknown:
        return Mismatch("unknown", name, f"the model has no such parameter ({text})")
    if isinstance(error, (RuntimeError, AssertionError, ValueError, IndexError)):
        return Mismatch("shape", name, text)
    return Mismatch("loader", name, text)


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= LONGEST_SAID else f"{text[:LONGEST_SAID]}…"
