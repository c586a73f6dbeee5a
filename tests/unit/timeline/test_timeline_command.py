"""`rl-memory timeline`, against servers without engines."""

from __future__ import annotations

import dataclasses
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_control import FakeControl, rank_status
from fastapi import FastAPI
from fastapi.testclient import TestClient
from histories import handoff
from typer.testing import CliRunner, Result

from rl_memory_plugins import cli
from rl_memory_plugins import client as client_module
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import InvalidRequestError, StateConflictError
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router
from rl_memory_plugins.tags import TagState
from rl_memory_plugins.timeline import command
from rl_memory_plugins.timeline.history import read_handoffs, timeline_in
from rl_memory_plugins.trainer.handoff_report import HandoffReport


def serving(control: FakeControl) -> TestClient:
    app = FastAPI()
    app.include_router(build_router(lambda: control, ControlAuth(["key"])))
    return TestClient(app)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeControl]:
    """Two servers, by their addresses."""
    controls = {"http://a:1": FakeControl(), "http://b:2": FakeControl()}
    clients = {url: serving(control) for url, control in controls.items()}

    def client(url: str, api_key: str) -> EngineClient:
        def answer(request: httpx.Request) -> httpx.Response:
            found = clients[url].get(str(request.url), headers={"authorization": f"Bearer {api_key}"})
            return httpx.Response(found.status_code, content=found.content)

        return EngineClient(url, api_key, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(command, "EngineClient", client)
    monkeypatch.delenv("RL_MEMORY_URL", raising=False)
    return controls


@pytest.fixture
def urls(servers: dict[str, FakeControl]) -> list[str]:
    return [word for url in servers for word in ("--url", url)]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["timeline", *words], env={"RL_MEMORY_API_KEY": "key", "COLUMNS": "250"})


def act(control: FakeControl) -> None:
    client = serving(control)
    client.headers["authorization"] = "Bearer key"
    assert client.post("/sleep", json={"level": 2}).status_code == 200
    control.failure = InvalidRequestError("no")
    assert client.post("/wake_up").status_code == 422
    control.failure = None


def test_once(servers: dict[str, FakeControl], urls: list[str]) -> None:
    act(servers["http://a:1"])
    done = run(*urls, "--once")
    assert done.exit_code == 0, done.output
    assert "http://a:1: admits no requests (asleep); weights valid, version v7" in done.stdout
    assert "http://b:2: admits requests" in done.stdout
    assert "sleep 2 of kv_cache, weights, cuda_graph" in done.stdout
    assert "12.0 KiB → 0 B" in done.stdout and "InvalidRequestError" in done.stdout


def test_as_json(servers: dict[str, FakeControl], urls: list[str]) -> None:
    act(servers["http://b:2"])
    answers = json.loads(run(*urls, "--json").stdout)
    assert list(answers) == ["http://a:1", "http://b:2"]
    assert [event["operation"] for event in answers["http://b:2"]["events"]] == ["sleep", "wake_up"]


def test_files_of_several_servers_and_a_handoff(
    servers: dict[str, FakeControl], urls: list[str], tmp_path: Path
) -> None:
    for control in servers.values():
        act(control)
    handoffs = tmp_path / "rank0.jsonl"
    handoffs.write_bytes(msgspec.json.encode(handoff()) + b"\n\n" + msgspec.json.encode(handoff()) + b"\n")
    html, trace = tmp_path / "t.html", tmp_path / "t.json"
    done = run(*urls, "--html", str(html), "--perfetto", str(trace), "--handoff", str(handoffs))
    assert done.exit_code == 0 and done.stdout == "", done.output
    assert html.read_text().count('<tr class="failed">') == 2 + 2
    names = [entry["args"]["name"] for entry in json.loads(trace.read_text())["traceEvents"] if entry["ph"] == "M"]
    assert [name for name in names if name in (*servers, str(handoffs))] == [*servers, str(handoffs)]


def test_a_handoff_alone_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(msgspec.json.encode(handoff()))
    assert run("--handoff", str(tmp_path / "h"), "--perfetto", str(tmp_path / "t.json")).exit_code == 0


@pytest.mark.parametrize("content", [None, b"{", b'{"version": 1}'])
def test_a_file_that_holds_no_handoffs(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "h").write_bytes(content)
    done = run("--handoff", str(tmp_path / "h"), "--once")
    assert done.exit_code == 1 and "InvalidRequestError: cannot read handoffs" in done.stderr


def test_errors_have_exit_code_1(servers: dict[str, FakeControl], urls: list[str], tmp_path: Path) -> None:
    done = run(*urls, "--api-key", "wrong", "--json")
    assert done.exit_code == 1 and json.loads(done.stderr)["error"] == "AuthenticationError"
    done = run(*urls, "--html", str(tmp_path / "none" / "t.html"))
    assert done.exit_code == 1 and "cannot write" in done.stderr


def test_an_engine_in_the_middle_of_a_wake(servers: dict[str, FakeControl], urls: list[str]) -> None:
    waking = EngineStatus([rank_status(weights=TagState.PRESERVED)], "v7", busy="wake_up")
    servers["http://a:1"].engines = [waking]
    done = run(*urls, "--once")
    assert done.exit_code == 0, done.output
    assert (
        "http://a:1: admits no requests (asleep); weights valid, version v7; engine 0: wake_up is under way"
        in done.stdout
    )


