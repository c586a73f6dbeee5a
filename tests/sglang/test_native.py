"""SGLang's own control calls on a server with the plugin: what ends the stock server is answered here.

Each docstring names the stock engine's way of failing. The `server` fixture then demands that the server lives,
wakes, and answers as before.
"""

from __future__ import annotations

import base64
import io
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.multiprocessing

from integration.engines.base import Server
from integration.models import SHAPES, write_model
from integration.waiting import wait_until
from tests.sglang.conftest import OTHER_SEED, PROMPT, WATCHDOG_S

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
UPDATE = "/update_weights_from_tensor"
LONG = 600  # tokens: some seconds
NAME = "model.norm.weight"
ALL = ["cuda_graph", "kv_cache", "weights"]


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return server.http.post(route, json=body)


def serialized(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What `sglang.srt.utils.MultiprocessingSerializer` makes of named tensors."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode()


def native_update(server: Server, tensors: Iterable[tuple[str, torch.Tensor]], **body: Any) -> httpx.Response:
    named = [(name, tensor.detach().clone()) for name, tensor in tensors]  # kept until the answer
    return post(server, UPDATE, serialized_named_tensors=[serialized(named)], **body)


def asleep(server: Server) -> list[str]:
    """The tags that any rank of the engine has released."""
    ranks = [rank for engine in server.control.memory()["engines"] for rank in engine["ranks"]]
    return sorted({tag for rank in ranks for tag, held in rank["tags"].items() if held["state"] != "resident"})


def message_of(response: httpx.Response) -> str:
    body = response.json()
    error = body.get("error", body)
    return str(error["message"])


# -- release and resume -------------------------------------------------------------------------------------


def test_release_while_busy(server: Server) -> None:
    """Stock: `AssertionError: release_memory_occupation should be called only when no ongoing request`, killed."""
    with server.generating(PROMPT, LONG) as request:
        response = post(server, RELEASE)
        assert response.status_code == 400
        assert "requests are running" in message_of(response)
        assert not server.control.is_sleeping()
    assert len(server.kind.tokens(request.answer())) == LONG


def test_resume_of_what_was_not_released(server: Server, first_tokens: list[int]) -> None:
    """Stock: `KeyError` from `offload_tags.remove`, killed."""
    for body in ({}, {"tags": ["weights"]}, {"tags": ["kv_cache", "weights"]}):
        assert post(server, RESUME, **body).status_code == 200
    assert server.generate(PROMPT) == first_tokens


def test_resume_of_one_released_and_one_not(server: Server) -> None:
    """Stock: `KeyError`, killed, and the tags named before are already taken out of `offload_tags`."""
    assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
    assert post(server, RESUME, tags=["kv_cache", "weights"]).status_code == 200
    assert asleep(server) == []


@pytest.mark.parametrize("route", [RELEASE, RESUME])
def test_an_unknown_tag(server: Server, first_tokens: list[int], route: str) -> None:
    """Stock: a resume is a `KeyError`, killed; a release is accepted and stays in `offload_tags` for ever."""
    response = post(server, route, tags=["wieghts"])
    assert response.status_code == 400
    assert "wieghts" in message_of(response) and "kv_cache" in message_of(response)
    assert asleep(server) == []
    assert server.generate(PROMPT) == first_tokens


def test_an_unknown_tag_beside_a_known_one_releases_nothing(server: Server) -> None:
    """Stock: the known tag is released, the unknown one is noted as released."""
    assert post(server, RELEASE, tags=["kv_cache", "wieghts"]).status_code == 400
    assert asleep(server) == []


def test_double_release(server: Server, first_tokens: list[int]) -> None:
    """Stock: Python accepts it and torch_memory_saver ends the process with `exit(1)`."""
    for _ in range(2):
        assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
        assert asleep(server) == ["kv_cache"]
    assert post(server, RESUME, tags=["kv_cache"]).status_code == 200
    assert server.generate(PROMPT) == first_tokens


def test_double_release_of_the_weights(server: Server, first_weights: Any, first_tokens: list[int]) -> None:
    """Stock: the second release clones the buffers it has unmapped, and `del stashed` breaks a later one.

    On a CPU the first already fails: `torch.cuda.synchronize` raises in the scheduler, killed.
    """
    for _ in range(2):
        for _ in range(2):
            assert post(server, RELEASE, tags=["weights"]).status_code == 200
            assert asleep(server) == ["weights"]
        for _ in range(2):
            assert post(server, RESUME, tags=["weights"]).status_code == 200
        assert native_update(server, first_weights.state_dict().items()).json()["success"] is True
        assert server.generate(PROMPT) == first_tokens  # the buffers are in no update


def test_double_resume(server: Server, first_tokens: list[int]) -> None:
    """Stock: `KeyError` from the second, killed."""
    assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
    for _ in range(2):
        assert post(server, RESUME, tags=["kv_cache"]).status_code == 200
    assert server.generate(PROMPT) == first_tokens


def test_a_release_and_a_sleep_share_one_state(server: Server, first_tokens: list[int]) -> None:
    """Stock: two callers that do not know of each other release twice, see above."""
    server.control.sleep(1)
    assert post(server, RELEASE).status_code == 200
    assert post(server, RESUME).status_code == 200
    assert server.generate(PROMPT) == first_tokens  # the sleep had preserved the weights, and that holds


def test_health_while_asleep(server: Server) -> None:
    """Stock: `/health` runs a forward pass on unmapped weights, or answers 503, and a router takes it out."""
    assert post(server, RELEASE).status_code == 200
    for route in ("/health", "/health_generate"):
        assert server.http.get(route).status_code == 200
    assert asleep(server) == ALL


def test_generation_while_asleep(server: Server) -> None:
    """Stock: the forward pass reads unmapped memory."""
    assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
    response = server.post(PROMPT)
    assert response.status_code == 503
    assert response.json()["error"]["details"]["reason"] == "asleep"


# -- updates ------------------------------------------------------------------------------------------------


def test_an_update_with_a_wrong_shape(server: Server, first_tokens: list[int]) -> None:
    """Stock: the loader's `AssertionError` or `RuntimeError` ends the scheduler, killed."""
    response = native_update(server, [(NAME, torch.zeros(7))])
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert message_of(response)


def test_an_update_with_an_unknown_name(server: Server, first_tokens: list[int]) -> None:
    """Stock: a warning in the log and `success: true`; the trainer believes the weights are there."""
    response = native_update(server, [("model.nonsense", torch.zeros(7))])
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert server.control.memory()["content"] == "valid"  # nothing was written
    assert server.generate(PROMPT) == first_tokens


def test_an_update_with_an_unknown_format(server: Server, first_tokens: list[int]) -> None:
    """Stock: `NotImplementedError: Unknown load_format`, killed."""
    response = native_update(server, [(NAME, torch.ones(256))], load_format="nonsense")
    assert response.status_code == 400
    assert "nonsense" in message_of(response)
    assert server.generate(PROMPT) == first_tokens


def test_an_update_that_cannot_be_read(server: Server, first_tokens: list[int]) -> None:
    """Stock: an unpickling error in the scheduler, killed."""
    garbage = base64.b64encode(b"no pickle").decode()
    response = post(server, UPDATE, serialized_named_tensors=[garbage])
    assert response.status_code == 400
    assert server.generate(PROMPT) == first_tokens


def test_an_update_while_the_weights_are_asleep(server: Server, first_weights: Any) -> None:
    """Stock: writes into unmapped memory, or into memory that the next resume throws away."""
    assert post(server, RELEASE, tags=["weights"]).status_code == 200
    response = native_update(server, first_weights.state_dict().items())
    assert response.status_code == 400
    assert "asleep" in message_of(response)
    assert asleep(server) == ["weights"]


@pytest.mark.parametrize("tag", ["kv_cache", "cuda_graph"])
def test_an_update_that_captures_graphs_anew_while_something_sleeps(
    server: Server, tag: str, model_folder: Path, first_tokens: list[int]
) -> None:
    """Stock: the capture runs the model on memory that is not there."""
    server.control.sleep(1, [tag])
    disk = {"model_path": str(model_folder)}
    response = post(server, "/update_weights_from_disk", **disk, recapture_cuda_graph=True)
    assert response.json()["success"] is False
    assert f"{tag} asleep" in message_of(response)
    assert post(server, "/update_weights_from_disk", **disk).json()["success"] is True
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_a_flush_while_the_kv_cache_is_asleep(server: Server, first_weights: Any, first_tokens: list[int]) -> None:
    """Stock: it sets parts of it to zero. What is kept meanwhile is no reason against it."""
    with server.generating(PROMPT, LONG) as request:
        server.control.sleep(1, ["kv_cache"], mode="keep")
        assert server.http.post("/flush_cache").status_code == 200
        tensors = [(NAME, first_weights.state_dict()[NAME])]
        assert native_update(server, tensors, flush_cache=True).json()["success"] is True
        server.control.wake_up()
    assert len(server.kind.tokens(request.answer())) == LONG
    assert server.generate(PROMPT) == first_tokens


def test_an_update_while_requests_are_paused_in_place(server: Server, first_weights: Any) -> None:
    """Stock: `AssertionError: Cache flush failed after updating weights`, killed."""
    tensors = [(NAME, first_weights.state_dict()[NAME])]
    with server.generating(PROMPT, LONG) as request:
        assert post(server, "/pause_generation", mode="in_place").status_code == 200
        response = native_update(server, tensors)
        assert response.status_code == 400
        assert "running" in message_of(response)
        assert native_update(server, tensors, flush_cache=False).status_code == 200  # for those who mean it
        assert post(server, "/continue_generation").status_code == 200
    assert len(server.kind.tokens(request.answer())) == LONG


@pytest.mark.parametrize("mode", ["keep", pytest.param("in_place", marks=pytest.mark.long)])
def test_an_update_while_requests_are_kept_over_a_sleep(
    server: Server, mode: str, first_weights: Any, model_folder: Path
) -> None:
    """Stock: on an engine that is not paused, an update waits for running requests to end; kept ones do not."""
    with server.generating(PROMPT, LONG) as request:
        if mode == "in_place":
            assert post(server, "/pause_generation", mode=mode).status_code == 200
        server.control.sleep(2, mode="keep")
        server.control.wake_up(["weights"])
        tensors = list(first_weights.state_dict().items())
        assert native_update(server, tensors, flush_cache=False).status_code == 200
        assert server.control.memory()["content"] == "valid"
        from_disk = post(server, "/update_weights_from_disk", model_path=str(model_folder), flush_cache=False)
        assert from_disk.json()["success"] is True, from_disk.text
        server.control.wake_up()
        if mode == "in_place":
            assert post(server, "/continue_generation").status_code == 200
    assert len(server.kind.tokens(request.answer())) == LONG


def load_once_idle(server: Server, path: Path, **body: Any) -> dict[str, Any]:
    """Load a checkpoint. For a moment after its answer SGLang counts a request, and would flush no cache beside it."""
    answer: dict[str, Any] = {}

    def is_taken() -> bool:
        answer.update(post(server, "/update_weights_from_disk", model_path=str(path), **body).json())
        return "requests are running" not in answer["message"]

    wait_until(is_taken, "SGLang counts a request that it has answered")
    return answer


def test_a_version_of_weights_from_disk(server: Server, model_folder: Path, tmp_path: Path) -> None:
    """Stock: without a name the former version goes on to name other weights."""
    folder = write_model(tmp_path / "other", SHAPES["tiny"], seed=OTHER_SEED)

    def load(path: Path, **body: Any) -> str:
        answer = load_once_idle(server, path, **body)
        assert answer["success"] is True, answer
        version = server.control.weight_version()
        assert server.post(PROMPT).json()["meta_info"]["weight_version"] == version
        assert answer["message"].endswith(f"Weight version updated to {version}.")
        return version

    assert load(folder, weight_version="mine") == "mine"
    assert load(model_folder) != "mine"
    assert load(folder) == "mine"
    assert load(folder, weight_version="again") == "again"
    again = load_once_idle(server, folder)
    assert again["success"] is True and "version" not in again["message"], again  # equal weights
    assert server.control.weight_version() == "again"


def test_two_updates_from_disk_at_once_while_closed(server: Server, model_folder: Path) -> None:
    """Stock, while paused: both answers go to the second, `InvalidStateError`, killed."""
    server.control.sleep(2)
    server.control.wake_up(["weights"])
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(post, server, "/update_weights_from_disk", model_path=str(model_folder)) for _ in range(2)]
        assert [job.result(timeout=60).json()["success"] for job in jobs] == [True, True]


