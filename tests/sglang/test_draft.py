"""The draft model of a scheduler, without an engine: how an update reaches it. No CPU build speculates."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.sglang import worker as sglang_worker
from rl_memory_plugins.engines.sglang.draft import has_copies, runners_of
from rl_memory_plugins.engines.sglang.native_calls import _note_draft
from rl_memory_plugins.engines.sglang.worker import Memory, RegionAdapter, SglangWorker
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.tags import Draft, DraftShare
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec

WIDTH = 8


class Model(torch.nn.Module):
    """Takes its own names, and skips all others as models do that share a checkpoint."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].data.copy_(tensor)


def made(target: Model, *drafts: Model, path: str = "draft", copies: bool = False) -> SglangWorker:
    arguments = types.SimpleNamespace(model_path="target", revision=None)
    memory = Memory(RLMemoryConfig(), lambda: ("cpu", 0), arguments)
    with RegionAdapter(memory, True).region("weights"):
        pass
    for model in (target, *drafts):
        post_load.attach(model)
    config = types.SimpleNamespace(model_path=path, revision=None)
    runners = [types.SimpleNamespace(model=draft, model_config=config) for draft in drafts]
    return SglangWorker(target, memory, RLMemoryConfig(), 0, drafts=runners, draft_copies=copies)


def plan(worker: SglangWorker, *names: str) -> Any:
    loader = worker.agent.receiver._model
    manifest = Manifest([TensorSpec(name, "float32", (WIDTH,)) for name in names])
    return loader.plan(manifest, loader.drop_outdated())


def apply(found: Any, **values: float) -> None:
    for name in found.steps:
        found.apply(name, torch.full((WIDTH,), values[name.replace(".", "_")]))


def test_an_update_reaches_both_models() -> None:
    target, draft = Model("weight"), Model("weight", "fc")
    worker = made(target, draft)
    found = plan(worker, "weight", "draft.weight", "draft.fc")
    assert found.draft_share is DraftShare.WHOLE
    apply(found, weight=1.0, draft_weight=2.0, draft_fc=3.0)
    assert [float(tensor[0]) for tensor in (target.weight, draft.weight, draft.fc)] == [1.0, 2.0, 3.0]


def test_mtp_layers_come_with_the_target_s_checkpoint() -> None:
    target, draft = Model("weight", "embedding"), Model("mtp", "embedding")
    draft.embedding = target.embedding  # `set_embed_and_head`
    worker = made(target, draft, path="target")
    found = plan(worker, "weight", "embedding", "mtp")
    assert found.draft_share is DraftShare.WHOLE
    apply(found, weight=1.0, embedding=2.0, mtp=3.0)
    assert [float(tensor[0]) for tensor in (target.weight, target.embedding, draft.mtp)] == [1.0, 2.0, 3.0]
    assert plan(worker, "weight", "embedding").draft_share is DraftShare.NONE


def test_a_draft_of_its_own_checkpoint_takes_no_name_of_the_target_s() -> None:
    worker = made(Model("weight"), Model("weight"))
    assert plan(worker, "weight").draft_share is DraftShare.NONE


def test_the_status_shows_the_draft() -> None:
    worker = made(Model("weight"), Model("weight"))
    assert worker.manager.status().draft is Draft.IN_STEP
    worker.manager.begin_writing()
    worker.manager.finish_writing(complete=True)
    assert worker.manager.status().draft is Draft.OUT_OF_STEP
    assert made(Model("weight")).manager.status().draft is None


@pytest.mark.parametrize(
    ("selector", "success", "state"),
    [
        ("all", True, Draft.IN_STEP),
        ("draft", True, Draft.IN_STEP),
        ("target", True, Draft.OUT_OF_STEP),
        ("draft", False, Draft.FAILED),
    ],
)
def test_sglang_s_own_updates(selector: str, success: bool, state: Draft) -> None:
    worker = made(Model("weight"), Model("weight"))
    worker.manager.note_foreign_load(complete=True)
    _note_draft(types.SimpleNamespace(worker=worker), types.SimpleNamespace(selector=selector), success=success)
    assert worker.manager.status().draft is state


def test_several_draft_models_stay_as_they_are() -> None:
    worker = made(Model("weight"), Model("mtp"), Model("mtp"), path="target")
    with pytest.raises(UnsupportedError, match="each of 2 steps"):
        plan(worker, "weight", "draft.mtp")
    assert worker.manager.status().draft is Draft.IN_STEP