@pytest.mark.parametrize("words", [("--once",), ("--json",), ()])
def test_a_server_that_is_not_there(words: tuple[str, ...]) -> None:
    done = run("--url", "http://127.0.0.1:1", *words)
    assert done.exit_code == 1 and done.stdout == ""
    message = json.loads(done.stderr)["message"] if words == ("--json",) else done.stderr
    assert "cannot reach http://127.0.0.1:1" in message


def test_a_server_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STATUS_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = run("--url", f"http://127.0.0.1:{silent.getsockname()[1]}", "--once")
    assert done.exit_code == 1 and done.stderr.startswith("NoAnswerError: no answer from")


def test_it_is_shown_until_the_user_ends_it(
    servers: dict[str, FakeControl], urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: Iterator[Any] = iter((lambda: act(servers["http://a:1"]), lambda: act(servers["http://b:2"])))

    def sleep(seconds: float) -> None:
        try:
            next(rounds)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(command.time, "sleep", sleep)
    done = run(*urls)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("sleep 2 of kv_cache") >= 2


def test_a_call_that_is_refused_again_takes_the_place_of_the_former(servers: dict[str, FakeControl]) -> None:
    control = next(iter(servers.values()))
    act(control)

    def ask(since: int) -> Any:
        return msgspec.to_builtins(control.recorder.timeline(since, control.status_now()))

    known = timeline_in(ask(0))
    control.failure = StateConflictError("busy")
    for count in (1, 2, 3):
        assert serving(control).post("/sleep", headers={"authorization": "Bearer key"}).status_code == 409
        known = command.extended(known, ask)
        assert [(event.operation, event.count) for event in known.events][2:] == [("sleep", count)]
    assert known.dropped == 0


def test_events_of_a_server_that_tells_no_first_number_stay_apart(servers: dict[str, FakeControl]) -> None:
    control = next(iter(servers.values()))

    def ask(since: int) -> Any:
        answer = msgspec.to_builtins(control.recorder.timeline(since, control.status_now()))
        for event in answer["events"]:
            del event["first_seq"]
        return answer

    act(control)
    known = timeline_in(ask(0))
    for _ in range(2):
        act(control)
        known = command.extended(known, ask)
    assert [event.seq for event in known.events] == [1, 2, 3, 4, 5, 6]


def test_the_live_view_counts_the_calls_up_to_the_last_one_that_is_gone(
    servers: dict[str, FakeControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "KEPT", 2)
    control = next(iter(servers.values()))

    def ask(since: int) -> Any:
        return msgspec.to_builtins(control.recorder.timeline(since, control.status_now()))

    def forgetful(since: int) -> Any:
        """As the server answers once it has dropped the events 6 and 7."""
        answer = ask(since)
        return {**answer, "events": answer["events"][2:], "dropped": 2}

    known = timeline_in(ask(0))
    control.failure = StateConflictError("busy")
    for _ in range(3):
        serving(control).post("/sleep", headers={"authorization": "Bearer key"})
    control.failure = None
    act(control)
    known = command.extended(known, ask)
    assert ([event.seq for event in known.events], known.dropped) == ([4, 5], 3)
    act(control)
    act(control)
    known = command.extended(known, forgetful)
    assert ([event.seq for event in known.events], known.dropped) == ([8, 9], 7)


def test_a_server_that_started_again_begins_anew(servers: dict[str, FakeControl]) -> None:
    first, second = servers.values()
    act(first)
    act(first)
    act(second)

    def ask(control: FakeControl) -> Any:
        return lambda since: msgspec.to_builtins(control.recorder.timeline(since, control.status_now()))

    shown = command.extended(timeline_in(ask(first)(0)), ask(first))
    assert [event.seq for event in shown.events] == [1, 2, 3, 4]
    again = command.extended(shown, ask(second))
    assert [event.seq for event in again.events] == [1, 2]
    act(second)
    assert [event.seq for event in command.extended(again, ask(second)).events] == [1, 2, 3, 4]


def test_a_report_goes_into_a_file(tmp_path: Path) -> None:
    held = iter([100, 40, 40])
    report = HandoffReport(trainer_rank=3, resident=lambda: next(held))
    with report.noted("load", moves=True):
        report.add("load", [])
    with pytest.raises(ValueError), report.timed("sync"):
        raise ValueError
    for _ in range(2):
        report.append_to(tmp_path / "h.jsonl")
    read, again = read_handoffs(tmp_path / "h.jsonl")
    assert read == again
    load, sync = read.steps
    assert (read.trainer_rank, read.device) == (3, "cpu")
    assert (load.name, load.trainer_bytes_before, load.trainer_bytes_after, load.error) == ("load", 100, 40, None)
    assert (sync.name, sync.trainer_bytes_before, sync.error) == ("sync", 40, "ValueError")
    assert load.start_ns + load.duration_ns <= sync.start_ns + 1_000_000
    assert read.seconds["sync"] > 0


def test_a_report_can_be_sent_to_another_process_and_copied() -> None:
    lock = threading.Lock()  # as what a handoff measures by

    def resident() -> int:
        with lock:
            return 5

    report = HandoffReport(trainer_rank=3, resident=resident)
    with report.noted("load", moves=True):
        pass
    received = pickle.loads(pickle.dumps(report))
    assert received == report and received.steps[0].trainer_bytes_after == 5
    with received.noted("sync", moves=True):
        pass
    assert dataclasses.asdict(report)["trainer_rank"] == 3
