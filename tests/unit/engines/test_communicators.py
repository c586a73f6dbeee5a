"""A custom all-reduce must not let other ranks read the memory of CUDA graphs. Stand-ins for the engines' classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from rl_memory_plugins.engines import communicators


class AllReduce:
    """As in vLLM before 0.32: a capture calls `all_reduce` with `registered=True`."""

    disabled = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def all_reduce(self, inp: str, *, out: Any = None, registered: bool = False) -> str:
        self.calls.append((inp, registered))
        return inp


class WithSwitch:
    """As in vLLM since 0.32."""

    disabled = False

    def __init__(self) -> None:
        self._capture_registered = True


class Saver(AllReduce):
    """As in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        self.tms_cudagraph = False


class SecondVersion:
    """As in SGLang 0.5.23."""

    disabled = False

    def __init__(self) -> None:
        self._is_graph_mode_supported = True


class Unknown:
    disabled = False


class Off:
    """As in an engine whose GPUs cannot read each other's memory: it has no attributes."""

    disabled = True


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "_all_reduces", weakref.WeakSet())
    monkeypatch.setattr(communicators, "_staging", False)


def made(kind: Callable[..., Any]) -> Any:
    """An instance, as the engine makes it once the hook is in place."""
    instance = object.__new__(kind)  # type: ignore[call-overload]
    communicators.note_custom_all_reduce(kind.__init__)(instance)
    return instance


def test_each_engine_s_own_switch_is_used() -> None:
    vllm, saver, second, off = made(WithSwitch), made(Saver), made(SecondVersion), made(Off)
    assert communicators.stage_captures()
    assert vllm._capture_registered is False
    assert saver.tms_cudagraph is True
    assert "all_reduce" not in vars(saver)
    assert second._is_graph_mode_supported is False
    assert vars(off) == {}


def test_without_a_switch_the_all_reduce_copies_in_captures() -> None:
    old = made(AllReduce)
    assert communicators.stage_captures()
    assert communicators.stage_captures()  # a second region of weights, of a draft model
    assert old.all_reduce("captured", registered=True) == "captured"
    assert old.all_reduce("eager") == "eager"
    assert old.calls == [("captured", False), ("eager", False)]


def test_what_is_made_later_registers_nothing_either() -> None:
    assert communicators.stage_captures()
    assert made(WithSwitch)._capture_registered is False
    assert made(Unknown).disabled is True


def test_one_that_cannot_copy_leaves_all_as_they_are() -> None:
    known, unknown = made(WithSwitch), made(Unknown)
    assert not communicators.stage_captures()
    assert known._capture_registered is True
    assert unknown.disabled is False
    assert made(WithSwitch)._capture_registered is True