def test_a_draft_with_copies_stays_as_it_is() -> None:
    worker = made(Model("weight"), Model("mtp"), path="target", copies=True)
    with pytest.raises(UnsupportedError, match="copies of weights"):
        plan(worker, "weight", "draft.mtp")
    assert worker.manager.status().draft is Draft.IN_STEP
    worker.manager.note_foreign_load(complete=True)
    _note_draft(types.SimpleNamespace(worker=worker), types.SimpleNamespace(selector="all"), success=True)
    assert worker.manager.status().draft is Draft.OUT_OF_STEP
    _note_draft(types.SimpleNamespace(worker=worker), types.SimpleNamespace(selector="all"), success=False)
    assert worker.manager.status().draft is Draft.FAILED


def test_which_drafts_have_copies() -> None:
    """The attributes by which they are found are SGLang's."""
    from sglang.srt.models import dspark
    from sglang.srt.speculative import dflash_worker_v2, eagle_worker_v2

    def scheduler(model: Any, **attributes: Any) -> Any:
        runners = [("draft", types.SimpleNamespace(model=model))]
        worker = types.SimpleNamespace(weight_update_runners=lambda: runners, **attributes)
        return types.SimpleNamespace(draft_worker=worker)

    assert "self._fused_kv_helper = " in inspect.getsource(dflash_worker_v2)
    assert "self._fused_kv_write_cache = " in inspect.getsource(dspark)
    assert has_copies(scheduler(Model("mtp"), _fused_kv_helper=object()))
    assert has_copies(scheduler(types.SimpleNamespace(_fused_kv_write_cache=None)))
    assert not has_copies(scheduler(Model("mtp"), _fused_kv_helper=None))
    assert not has_copies(types.SimpleNamespace())

    assert "head.data = head.data[self.hot_token_id]" in inspect.getsource(eagle_worker_v2)
    mapped = types.SimpleNamespace(hot_token_id=torch.tensor([3, 1]))
    eagle, eagle3 = Model("fc"), types.SimpleNamespace(hot_token_id=mapped.hot_token_id)
    assert has_copies(scheduler(eagle, draft_worker=mapped))
    assert not has_copies(scheduler(eagle, draft_worker=types.SimpleNamespace(hot_token_id=None)))
    assert not has_copies(scheduler(eagle3, draft_worker=mapped))


def test_the_draft_is_found_where_each_release_keeps_it() -> None:
    runner = types.SimpleNamespace()
    new = types.SimpleNamespace(weight_update_runners=lambda: [("draft", runner)])
    inner = types.SimpleNamespace(draft_worker=types.SimpleNamespace(draft_runner=runner))
    old = types.SimpleNamespace(model_runner=runner)
    for worker in (new, inner, old):
        assert runners_of(types.SimpleNamespace(draft_worker=worker)) == [runner]
    for worker in (None, types.SimpleNamespace(weight_update_runners=list)):
        assert runners_of(types.SimpleNamespace(draft_worker=worker)) == []
    assert runners_of(types.SimpleNamespace()) == []


def test_each_model_keeps_what_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes the load format of the draft, and later the path of an update from disk, into its options."""
    options = types.SimpleNamespace(model_path="target", revision="first", load_format="auto")
    memory = Memory(RLMemoryConfig(), lambda: ("cpu", 0), options)
    monkeypatch.setattr(sglang_worker, "_memory", memory)
    with RegionAdapter(memory, True).region("weights"):
        make = sglang_worker._initialize_model(lambda config, load_config: Model("weight"))
        target = make(None, types.SimpleNamespace(load_format="auto"))
        draft = make(None, types.SimpleNamespace(load_format="dummy"))
    options.load_format = "dummy"
    config = types.SimpleNamespace(model_path="draft", revision=None)
    runner = types.SimpleNamespace(model=draft, model_config=config)
    loader: Any = SglangWorker(target, memory, RLMemoryConfig(), 0, drafts=[runner]).agent.receiver._model
    assert not loader._target.dummy()
    assert loader._draft.dummy()
    options.model_path = config.model_path = "an update"
    assert memory.checkpoint() == ("target", "first")
    assert not loader._one_checkpoint()
