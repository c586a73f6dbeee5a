"""Steps of a trainer whose process cannot start more threads, as where a container limits them."""

import contextlib
import itertools
from functools import partial

import pytest
from helpers import refuse_threads
from test_pausable import WIDTH, Tied, adamw, train
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer import PausableMemory, RolloutHandoff, push_from_all


@pytest.fixture
def refuse(monkeypatch):
    """See `refuse_threads`."""
    return partial(refuse_threads, monkeypatch)


def assert_has(engines, tensors):
    for engine in engines:
        assert engine.open
        for rank in engine.ranks:
            rank.model.assert_unchanged(loaded(tensors))


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_an_update_of_several_engines_names_those_that_did_not_get_it(refuse, monkeypatch, on_failure, once):
    engines = [ToyEngine(1, number) for number in range(3)]
    options = {"bucket_bytes": 512, "timeout_s": 30.0, "on_failure": on_failure}
    for number in itertools.count():
        tensors = checkpoint(number)
        refused = refuse(number, number + 1 if once else None)
        with contextlib.suppress(RLMemoryError):
            report = push_from_all(engines, tensors, **options)
            failed = {failure.engine for failure in report.get("failed", [])}
            assert_has([engine for place, engine in enumerate(engines) if place not in failed], tensors)
        monkeypatch.undo()
        if not refused:
            break
        push_from_all(engines, tensors, **options)
        assert_has(engines, tensors)
    assert number


@pytest.mark.parametrize("once", [True, False])
def test_a_handoff_goes_through_or_fails_with_a_typed_error(refuse, monkeypatch, once):
    engines = [ToyEngine(1, number) for number in range(2)]
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    tensors = checkpoint(1)
    weights, others = memory.part("parameters"), memory.part("gradients", "optimizer")
    handoff = RolloutHandoff(engines, tensors, weights=[weights], others=[others], bucket_bytes=512, timeout_s=30.0)
    with handoff.training():
        train(model, optimizer)
    for number in itertools.count():
        refused = refuse(number, number + 1 if once else None)
        with contextlib.suppress(RLMemoryError), handoff.training():
            train(model, optimizer)
        monkeypatch.undo()
        if not refused:
            break
        with handoff.training():
            train(model, optimizer)
        assert_has(engines, tensors)
    assert number
