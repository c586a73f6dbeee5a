"""Scores by late interaction over a reset of the caches, without an engine."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params

from rl_memory_plugins.engines.vllm.core import REFUSED, _native_reset_encoder_cache, _refuse_add
from rl_memory_plugins.engines.vllm.late_interaction import EncodedQueries


def request(name: str, late: Any = None, *, generates: bool = False) -> Any:
    params = None if generates else PoolingParams(task="token_embed", late_interaction_params=late)
    return SimpleNamespace(request_id=name, pooling_params=params, lora_request=None, client_index=0)


def query(name: str, documents: int = 1) -> Any:
    return request(name, build_late_interaction_query_params(name, documents))


def document(name: str, of: str) -> Any:
    return request(name, build_late_interaction_doc_params(of))


@pytest.fixture
def core() -> Any:
    """An engine core that admits requests. `log` has what it does, in order."""
    log: list[Any] = []
    scheduler = SimpleNamespace(requests={})
    scheduler.finish_requests = lambda numbers, status: [scheduler.requests.pop(number) for number in numbers]
    controller = SimpleNamespace(
        refusal=lambda: None, status=SimpleNamespace(busy="nothing of this test"), adapters=None
    )
    return SimpleNamespace(
        log=log,
        scheduler=scheduler,
        rl_memory=controller,
        rl_memory_queries=EncodedQueries(),
        input_queue=None,
        output_queue=queue.Queue(),
        _send_abort_outputs=lambda requests: log.append([one.request_id for one in requests]),
    )


def add(core: Any, one: Any) -> bool:
    """Returns: whether the core has taken the request."""
    if _refuse_add(lambda core, request: False)(core, one):
        return False
    core.scheduler.requests[one.request_id] = one
    return True


def reset(core: Any) -> None:
    _native_reset_encoder_cache(lambda core: core.log.append("reset"))(core)


def test_a_reset_ends_the_requests_of_scores_first(core: Any) -> None:
    """The query too: the documents would be compared with what two weights have computed of it, if it is frozen."""
    for one in (query("a"), document("b", "a"), query("c"), request("d"), request("e", generates=True)):
        assert add(core, one)
    reset(core)
    assert core.log == [["a", "b", "c"], "reset"]
    assert list(core.scheduler.requests) == ["d", "e"]
    reset(core)
    assert core.log[2:] == ["reset"]


def test_a_document_is_refused_whose_query_came_before_the_reset(core: Any) -> None:
    assert add(core, query("old", 2)) and add(core, document("first", "old"))
    reset(core)
    assert not add(core, document("second", "old"))
    _, outputs = core.output_queue.get_nowait()
    assert [(output.request_id, output.stop_reason) for output in outputs.outputs] == [("second", REFUSED)]
    assert add(core, query("new", 1)) and add(core, document("third", "new"))


def test_a_query_is_forgotten_with_its_last_document() -> None:
    """Else an engine without updates would keep the names of all queries."""
    queries = EncodedQueries()
    assert queries.admits(query("a", 2))
    assert [queries.admits(document(str(number), "a")) for number in range(3)] == [True, True, False]
    assert queries._documents == {}


def test_releases_without_late_interaction(core: Any) -> None:
    old = SimpleNamespace(request_id="a", pooling_params=SimpleNamespace(), lora_request=None, client_index=0)
    assert add(core, old)
    reset(core)
    assert core.log == ["reset"]


def test_a_query_is_forgotten_when_its_client_has_gone() -> None:
    queries = EncodedQueries()
    assert queries.admits(query("a", 9)) and queries.admits(query("b", 9))
    queries.note_call("another", (["a"],))
    queries.note_call("release_late_interaction_query_cache", (["a", "unknown"],))
    assert not queries.admits(document("1", "a")) and queries.admits(document("2", "b"))
