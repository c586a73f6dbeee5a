"""Which requests wait for the last step of others, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_memory_plugins.engines.sglang.last_step import PASSES, LastStep

UPDATE = SimpleNamespace(flush_cache=True)
OTHER = SimpleNamespace()


def batch(*ended: bool) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace(finished=lambda one=one: one) for one in ended])


def scheduler(**places: Any) -> Any:
    """A scheduler that is idle, but for these places."""
    state = {"running_batch": batch(), "last_batch": None, "waiting_queue": [], "_engine_paused": False} | places

    def is_fully_idle() -> bool:
        batches = [made.running_batch, made.last_batch, *(one for one, _ in getattr(made, "result_queue", ()))]
        return not (made.waiting_queue or any(one.reqs for one in batches if one is not None))

    made = SimpleNamespace(**state, is_fully_idle=is_fully_idle)
    return made


def last_step(made: Any, others: tuple[str, ...] = ()) -> LastStep:
    """`others`: what other ranks find."""
    return LastStep(made, SimpleNamespace(gather=lambda mine: [mine, *others]))  # type: ignore[arg-type]


LAST_STEPS = [
    {"running_batch": batch(True)},
    {"last_batch": batch(True, True)},
    {"result_queue": [(batch(True), "its result")]},
]


@pytest.mark.parametrize("places", LAST_STEPS)
def test_an_update_and_what_follows_it_wait_for_the_last_step(places: dict[str, Any]) -> None:
    made = scheduler(**places)
    step = last_step(made)
    assert step.pass_on([OTHER, UPDATE, OTHER]) == [OTHER]
    assert step.pass_on([UPDATE]) == []
    assert step.held == [UPDATE, OTHER, UPDATE]
    made.running_batch, made.last_batch, made.result_queue = batch(), None, []
    assert step.pass_on([OTHER]) == [UPDATE, OTHER, UPDATE, OTHER]
    assert step.held == []


BUSY = [
    {"running_batch": batch(True, False)},
    {"last_batch": batch(False), "running_batch": batch(True)},
    {"running_batch": batch(True), "waiting_queue": ["a request"]},
    {"running_batch": batch(True), "_engine_paused": True},
]


@pytest.mark.parametrize("places", [*BUSY, {}])
def test_an_update_is_refused_at_once_while_requests_run_and_obeyed_at_once_while_none_do(places: Any) -> None:
    step = last_step(scheduler(**places))
    assert step.pass_on([UPDATE]) == [UPDATE]


def test_what_flushes_nothing_does_not_wait() -> None:
    step = last_step(scheduler(running_batch=batch(True)))
    requests = [OTHER, SimpleNamespace(flush_cache=False)]
    assert step.pass_on(requests) == requests


@pytest.mark.parametrize(("others", "waits"), [(("ending",), True), (("idle",), False), (("ending", "busy"), False)])
def test_ranks_with_requests_of_their_own_agree(others: tuple[str, ...], waits: bool) -> None:
    assert (last_step(scheduler(), others).pass_on([UPDATE]) == []) == waits


def test_an_update_does_not_wait_for_ever() -> None:
    step = last_step(scheduler(running_batch=batch(True)))
    for _ in range(2):
        assert [step.pass_on([]), step.pass_on([UPDATE])] == [[], []]
        for _ in range(PASSES - 1):
            assert step.pass_on([]) == []
        assert step.pass_on([]) == [UPDATE]