def test_an_update_through_a_group_that_does_not_exist(server: Server, first_tokens: list[int]) -> None:
    """Stock: `AssertionError: Group … not in …`, killed in some releases."""
    response = post(
        server,
        "/update_weights_from_distributed",
        names=[NAME],
        dtypes=["float32"],
        shapes=[[256]],
        group_name="none",
    )
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize("body", [{"zmq_handles": 5}, {"zmq_handles": {"gpu": None}}, {"zmq_handles": {}, "x": [1]}])
def test_an_update_by_ipc_whose_body_is_wrong(server: Server, first_tokens: list[int], body: dict[str, Any]) -> None:
    """SGLang's route checks its bodies, also behind ours of the same path."""
    response = post(server, "/update_weights_from_ipc", **body)
    assert response.status_code == 400, response.text
    assert "rl_memory_error" not in response.text
    assert server.generate(PROMPT) == first_tokens


def test_sessions_and_checks_while_asleep(server: Server) -> None:
    """Stock: all read or process unmapped weights."""
    assert post(server, RELEASE, tags=["weights"]).status_code == 200
    calls = (
        ("/begin_weight_update", {}),
        ("/weights_checker", {"action": "checksum"}),
        ("/send_weights_to_remote_instance", {"master_address": "127.0.0.1", "ports": "1"}),
    )
    for route, body in calls:
        response = post(server, route, **body)
        assert response.json()["success"] is False, route
        assert "asleep" in message_of(response), route


