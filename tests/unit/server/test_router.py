import asyncio
import json
import os
from types import SimpleNamespace

import httpx
import pytest
import torch
from fake_control import rank_status
from fastapi import FastAPI
from fastapi.testclient import TestClient
from safetensors.torch import save_file

import rl_memory_plugins
from rl_memory_plugins import errors
from rl_memory_plugins.commands import RemoveAdapter, UpdateAdapter, UpdateWeights
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.parameters import MAX_BODY_BYTES
from rl_memory_plugins.server.router import build_router
from rl_memory_plugins.tags import Content, TagState
from rl_memory_plugins.trainer import EngineObject
from rl_memory_plugins.weights.wire import PROTOCOL

ALL = ["kv_cache", "weights", "cuda_graph"]
PREFIXES = ["", "/v1/rl_memory"]
GETS = ["/is_sleeping", "/memory", "/weight_version", "/installation", "/weights/checksums"]
CHECKPOINT = "/update_weights_from_checkpoint"
POSTS = ["/sleep", "/wake_up", "/update_weights_from_ipc", CHECKPOINT, "/update_adapter", "/remove_adapter"]
UPDATE = {"endpoints": {"*": "/tmp/trainer.sock"}, "token": "t0ken"}
ADAPTER = {"name": "policy", "config": {"r": 4}, **UPDATE}
BODIES = {"/update_weights_from_ipc": UPDATE, "/update_adapter": ADAPTER, "/remove_adapter": {"name": "policy"}}


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"code", "type", "message", "details"}
    return body["error"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "query, body, called",
    [
        ("", None, (1, ALL, "abort")),
        ("", "", (1, ALL, "abort")),
        ("", "  \n", (1, ALL, "abort")),
        ("", "{}", (1, ALL, "abort")),
        ("?level=2&tags=weights&tags=kv_cache", None, (2, ["kv_cache", "weights"], "abort")),
        ("?tags=weights,kv_cache&mode=wait", None, (1, ["kv_cache", "weights"], "wait")),
        ("", '{"level": 0, "tags": ["weights"], "mode": "keep"}', (0, ["weights"], "keep")),
        ("", '{"tags": "weights, cuda_graph"}', (1, ["weights", "cuda_graph"], "abort")),
        ("", '{"tags": null}', (1, ALL, "abort")),
        ("?level=1&mode=wait&tags=kv_cache", '{"level": 2, "tags": null}', (2, ALL, "wait")),  # the body wins
    ],
)
def test_sleep(client, control, prefix, query, body, called):
    answer = client.post(f"{prefix}/sleep{query}", content=body)
    assert answer.status_code == 200, answer.text
    assert control.calls == [("sleep", called)]
    answer = answer.json()
    report = answer.pop("report")
    assert answer == {"status": "sleeping", "level": called[0], "tags": called[1]}
    assert [change["tag"] for change in report["changes"]] == called[1]
    assert report["changes"][0] == {
        "rank": 0,
        "tag": called[1][0],
        "state": "preserved",
        "bytes_released": 4096,
        "bytes_restored": 0,
        "bytes_copied": 0,
    }
    assert report["seconds"] == {"total": 0.5, "drain": 0.0}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "query, body, kept",
    [
        ("", None, None),
        ("?keep=*.embed.*&keep=norm", None, ("*.embed.*", "norm")),
        ("?keep=*.embed.*,norm", None, ("*.embed.*", "norm")),
        ("", '{"keep": ["*.embed.*", "norm"]}', ("*.embed.*", "norm")),
        ("", '{"keep": "*.embed.*"}', ("*.embed.*",)),
        ("", '{"keep": []}', ()),
        ("", '{"keep": null}', None),
    ],
)
def test_weights_to_keep(client, control, prefix, query, body, kept):
    assert client.post(f"{prefix}/sleep{query}", content=body).status_code == 200
    assert control.kept == kept


