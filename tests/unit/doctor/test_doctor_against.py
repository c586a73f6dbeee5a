"""Each fault of a running engine, or of the way to it, that the doctor can find."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from fake_control import FakeControl, rank_status
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.responses import JSONResponse
from typer.testing import CliRunner

from rl_memory_plugins import cli
from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.doctor import against, engine_state, examination, listening, machine
from rl_memory_plugins.doctor.against import ask
from rl_memory_plugins.doctor.check import Check
from rl_memory_plugins.doctor.finding import Finding, Status, failure, ok, warning
from rl_memory_plugins.errors import DeviceMemoryError, EngineAsleepError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server import router
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.tags import Content, TagState

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE
KEY = "s3cret"


@contextmanager
def serving(app):
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def app_of(control: FakeControl, key: str = "") -> FastAPI:
    app = FastAPI()
    app.include_router(router.build_router(lambda: control, ControlAuth([key])))
    return app


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert [finding.name for finding in findings] == list(against.NAMES)
    return {finding.name: finding for finding in findings}


def examined(control: FakeControl) -> dict[str, Finding]:
    with serving(app_of(control)) as url:
        return by_name(ask(url))


@pytest.fixture
def board(control, tmp_path):
    """The status board of the fake engine, which is here."""
    path = tmp_path / "one.board"
    path.touch()
    control.boards = lambda: [(str(path), True)]
    return path


def test_an_engine_that_works(control, board, monkeypatch):
    hooks = Hooks("vllm")
    hooks.wrap("json:loads", lambda original: original)
    monkeypatch.setattr("rl_memory_plugins.hooking._all", [hooks])
    found = examined(control)
    assert {name: one.status for name, one in found.items()} == {
        **dict.fromkeys(against.NAMES, OK),
        "next-wake": NOT_APPLICABLE,  # nothing sleeps
    }
    assert found["active-hooks"].details["hooks"] == {"vllm": ["json:loads"]}
    assert "admits requests" in found["admission"].seen and "kv_cache resident" in found["admission"].seen


# -- the way to the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, remedy",
    [
        ("localhost:8000", "http://HOST:PORT"),
        ("ftp://localhost", "http://HOST:PORT"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://[", "http://HOST:PORT"),
        ("http://localhost:99999", "http://HOST:PORT"),
        ("http://a-host-that-is-not-there.invalid:8000", "correct the name"),
    ],
)
def test_a_wrong_address(url, remedy):
    found = by_name(ask(url))
    assert found["url"].status is FAILURE
    assert remedy in found["url"].remedy
    assert {one.status for name, one in found.items() if name != "url"} == {NOT_APPLICABLE}


def test_a_wrong_port_names_the_ports_of_engines(control, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        with serving(app_of(control)) as url:
            monkeypatch.setattr(listening, "_ENGINES", ("py",))  # this process counts as an engine
            monkeypatch.setattr(listening, "own_processes", lambda: ["self"])
            found = by_name(ask(f"http://127.0.0.1:{unused.getsockname()[1]}"))["url"]
    assert found.status is FAILURE
    assert int(url.rpartition(":")[2]) in found.details["ports"]
    assert "correct the port" in found.remedy


def test_a_server_that_gives_no_answer(monkeypatch):
    monkeypatch.setattr(against, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = by_name(ask(f"http://127.0.0.1:{silent.getsockname()[1]}"))["url"]
    assert found.status is FAILURE
    assert "gave no answer within 0.5 s" in found.seen


def test_a_server_that_never_comes_to_an_end(monkeypatch):
    monkeypatch.setattr(against, "ASK_S", 2.0)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as trickling:

        def answer():
            connection, _ = trickling.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not over.wait(0.1):
                    connection.sendall(b" ")

        thread = threading.Thread(target=answer)
        thread.start()
        found = by_name(ask(f"http://127.0.0.1:{trickling.getsockname()[1]}"))["url"]
        over.set()
        thread.join()
    assert found.status is FAILURE and "within 2 s" in found.seen


def test_a_server_that_does_not_speak_http():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        found = by_name(ask(f"http://127.0.0.1:{other.getsockname()[1]}"))["url"]
        thread.join()
    assert found.status is FAILURE and "https://" in found.remedy


def test_an_engine_without_the_plugin():
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"object": "list", "data": []})
    with serving(app) as url:
        found = by_name(ask(url))["url"]
    assert found.status is FAILURE
    assert "an engine without the plugin" in found.seen and "--rl-memory" in found.remedy


def test_another_server():
    app = FastAPI()
    app.add_api_route("/{path:path}", lambda path: JSONResponse({"hello": path}))
    with serving(app) as url:
        found = by_name(ask(url))["url"]
    assert found.status is FAILURE
    with serving(FastAPI()) as url:
        found = by_name(ask(url))["url"]
    assert found.status is FAILURE and "not the server of an engine with the plugin" in found.seen


def test_an_engine_that_starts(control):
    control.failure = EngineAsleepError("the server is still starting", reason="starting", retry_after_s=1)
    assert examined(control)["url"].status is WARNING


def test_an_engine_whose_status_is_an_error(control):
    control.failure = DeviceMemoryError("the reason")
    found = examined(control)["url"]
    assert found.status is FAILURE and "DeviceMemoryError: the reason" in found.seen


# -- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, given, status, remedy",
    [
        (KEY, KEY, OK, ""),
        (KEY, "", FAILURE, "RL_MEMORY_API_KEY"),
        (KEY, "wrong", FAILURE, "--admin-api-key"),
        ("", "", OK, ""),
        ("", KEY, WARNING, "give the engine a key"),
    ],
)
def test_keys(control, key, given, status, remedy):
    with serving(app_of(control, key)) as url:
        findings = ask(url, given)
    found = by_name(findings)
    assert found["auth"].status is status
    assert remedy in found["auth"].remedy
    assert found["url"].status is OK
    assert found["admission"].status is (NOT_APPLICABLE if status is FAILURE else OK)
    assert KEY not in json.dumps([[one.seen, one.remedy] for one in findings])


def test_a_key_that_no_header_can_hold():
    assert by_name(ask("http://127.0.0.1:1", "kéy"))["url"].status is FAILURE


def test_a_caller_that_is_not_local(control, monkeypatch):
    monkeypatch.setattr("rl_memory_plugins.server.auth.is_this_machine", lambda host: False)
    found = examined(control)["auth"]
    assert found.status is FAILURE
    assert "403" in found.seen and "give the engine a key" in found.remedy


def test_the_engines_own_check_of_a_key():
    app = FastAPI()

    @app.middleware("http")
    async def refuse(request, call_next):
        return JSONResponse({"error": "Unauthorized"}, 401)

    with serving(app) as url:
        found = by_name(ask(url))
    assert (found["url"].status, found["auth"].status) == (WARNING, FAILURE)


# -- the state of the engine -------------------------------------------------------------------------


def engine(content: Content = Content.VALID, busy: str = "", **states: TagState) -> EngineStatus:
    return EngineStatus([rank_status(0, content, **states)], "v7", busy=busy)


@pytest.mark.parametrize(
    "status, reason, admission, updates",
    [
        (engine(), None, OK, OK),
        (engine(kv_cache=TagState.DISCARDED), "asleep", WARNING, OK),
        (engine(weights=TagState.PRESERVED), "asleep", WARNING, WARNING),
        (engine(busy="sleep"), "asleep", WARNING, WARNING),
        (engine(Content.STALE), "stale", WARNING, WARNING),
        (engine(Content.FAILED), "failed", FAILURE, WARNING),
        (engine(Content.UPDATING, "update_weights"), "updating", WARNING, WARNING),
        (replace(engine(), paused=True), "paused", WARNING, OK),
    ],
)
def test_whether_the_engine_admits_requests_and_takes_updates(control, status, reason, admission, updates):
    control.engines = [status]
    found = examined(control)
    assert found["admission"].status is admission
    assert found["admission"].details["reason"] == reason
    assert found["admission"].remedy == ("" if reason is None else engine_state.REMEDIES[reason])
    assert found["updates"].status is updates


def test_a_transition_under_way_is_named(control):
    control.engines = [engine(busy="sleep")]
    assert "sleep is under way" in examined(control)["admission"].seen


def test_layers_that_no_update_can_reach(control):
    can = Capabilities(fixed_weights="the layers are packed", fixed_layers={"model.layers.0": "gptq"})
    control.engines = [replace(engine(), capabilities=can)]
    found = examined(control)["updates"]
    assert found.status is WARNING and "model.layers.0" in found.seen


@pytest.mark.parametrize("free, status", [(4096, OK), (4095, WARNING)])
def test_a_wake_that_would_find_too_little_memory(control, free, status):
    rank = replace(rank_status(weights=TagState.PRESERVED), device_free_bytes=free)
    control.engines = [EngineStatus([rank])]
    assert examined(control)["next-wake"].status is status


@pytest.mark.parametrize("free, status", [(8192, OK), (100, WARNING)])
def test_a_sleep_that_would_find_too_little_host_memory(control, board, monkeypatch, free, status):
    monkeypatch.setattr(engine_state, "free_host_bytes", lambda: free)
    assert examined(control)["next-sleep"].status is status


def test_memory_that_stays_is_named(control):
    rank = replace(
        rank_status(),
        left={"CUDA context": 300 << 20},
        notes=("graphs stay",),
        host_arena_bytes=5 << 20,
        allocator="tms",
    )
    control.engines = [EngineStatus([rank])]
    found = examined(control)
    for part in ("300.0 MiB CUDA context", "graphs stay", "5.0 MiB of host memory"):
        assert part in found["kept-memory"].seen
    assert found["rank-allocators"].status is WARNING and "vmm" in found["rank-allocators"].remedy


def test_an_engine_in_another_place(control, tmp_path):
    control.boards = lambda: [(str(tmp_path / "absent.board"), True)]
    found = examined(control)
    assert found["same-place"].status is WARNING
    assert "directory=" in found["same-place"].remedy and "advertise=" in found["same-place"].remedy
    assert found["next-sleep"].status is NOT_APPLICABLE


def test_an_engine_that_is_dead_behind_its_server(control, board):
    control.boards = lambda: [(str(board), False)]
    assert examined(control)["engine-boards"].status is FAILURE


@pytest.mark.parametrize(
    "field, value, status", [("version", "0.0.1", WARNING), ("protocol", 0, FAILURE), ("hooks", {}, OK)]
)
def test_another_version_on_the_other_side(control, monkeypatch, field, value, status):
    original = router.installation
    monkeypatch.setattr(router, "installation", lambda *a, **k: replace(original(*a, **k), **{field: value}))
    found = examined(control)
    assert found["versions"].status is status
    assert ("same version" in found["versions"].remedy) is (status is not OK)
    if field == "hooks":
        assert found["active-hooks"].status is WARNING


def test_a_version_that_does_not_tell(control):
    app = app_of(control)
    app.router.routes = [route for route in app.router.routes if not route.path.endswith("/installation")]
    with serving(app) as url:
        found = by_name(ask(url))
    assert found["versions"].status is WARNING
    for name in ("active-hooks", "engine-boards", "same-place"):
        assert found[name].status is NOT_APPLICABLE


def test_an_answer_of_another_form(monkeypatch):
    app = FastAPI()
    app.add_api_route("/v1/rl_memory/memory", lambda: {"engines": [{"ranks": 5}]})
    with serving(app) as url:
        found = by_name(ask(url))
    assert found["updates"].status is FAILURE and "another form" in found["updates"].seen


# -- the command and the function --------------------------------------------------------------------


@pytest.fixture
def local(monkeypatch):
    """The checks of this machine; the test changes the list."""
    checks = [Check("fine", lambda: ok("all is well"), "starting"), Check("odd", lambda: warning("odd", "x"), "memory")]
    monkeypatch.setattr(examination, "LOCAL", checks)
    return checks


def run(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def test_warnings_are_allowed_and_a_failure_is_exit_code_1(local):
    result = run()
    assert result.exit_code == 0, result.output
    assert "ok: 1, warnings: 1, failures: 0" in result.stdout
    local.append(Check("broken", lambda: failure("it is broken", "mend it"), "updates"))
    result = run()
    assert result.exit_code == 1
    assert "mend it (docs/troubleshooting.md#updates)" in result.stdout


def test_what_was_not_checked_is_listed(local, monkeypatch):
    local.append(Check("gpu", lambda: ok("never"), "starting", needs_gpu=True))
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    found = examination.examine()
    assert found.not_checked["gpu"] == "no GPU"
    assert found.not_checked["a running engine"] == "name it: --against URL"
    assert "gpu: no GPU" in run().stdout


def test_json(local, control):
    with serving(app_of(control, KEY)) as url:
        result = run("--against", url, "--api-key", KEY, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["healthy"] is True
    findings = {one["name"]: one for one in answer["findings"]}
    assert findings["auth"]["status"] == "ok"
    assert findings["odd"]["docs"] == "docs/troubleshooting.md#memory"
    assert "next-wake" in answer["not_checked"]


def test_the_key_of_the_environment(local, control, monkeypatch):
    monkeypatch.setenv("RL_MEMORY_API_KEY", KEY)
    with serving(app_of(control, KEY)) as url:
        assert run("--against", url).exit_code == 0
        monkeypatch.delenv("RL_MEMORY_API_KEY")
        assert run("--against", url).exit_code == 1


def test_ports_of_processes_without_a_mark_are_not_named(monkeypatch):
    monkeypatch.setattr(listening, "own_processes", lambda: ["self"])
    monkeypatch.setattr(listening, "_ENGINES", ("a mark that no command has",))
    with socket.create_server(("127.0.0.1", 0)):
        assert listening.engine_ports() == []