def test_sglangs_own_reset_closes_the_engine_until_an_update(
    server: Server, first_weights: Any, first_tokens: list[int]
) -> None:
    """Stock: generates with random weights. SGLang's tests of updates do so, and compare at the end, on a GPU."""
    assert post(server, "/weights_checker", action="reset_tensors").json()["success"] is True
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    assert native_update(server, first_weights.state_dict().items()).json()["success"] is True
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens


def test_a_complete_update_makes_stale_weights_valid(
    server: Server, other_weights: Any, first_tokens: list[int]
) -> None:
    """As slime and verl send them: in parts, without begin and end of a session (`implicit_update_session`).

    Stock: nothing knows whether what was resumed has been written since.
    """
    assert post(server, RELEASE).status_code == 200
    assert post(server, RESUME).status_code == 200
    assert server.post(PROMPT).json()["error"]["details"]["reason"] == "stale"
    items = list(other_weights.state_dict().items())
    assert native_update(server, items[:20]).json()["success"] is True
    assert server.control.memory()["content"] == "stale"
    assert native_update(server, items[20:], weight_version="native-7").json()["success"] is True
    assert server.control.memory()["content"] == "valid"
    assert server.control.weight_version() == "native-7"
    ours = server.generate(PROMPT)
    assert ours != first_tokens
    checksums = server.control.checksums()
    server.control.update_weights(other_weights)
    assert server.generate(PROMPT) == ours
    assert server.control.checksums() == checksums