@pytest.mark.parametrize("body", [{"keep": 5}, {"keep": [""]}, {"keep": [["norm"]]}, {"keep": {"norm": True}}])
def test_what_is_no_glob_is_refused(client, control, body):
    assert error_of(client.post("/sleep", json=body), 422)["details"]["field"] == "keep"
    assert control.calls == []


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wake_up_tells_whether_everything_is_awake(client, prefix):
    client.post(f"{prefix}/sleep")
    part = client.post(f"{prefix}/wake_up?tags=weights&tags=cuda_graph").json()
    assert (part["status"], part["tags"]) == ("sleeping", ["weights", "cuda_graph"])  # in the caller's order
    assert client.get(f"{prefix}/is_sleeping").json() == {"is_sleeping": True}
    rest = client.post(f"{prefix}/wake_up").json()
    assert (rest["status"], rest["tags"]) == ("awake", None)
    assert {change["state"] for change in rest["report"]["changes"]} == {"resident"}
    assert client.get(f"{prefix}/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("tags", [[], 5, {"weights": 1}, ["nope"], "weights,"])
def test_bad_tags_to_wake(client, control, tags):
    error = error_of(client.post("/wake_up", json={"tags": tags}), 422)
    assert error["details"]["allowed"] == ALL
    assert control.calls == []


@pytest.mark.parametrize("prefix", PREFIXES)
def test_update_weights(client, control, prefix):
    answer = client.post(f"{prefix}/update_weights_from_ipc", json=UPDATE)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "status": "updated",
        "weight_version": "v7",
        "content": "valid",
        "report": {"changes": [], "seconds": {"total": 0.1}, "details": {}, "steps": []},
    }
    assert control.calls == [("update_weights", UpdateWeights(**UPDATE))]
    assert control.calls[0][1].timeout_s is None  # the engine's option decides


def test_update_weights_with_every_parameter(client, control):
    given = {**UPDATE, "weight_version": "step-3", "mode": "abort", "timeout_s": 5}
    assert client.post("/update_weights_from_ipc", json=given).status_code == 200
    assert control.calls == [("update_weights", UpdateWeights(**given))]


@pytest.mark.parametrize(
    "body",
    [
        None,
        {"token": "t"},
        {"endpoints": {"*": "s"}},
        {**UPDATE, "endpoints": {}},
        {**UPDATE, "endpoints": {"*": 1}},
        {**UPDATE, "endpoints": ["s"]},
        {**UPDATE, "token": ""},
        {**UPDATE, "token": 5},
        {**UPDATE, "mode": "later"},
        {**UPDATE, "timeout_s": 0},
        {**UPDATE, "timeout_s": -1.5},
        {**UPDATE, "timeout_s": "soon"},
        {**UPDATE, "weight_version": 3},
        {**UPDATE, "hold": True},  # would leave the engine waiting for a decision that never comes
        {**UPDATE, "type": "Sleep"},
    ],
)
def test_bad_updates_are_refused_before_anything_happens(client, control, body):
    error = error_of(client.post("/update_weights_from_ipc", json=body), 422)
    assert error["code"] == "InvalidRequestError"
    assert "t0ken" not in json.dumps(error)
    assert control.calls == []


def test_a_token_in_the_query_is_refused(client, control):
    error = error_of(client.post("/update_weights_from_ipc?token=t", json=UPDATE), 422)
    assert error["details"]["got"] == ["token"]
    assert control.calls == []


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_update_from_a_checkpoint_is_an_update(client, control, tmp_path, prefix):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    given = {"path": str(tmp_path), "weight_version": "step-3", "mode": "abort", "timeout_s": 0.5}
    answer = client.post(f"{prefix}{CHECKPOINT}", json=given)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["status"], answer.json()["weight_version"]) == ("updated", "v7")
    [(name, command)] = control.calls
    assert name == "update_weights"
    assert (command.weight_version, command.mode, command.timeout_s) == ("step-3", "abort", 0.5)


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"path": ""},
        {"path": 3},
        {"path": "/nonexistent"},
        {"path": "/tmp", "partial": "yes"},
        {"path": ".", "mode": "later"},
        {"path": ".", "timeout_s": 0},
        {"path": ".", "token": "t0ken"},
        {"path": ".", "endpoints": {"*": "s"}},
    ],
)
def test_bad_updates_from_a_checkpoint_are_refused_before_anything_happens(client, control, body):
    error_of(client.post(CHECKPOINT, json=body), 422)
    error_of(client.post(f"{CHECKPOINT}?path=.", json={}), 422)
    assert control.calls == []


@pytest.mark.parametrize("prefix", PREFIXES)
def test_memory_of_a_serving_engine(client, prefix):
    answer = client.get(f"{prefix}/memory").json()
    engines = answer.pop("engines")
    assert answer == {
        "admitting": True,
        "reason": None,
        "is_sleeping": False,
        "content": "valid",
        "weight_version": "v7",
    }
    assert engines[0]["ranks"][0]["tags"]["weights"] == {"state": "resident", "bytes": 4096, "host_bytes": 0}


