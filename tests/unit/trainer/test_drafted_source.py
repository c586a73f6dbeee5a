"""The target's and the draft's tensors as one source."""

from __future__ import annotations

import torch

from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.trainer.sources.drafted import with_draft
from rl_memory_plugins.trainer.update import require_options

TARGET = {"a": torch.ones(2), "b": torch.zeros(3)}
DRAFT = {"a": torch.full((4,), 2.0)}


def test_the_draft_s_names_have_a_prefix_and_come_last() -> None:
    source = with_draft(ModelSource(TARGET), ModelSource(DRAFT))
    assert [(spec.name, spec.shape) for spec in source.specs()] == [("a", (2,)), ("b", (3,)), ("draft.a", (4,))]
    found = dict(source.tensors())
    assert list(found) == ["a", "b", "draft.a"]
    assert torch.equal(found["draft.a"], DRAFT["a"])


def test_tensors_that_exist_need_no_staging() -> None:
    resident = with_draft(ModelSource(TARGET), ModelSource(DRAFT)).resident()  # type: ignore[attr-defined]
    assert [id(tensor) for tensor in resident] == [id(tensor) for tensor in (*TARGET.values(), *DRAFT.values())]
    cast = ModelSource(DRAFT, dtype=torch.bfloat16)
    assert with_draft(ModelSource(TARGET), cast).resident() is None  # type: ignore[attr-defined]


def test_without_a_draft_the_source_stays_as_it_is() -> None:
    source = ModelSource(TARGET)
    assert with_draft(source, None) is source


def test_a_draft_is_an_option_of_a_handoff() -> None:
    require_options({"draft": DRAFT, "bucket_bytes": 1 << 20})
