"""What was computed with older weights, and must not be found again after a change of the weights."""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rl_memory_plugins.engines.sglang import native_calls as native
from rl_memory_plugins.engines.sglang import scheduler_hooks as engine
from tests.sglang.test_engine import Ranks

IMAGE = 17


@pytest.fixture
def embeddings() -> Any:
    """SGLang's own cache of the installed release, with what a tower made of an image."""
    modules = [importlib.import_module(name) for name in engine.EMBEDDINGS if importlib.util.find_spec(name)]
    module = next(module for module in modules if hasattr(module, "embedding_cache"))
    assert module.embedding_cache is None
    module.init_mm_embedding_cache(1 << 20)
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    module.embedding_cache.set(IMAGE, EmbeddingResult(embedding=torch.ones(4)))
    assert module.embedding_cache.has(IMAGE)
    yield module.embedding_cache
    module.embedding_cache = None


class Scheduler(types.SimpleNamespace):
    """As far as a native handler looks at what was added to it."""

    def __init__(self) -> None:
        status = types.SimpleNamespace(busy="", asleep_tags=list)
        added = types.SimpleNamespace(
            config=types.SimpleNamespace(implicit_update_session=False),
            controller=types.SimpleNamespace(status=status, note_foreign_changes=lambda version: None),
            ranks=types.SimpleNamespace(gather=lambda mine: [mine]),
            worker=types.SimpleNamespace(
                region=nullcontext,
                draft_copies=False,
                agent=types.SimpleNamespace(loading=nullcontext),
                manager=types.SimpleNamespace(
                    draft=types.SimpleNamespace(note_draft=lambda complete: None), learn_unfilled=lambda: False
                ),
            ),
            updates=types.SimpleNamespace(record=nullcontext, wrote=True, settle=lambda: None),
            versions=types.SimpleNamespace(after_load=lambda version: version),
        )
        super().__init__(rl_memory=added)


def sleeping_scheduler() -> Any:
    return types.SimpleNamespace(weight_updater=types.SimpleNamespace(offload_tags={"kv_cache"}))


def test_embeddings_of_images_are_forgotten_while_the_kv_cache_sleeps(embeddings: Any) -> None:
    """Stock: they survive every flush, and a request with the same image gets the old tower's."""
    engine.SglangEngine(sleeping_scheduler(), Ranks(True)).reset_caches()  # type: ignore[arg-type]
    assert not embeddings.has(IMAGE)


def test_an_engine_without_images_has_nothing_to_forget() -> None:
    engine.SglangEngine(sleeping_scheduler(), Ranks(True)).reset_caches()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrap", [native._writing("update_weights_from_disk", False), native._in_agreement("end_weight_update", False)]
)
def test_embeddings_are_forgotten_by_sglang_s_own_updates(embeddings: Any, wrap: Callable[..., Any]) -> None:
    handler = wrap(lambda updater, recv_req: types.SimpleNamespace(success=True))
    updater = types.SimpleNamespace(scheduler=Scheduler())
    assert handler(updater, types.SimpleNamespace(flush_cache=False, model_path="")).success
    assert not embeddings.has(IMAGE)