@pytest.mark.parametrize(
    "engine, reason, sleeping, content",
    [
        (EngineStatus([rank_status(weights=TagState.DISCARDED)]), "asleep", True, "valid"),
        (EngineStatus([rank_status(content=Content.STALE)]), "stale", False, "stale"),
        (EngineStatus([rank_status(), rank_status(1, Content.FAILED)]), "failed", False, "failed"),
        (EngineStatus([rank_status()], paused=True), "paused", True, "valid"),
        (EngineStatus([rank_status()], busy="update_weights"), "updating", False, "valid"),
    ],
)
def test_the_worst_engine_decides(client, control, engine, reason, sleeping, content):
    control.engines = [EngineStatus([rank_status()]), engine]
    answer = client.get("/memory").json()
    assert (answer["admitting"], answer["reason"], answer["is_sleeping"]) == (False, reason, sleeping)
    assert answer["content"] == content
    assert client.get("/weight_version").json() == {"weight_version": "default", "content": content}
    assert client.get("/is_sleeping").json() == {"is_sleeping": sleeping}
    in_process = EngineObject(SimpleNamespace(memory_status=lambda: control.engines)).weights_state()
    assert in_process == {name: answer[name] for name in ("content", "weight_version", "admitting", "reason")}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_checksums(client, prefix):
    answer = client.get(f"{prefix}/weights/checksums").json()
    assert answer == {"layout": "engine", "tensors": {"layer.weight@0": "ab12"}, "partial": [], "opaque": []}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_timeline(client, control, prefix):
    before = client.get(f"{prefix}/timeline").json()
    assert (before["events"], before["next"], before["dropped"]) == ([], 0, 0)
    client.post(f"{prefix}/sleep")
    client.post(f"{prefix}/wake_up")
    answer = client.get(f"{prefix}/timeline?since=1").json()
    assert [(event["seq"], event["operation"]) for event in answer["events"]] == [(2, "wake_up")]
    assert (answer["next"], answer["timeline"]) == (2, before["timeline"])
    assert answer["present"]["memory"][0]["tags"]["weights"] == 4096
    assert client.get(f"{prefix}/timeline?since=2").json()["events"] == []


@pytest.mark.parametrize("query", ["since=-1", "since=x", "since=1&since=2", "since=", "since=1.5", f"since={9**30}"])
def test_a_bad_since(client, query):
    error = error_of(client.get(f"/timeline?{query}"), 422)
    assert error["details"]["field"] == "since"


def test_the_timeline_takes_no_other_parameter(client):
    assert error_of(client.get("/timeline?from=1"), 422)["details"]["got"] == ["from"]


def test_the_timeline_waits_for_no_engine(client, control):
    """The status of engines on other hosts needs their answer; a timeline is answered without."""
    control._call = None
    control.status = None
    assert client.get("/timeline").status_code == 200


def test_installation(client, control, tmp_path, monkeypatch):
    hooks = Hooks("an-engine")
    hooks.wrap("json:dumps", lambda original: original)
    monkeypatch.setattr("rl_memory_plugins.hooking._all", [hooks, Hooks("another")])
    control.boards = lambda: [("/tmp/one.board", True), ("/tmp/other.board", False)]
    answer = client.get("/v1/rl_memory/installation").json()
    assert answer["version"] == rl_memory_plugins.__version__
    assert answer["protocol"] == PROTOCOL
    assert (answer["pid"], answer["has_key"]) == (os.getpid(), False)
    assert answer["hooks"] == {"an-engine": ["json:dumps"]}
    assert [board["writer_lives"] for board in answer["boards"]] == [True, False]


@pytest.mark.parametrize(
    "query, field",
    [
        ("level=3", "level"),
        ("level=-1", "level"),
        ("level=one", "level"),
        ("level=", "level"),
        ("level=1&level=2", "level"),
        ("mode=later", "mode"),
        ("mode=", "mode"),
        ("tags=", "tags"),
        ("tags=runtime", "tags"),
        ("tags=weights,,kv_cache", "tags"),
        ("tags=weights&tags=nope", "tags"),
        ("keep=", "keep"),
    ],
)
def test_bad_queries(client, control, query, field):
    error = error_of(client.post(f"/sleep?{query}"), 422)
    assert error["code"] == "InvalidRequestError"
    assert error["details"]["field"] == field
    assert control.calls == []