def test_a_failed_update_leaves_no_mixture_behind(server: Server, other_weights: Any) -> None:
    """Stock: killed, or, where it lives, generating with half of the new weights."""
    items = [item for item in other_weights.state_dict().items() if item[0] != NAME]
    response = native_update(server, [*items, (NAME, torch.zeros(7))])
    assert response.status_code == 400
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503


def test_a_session_is_one_update_from_its_begin_to_its_end(server: Server, first_weights: Any) -> None:
    """Stock: between its calls, and if the trainer dies then, half of the new weights answer."""
    items = list(first_weights.state_dict().items())
    with server.generating(PROMPT, LONG) as request:
        assert post(server, "/pause_generation", mode="retract").status_code == 200
        assert post(server, "/begin_weight_update").json()["success"] is True
        assert server.control.memory()["content"] == "updating"
        request.assert_running()
        assert native_update(server, items[:5]).json()["success"] is True
        assert server.control.memory()["content"] == "updating"
        assert post(server, "/continue_generation").status_code == 200
        assert server.post(PROMPT).json()["error"]["details"]["reason"] == "updating"
        assert native_update(server, items[5:9]).json()["success"] is True
        assert server.control.memory()["content"] == "updating"
        request.assert_running()
        assert post(server, "/end_weight_update").json()["success"] is True
        assert server.control.memory()["content"] == "valid"  # some weights of valid ones were replaced
    assert len(server.kind.tokens(request.answer())) == LONG


