"""A begin or an end of SGLang's sessions that fails, which no small model on a CPU makes it do."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang.native_calls import _in_agreement, _writing
from rl_memory_plugins.engines.sglang.worker import Memory, RegionAdapter, SglangWorker
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from tests.sglang.test_worker import Model

OPEN = types.SimpleNamespace(selector="all")


class Updater(types.SimpleNamespace):
    """SGLang's, with a model that is there and a session that may be open.

    Args:
        others: What the other ranks tell of each call: a failure's message, or `None`.
    """

    def __init__(self, session: Any, others: tuple[Any, ...] = ()) -> None:
        config = RLMemoryConfig()
        memory = Memory(config, lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
        with RegionAdapter(memory, True).region("weights"):
            model = Model(1.0)
        worker = SglangWorker(model, memory, config, rank=0)
        self.noted = 0
        added = types.SimpleNamespace(
            config=config,
            controller=types.SimpleNamespace(
                status=types.SimpleNamespace(busy="", asleep_tags=list),
                note_foreign_changes=self.note,
                refresh=lambda: None,
            ),
            ranks=types.SimpleNamespace(gather=lambda mine: [mine, *others]),
            worker=worker,
            updates=EngineUpdates(worker.manager, model.named_parameters),
        )
        super().__init__(scheduler=types.SimpleNamespace(rl_memory=added), _session=session)

    def note(self, weight_version: str | None = None) -> None:
        self.noted += 1

    @property
    def content(self) -> Content:
        content: Content = self.scheduler.rl_memory.worker.manager.content
        return content


def session(updater: Any, recv_req: Any) -> Any:
    """SGLang's begin and end, as far as a call after them can see."""
    updater._session = None if updater._session else OPEN
    return types.SimpleNamespace(success=True, message="Success")


begin, end = _in_agreement("begin_weight_update", False)(session), _in_agreement("end_weight_update", False)(session)
ALL = types.SimpleNamespace(selector="all")


def broken(updater: Any, recv_req: Any) -> Any:
    raise RuntimeError("the layers are half restored")


@pytest.mark.parametrize(
    ("name", "session", "selector", "content"),
    [
        ("begin_weight_update", None, "all", Content.FAILED),
        ("begin_weight_update", None, "draft", Content.VALID),
        ("begin_weight_update", None, "nonsense", Content.VALID),
        ("begin_weight_update", OPEN, "all", Content.VALID),  # out of turn
        ("end_weight_update", OPEN, "all", Content.FAILED),
        ("end_weight_update", None, "all", Content.VALID),  # out of turn
    ],
)
def test_what_fails_in_a_session_leaves_no_valid_weights(
    name: str, session: Any, selector: str, content: Content
) -> None:
    """Stock: killed, or generating with layers that are restored for loading and not processed again."""
    updater = Updater(session)
    output = _in_agreement(name, False)(broken)(updater, types.SimpleNamespace(selector=selector))
    assert not output.success
    assert updater.content is content
    assert updater.noted == (content is Content.FAILED)


@pytest.mark.parametrize("content", [Content.VALID, Content.STALE])
def test_nothing_is_generated_within_a_session(content: Content) -> None:
    """Its begin may lay out weights anew, and bytes may come by RDMA: no handler of SGLang's sees either."""
    updater = Updater(None)
    updater.scheduler.rl_memory.worker.manager.content = content
    assert begin(updater, ALL).success
    assert updater.content is Content.UPDATING
    assert end(updater, ALL).success
    assert updater.content is content


def test_a_session_of_a_draft_model_closes_nothing() -> None:
    updater = Updater(None)
    assert begin(updater, types.SimpleNamespace(selector="draft")).success
    assert updater.content is Content.VALID


@pytest.mark.parametrize(("call", "opened"), [(begin, None), (end, OPEN)])
def test_no_rank_keeps_a_session_that_another_has_not(call: Any, opened: Any) -> None:
    """Stock: ranks that keep it refuse the next begin, while the others wait for them in a barrier."""
    updater = Updater(opened, others=("out of memory",))
    assert not call(updater, ALL).success
    assert updater._session is None
    assert updater.content is Content.FAILED


@pytest.mark.parametrize(
    ("has_draft", "writes", "success"),
    [(True, "draft", True), (True, "", False), (False, "draft", False), (False, "target", True)],
)
def test_a_bucket_of_draft_tensors_only_is_a_success(has_draft: bool, writes: str, success: bool) -> None:
    """slime sends the tensors of all layers in buckets, and aborts if a bucket of the MTP layer alone fails."""
    updater = Updater(None)
    draft = Model(2.0)
    updater.draft_worker = object() if has_draft else None
    models = {"draft": draft, "target": updater.scheduler.rl_memory.worker._model}

    def update(updater: Any, recv_req: Any) -> Any:
        if writes:
            models[writes].weight.data.copy_(torch.full_like(models[writes].weight, 5.0))
        return types.SimpleNamespace(success=True, message="Success")

    handler = _writing("update_weights_from_tensor", False)(update)
    answer = handler(updater, types.SimpleNamespace(flush_cache=False, weight_version=None))
    assert answer.success is success
    assert updater.content is Content.VALID