@pytest.mark.parametrize(
    "body, field",
    [
        ({"level": 1.5}, "level"),
        ({"level": True}, "level"),
        ({"level": None}, "level"),
        ({"level": [1]}, "level"),
        ({"tags": []}, "tags"),
        ({"tags": 5}, "tags"),
        ({"tags": True}, "tags"),
        ({"tags": {"weights": 1}}, "tags"),
        ({"tags": [["weights"]]}, "tags"),
        ({"tags": [None]}, "tags"),
        ({"mode": None}, "mode"),
        ({"mode": ["abort"]}, "mode"),
    ],
)
def test_bad_values_in_bodies_list_what_is_allowed(client, control, body, field):
    error = error_of(client.post("/sleep", json=body), 422)
    assert error["details"]["field"] == field
    allowed = {"level": [0, 1, 2], "tags": ALL, "mode": ["abort", "wait", "keep", "freeze"]}
    assert error["details"]["allowed"] == allowed[field]
    assert control.calls == []


@pytest.mark.parametrize("query, body", [("?tag=weights", None), ("", '{"tag": ["weights"]}'), ("?x=1", "{}")])
@pytest.mark.parametrize("route", ["/sleep", "/wake_up"])
def test_a_misspelt_name_is_no_call_for_all_tags(client, control, route, query, body):
    error = error_of(client.post(route + query, content=body), 422)
    assert "tags" in error["details"]["allowed"]
    assert control.calls == []


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"{", b"level=1", b"\xff\xfe", b'{"level": "\xff"}', b"[1]", b"1", b"null", b'"x"', b"[" * 5000, b"NaN"],
)
def test_malformed_bodies(client, control, route, body):
    error = error_of(client.post(route, content=body), 422)
    assert error["code"] == "InvalidRequestError"
    assert control.calls == []


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/sleep", b'{"level": 1, "level": 2}', "level"),
        ("/wake_up", b'{"tags": ["weights"], "tags": null}', "tags"),
        ("/update_weights_from_ipc", b'{"token": "t", "endpoints": {"*": "/tmp/a", "*": "/tmp/b"}}', "*"),
    ],
)
def test_a_body_that_names_a_field_twice(client, control, route, body, field):
    """A decoder takes the last one without a word: a sleep that meant level 1 would discard the weights."""
    error = error_of(client.post(route, content=body), 422)
    assert error["details"]["field"] == field
    assert control.calls == []


@pytest.mark.parametrize("route", POSTS)
def test_the_largest_body_is_read_and_a_larger_one_is_not(app, client, control, route):
    padding = b" " * (MAX_BODY_BYTES - 2)
    assert client.post(route, content=b"[]" + padding).json()["error"]["message"].endswith("not list")
    error = error_of(client.post(route, content=b"{}" + padding + b" "), 422)
    assert error["details"] == {"max_bytes": MAX_BODY_BYTES}

    received = 0

    async def endless():
        nonlocal received
        while True:
            received += 1 << 16
            yield b" " * (1 << 16)

    async def send():
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            return await remote.post(route, content=endless())

    error_of(asyncio.run(send()), 422)
    assert received <= MAX_BODY_BYTES + (2 << 16)
    assert control.calls == []


@pytest.mark.parametrize("route", POSTS)
def test_a_client_that_goes_away_in_its_body_is_no_fault_of_the_server(app, control, caplog, route):
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    address = ("127.0.0.1", 1)
    scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": [], "client": address}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 422
    assert control.calls == []
    assert not caplog.records


ERRORS = [
    (errors.RLMemoryError, 500),
    (errors.InvalidRequestError, 422),
    (errors.ManifestError, 422),
    (errors.StateConflictError, 409),
    (errors.EngineAsleepError, 503),
    (errors.OutOfMemoryError, 507),
    (errors.DeviceMemoryError, 507),
    (errors.HostMemoryError, 507),
    (errors.WeightUpdateError, 502),
    (errors.DrainTimeoutError, 504),
    (errors.NoAnswerError, 504),
    (errors.AuthenticationError, 401),
    (errors.PermissionDeniedError, 403),
    (errors.UnsupportedError, 422),
    (errors.EngineLostError, 503),
    (errors.EngineFaultError, 500),
]


def test_the_table_of_errors_is_complete():
    tree = {errors.RLMemoryError}
    while more := {sub for cls in tree for sub in cls.__subclasses__()} - tree:
        tree |= more
    assert {cls for cls, _ in ERRORS} == {cls for cls in tree if cls.__module__ == errors.__name__}