def test_a_request_behind_a_pause_waits_for_the_update(server: Server, other_weights: Any, first_weights: Any) -> None:
    """As in stock SGLang. Trainers that pause, update bucket by bucket and continue keep sending requests meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        for items, version in ((other_weights, "held"), (first_weights, "after")):
            assert post(server, "/pause_generation").status_code == 200
            assert post(server, "/begin_weight_update").json()["success"] is True
            assert server.control.memory()["content"] == "updating"
            request = pool.submit(server.post, PROMPT)
            tensors = list(items.state_dict().items())
            assert native_update(server, tensors, weight_version=version).json()["success"] is True
            with pytest.raises(TimeoutError):
                request.result(timeout=1)
            assert post(server, "/end_weight_update").json()["success"] is True
            assert post(server, "/continue_generation").status_code == 200
            answer = request.result(timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["weight_version"] == version


def test_a_pause_that_ends_within_the_update_refuses_the_requests_behind_it(server: Server, first_weights: Any) -> None:
    assert post(server, "/pause_generation").status_code == 200
    assert post(server, "/begin_weight_update").json()["success"] is True
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.post, PROMPT)
        with pytest.raises(TimeoutError):
            request.result(timeout=1)
        assert post(server, "/continue_generation").status_code == 200
        answer = request.result(timeout=60)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["details"]["reason"] == "updating"
    assert native_update(server, first_weights.state_dict().items()).json()["success"] is True
    assert post(server, "/end_weight_update").json()["success"] is True


def test_a_session_with_a_failed_update_ends_in_a_complete_one(server: Server, first_weights: Any) -> None:
    items = list(first_weights.state_dict().items())
    assert post(server, "/begin_weight_update").json()["success"] is True
    assert native_update(server, items[:5]).json()["success"] is True
    assert native_update(server, [*items[5:9], (NAME, torch.zeros(7))]).json()["success"] is False
    assert server.control.memory()["content"] == "failed"
    assert native_update(server, items[:5]).json()["success"] is True
    assert post(server, "/end_weight_update").json()["success"] is True
    assert server.control.memory()["content"] == "failed"
    assert post(server, "/begin_weight_update").json()["success"] is True
    assert native_update(server, items).json()["success"] is True
    assert server.control.memory()["content"] == "updating"
    assert post(server, "/end_weight_update").json()["success"] is True
    assert server.control.memory()["content"] == "valid"


# -- pause and continue -------------------------------------------------------------------------------------


@pytest.mark.long
def test_continue_while_asleep_does_not_run(server: Server) -> None:
    """Stock: `continue_generation` runs the queued requests on released memory."""
    with server.generating(PROMPT, LONG) as request:
        assert post(server, "/pause_generation", mode="retract").status_code == 200
        assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
        assert post(server, "/continue_generation").status_code == 200
        time.sleep(1)  # whoever is wrong has the time to go on
        request.assert_running()
        assert asleep(server) == ["kv_cache"]
        assert server.post(PROMPT).status_code == 503
        assert post(server, RESUME, tags=["kv_cache"]).status_code == 200
    assert len(server.kind.tokens(request.answer())) == LONG


def test_in_place_pause_then_release(server: Server) -> None:
    """Stock: `AssertionError` on the release, killed: the paused requests still hold the cache."""
    with server.generating(PROMPT, LONG) as request:
        assert post(server, "/pause_generation", mode="in_place").status_code == 200
        assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
        assert asleep(server) == ["kv_cache"]
        assert post(server, RESUME, tags=["kv_cache"]).status_code == 200
        assert post(server, "/continue_generation").status_code == 200
    assert len(server.kind.tokens(request.answer())) == LONG


@pytest.mark.long
def test_requests_paused_in_place_outlast_the_watchdog(server: Server) -> None:
    """Stock: a batch that is paused in place for longer than the watchdog waits is taken for a hang, killed."""
    with server.generating(PROMPT, LONG) as request:
        assert post(server, "/pause_generation", mode="in_place").status_code == 200
        time.sleep(2 * WATCHDOG_S)
        assert post(server, "/continue_generation").status_code == 200
    assert len(server.kind.tokens(request.answer())) == LONG


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_health_while_paused(server: Server, mode: str) -> None:
    """Stock: `/health` waits behind the pause, answers 503 after 20 s and the server calls itself unhealthy."""
    assert post(server, "/pause_generation", mode=mode).status_code == 200
    for released in (False, True):  # as a trainer does: pause, then release
        if released:
            assert post(server, RELEASE, tags=["kv_cache"]).status_code == 200
        for route in ("/health", "/health_generate"):
            assert server.http.get(route).status_code == 200, (route, released)
    assert post(server, RESUME, tags=["kv_cache"]).status_code == 200
    assert post(server, "/continue_generation").status_code == 200


@pytest.mark.long
def test_kept_requests_outlast_the_watchdog(server: Server) -> None:
    """Stock: a batch that is paused in place for longer than the watchdog waits is taken for a hang, killed."""
    with server.generating(PROMPT, LONG) as request:
        server.control.sleep(1, mode="keep")
        time.sleep(2 * WATCHDOG_S)
        assert server.is_alive()
        server.control.wake_up()
    assert len(server.kind.tokens(request.answer())) == LONG


# -- replies ------------------------------------------------------------------------------------------------


def test_a_caller_that_went_away_does_not_shift_replies(server: Server, first_tokens: list[int]) -> None:
    """Stock: replies are matched by their order; after one cancelled call each is given to the call before it."""
    body = b'{"mode": "wait"}'
    fields = ["Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join(["POST /sleep HTTP/1.1", *fields, "", ""])
    with server.generating(PROMPT, LONG), socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(head.encode() + body)
        server.wait_admitting(False)
    # `wait` lets the request end, which takes minutes on a busy host
    wait_until(lambda: asleep(server) == ALL, "the transition goes on without its client", timeout_s=300)
    for tag in ("weights", "kv_cache"):  # each answer is about what its own call asked for
        changes = server.control.wake_up([tag])["report"]["changes"]
        assert {change["tag"] for change in changes} == {tag}
    changes = server.control.sleep(1, ["kv_cache"])["report"]["changes"]
    assert {(change["tag"], change["state"]) for change in changes} == {("kv_cache", "discarded")}
    assert server.control.wake_up()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens


# -- shapes -------------------------------------------------------------------------------------------------


def test_the_rollout_of_slime(server: Server, other_weights: Any, first_tokens: list[int]) -> None:
    """The calls of slime's engine in its order, with its bodies; all are 200, release and resume say nothing."""
    assert post(server, "/pause_generation").status_code == 200
    assert server.http.get("/flush_cache").status_code == 200
    for route, body in (
        (RELEASE, {"tags": ["kv_cache", "weights", "cuda_graph"]}),
        (RESUME, {"tags": ["weights"]}),
    ):
        response = post(server, route, **body)
        assert (response.status_code, response.json()) == (200, None)
    response = native_update(server, other_weights.state_dict().items(), flush_cache=True, weight_version="3")
    assert response.status_code == 200
    assert response.json()["success"] is True
    response = post(server, RESUME, tags=["kv_cache", "cuda_graph"])
    assert (response.status_code, response.json()) == (200, None)
    assert server.http.get("/flush_cache").status_code == 200
    assert post(server, "/continue_generation").status_code == 200
    assert server.generate(PROMPT) != first_tokens
    assert server.post(PROMPT).json()["meta_info"]["weight_version"] == "3"
