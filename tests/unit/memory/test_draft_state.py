"""Whether a draft model goes with the target, through updates, loads by others and failures."""

from __future__ import annotations

import pytest

from rl_memory_plugins.memory.draft_state import DraftState
from rl_memory_plugins.tags import Draft, DraftShare


def draft(state: Draft = Draft.IN_STEP) -> DraftState:
    found = DraftState()
    found.found()
    found.state = state
    return found


@pytest.mark.parametrize("before", Draft)
@pytest.mark.parametrize(
    ("share", "complete", "after"),
    [
        (DraftShare.WHOLE, True, Draft.IN_STEP),
        (DraftShare.WHOLE, False, Draft.FAILED),
        (DraftShare.PART, False, Draft.FAILED),
    ],
)
def test_an_update_of_the_draft(before: Draft, share: DraftShare, complete: bool, after: Draft) -> None:
    state = draft(before)
    state.begin(share)
    state.finish(complete)
    assert state.state is after


@pytest.mark.parametrize("share", [DraftShare.NONE, DraftShare.PART])
def test_a_draft_stays_undefined_until_an_update_of_all_of_it(share: DraftShare) -> None:
    state = draft(Draft.FAILED)
    state.begin(share)
    state.finish(complete=True)
    assert state.state is Draft.FAILED


def test_an_update_of_the_target_alone_leaves_the_draft_behind() -> None:
    state = draft()
    state.begin(DraftShare.NONE)
    state.finish(complete=False)
    assert state.state is Draft.IN_STEP
    state.begin(DraftShare.NONE)
    state.finish(complete=True)
    assert state.state is Draft.OUT_OF_STEP


def test_loads_by_the_engine_s_own_calls() -> None:
    state = draft()
    state.note_target()
    assert state.state is Draft.OUT_OF_STEP
    state.note_draft(complete=True)
    assert state.state is Draft.IN_STEP
    state.note_draft(complete=False)
    assert state.state is Draft.FAILED


def test_without_a_draft_there_is_no_state() -> None:
    state = DraftState()
    state.begin(DraftShare.WHOLE)
    state.finish(complete=True)
    state.note_target()
    state.note_draft(complete=False)
    assert state.state is None