@pytest.mark.parametrize("cls, status", ERRORS)
@pytest.mark.parametrize("method, route", [("GET", r) for r in GETS] + [("POST", r) for r in POSTS])
def test_errors_reach_the_client_with_their_type_and_fields(client, control, cls, status, method, route):
    control.failure = cls("it went wrong", needed_bytes=5, rank=1)
    response = client.request(method, route, json=BODIES.get(route))
    error = error_of(response, status)
    assert error["code"] == cls.__name__
    assert error["message"] == "it went wrong"
    assert error["details"] == {"needed_bytes": 5, "rank": 1}
    assert ("retry-after" in response.headers) == (status == 503)
    assert ("www-authenticate" in response.headers) == (status == 401)


def test_retry_after_is_the_errors_own(client, control):
    control.failure = errors.EngineAsleepError("not now", retry_after_s=9)
    assert client.post("/sleep").headers["retry-after"] == "9"


def test_unexpected_exceptions_are_typed_too(client, control, caplog):
    control.failure = KeyError("weights")
    error = error_of(client.post("/wake_up"), 500)
    assert error["code"] == "EngineFaultError"
    assert error["details"] == {"type": "KeyError"}
    assert "POST /wake_up failed" in caplog.text


def test_details_that_are_not_json_do_not_break_the_answer(client, control):
    control.failure = errors.EngineFaultError("odd", shape={1, 2}, path=object, by_rank={0: "x"})
    assert error_of(client.post("/sleep"), 500)["details"]["by_rank"] == {"0": "x"}


def test_a_file_whose_name_is_no_text_does_not_break_the_answer(client, tmp_path):
    (tmp_path / "\udcff.safetensors").mkdir()
    error = error_of(client.post(CHECKPOINT, json={"path": str(tmp_path)}), 422)
    assert error["details"]["missing"] == [f"{tmp_path}/?.safetensors"]


@pytest.mark.parametrize("route, name", [("/sleep", "sleep"), ("/wake_up", "wake_up")])
def test_a_transition_runs_to_its_end_without_its_client(app, control, route, name):
    async def scenario():
        control.may_finish = asyncio.Event()
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            request = asyncio.create_task(remote.post(route))
            while not control.calls:
                await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert control.finished == []
            control.may_finish.set()
            for _ in range(10):
                await asyncio.sleep(0)
            assert control.finished == [name]

    asyncio.run(scenario())


def test_status_routes_answer_during_a_transition(app, control):
    async def scenario():
        control.may_finish = asyncio.Event()
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            request = asyncio.create_task(remote.post("/sleep"))
            while not control.calls:
                await asyncio.sleep(0)
            for route in ("/is_sleeping", "/memory", "/weight_version"):
                assert (await asyncio.wait_for(remote.get(route), 5)).status_code == 200
            assert not request.done()
            control.may_finish.set()
            assert (await request).status_code == 200

    asyncio.run(scenario())


def test_prefixes(control):
    app = FastAPI()
    app.include_router(build_router(lambda: control, ControlAuth(), prefixes=["/only"]))
    client = TestClient(app, "http://localhost", client=("127.0.0.1", 1))
    assert client.get("/only/is_sleeping").status_code == 200
    assert client.get("/is_sleeping").status_code == 404


def test_methods(client):
    assert client.get("/sleep").status_code == 405
    assert client.post("/memory").status_code == 405


def test_every_route_is_described(app):
    paths = app.openapi()["paths"]
    for prefix in PREFIXES:
        for route in [*GETS, "/timeline", *POSTS]:
            (operation,) = paths[prefix + route].values()
            assert operation["description"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_adapters(client, control, prefix):
    given = {**ADAPTER, "adapter_version": "a1", "timeout_s": 5}
    answer = client.post(f"{prefix}/update_adapter", json=given).json()
    assert answer.pop("report")["details"] == {"adapter": "policy", "adapter_version": "a1"}
    assert answer == {"status": "updated", "adapter": "policy", "adapter_version": "a1"}
    sent = {"adapter": given.pop("name"), **given}
    assert control.calls.pop() == ("update_adapter", UpdateAdapter(**sent))
    for body, query in (({"name": "policy"}, ""), (None, "?name=policy")):
        answer = client.post(f"{prefix}/remove_adapter{query}", json=body).json()
        assert (answer["status"], answer["adapter"], answer["adapter_version"]) == ("removed", "policy", "a1")
        assert control.calls.pop() == ("remove_adapter", RemoveAdapter("policy"))


def test_an_adapter_without_a_name_is_refused_by_the_name_of_the_field(client):
    error = error_of(client.post("/update_adapter", json=UPDATE), 422)
    assert "$.name" in error["message"]
    error_of(client.post("/update_adapter?token=t", json=ADAPTER), 422)  # a token has no place in a URL
