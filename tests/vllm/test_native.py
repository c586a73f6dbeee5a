"""vLLM's own control routes, on a server in dev mode, lead to the same state as this package's.

Each test of a hazard names what stock vLLM does. Everything runs on one server with two API server processes, so
whatever holds, holds in both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from integration.waiting import AT_ONCE_S
from rl_memory_plugins.engines.vllm.core import ON_WEIGHTS
from rl_memory_plugins.errors import StateConflictError
from tests.monitoring import Scrape
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED, VLLM_SERVE

API_SERVERS = 2


class VllmBehindTwo(Vllm):
    """The plain command line, with the flag and no environment of this package."""

    def command(self, launch: Launch, port: int) -> list[str]:
        _, _, _, _, _, *rest = super().command(launch, port)  # python -m rl_memory_plugins.cli serve vllm
        flag = rest.index("--rl-memory")
        del rest[flag : flag + 2]
        return [
            *(*VLLM_SERVE, *rest),
            *("--api-server-count", str(API_SERVERS), "--rl-memory", "poison=true,drain_timeout_s=90"),
        ]


@pytest.fixture(scope="module")
def started(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(VllmBehindTwo(), Launch(model_folder, kv_bytes=64 << 20), log) as server:
        yield server


@pytest.fixture
def server(started: Server, model_folder: Path, first_tokens: list[int]) -> Iterator[Server]:
    yield started
    assert started.is_alive(), started.tail()
    started.control.wake_up()
    started.control.update_weights(new_model(model_folder, SEED))
    assert started.http.post("/resume").status_code == 200
    assert started.generate(PROMPT) == first_tokens, started.tail()


def everywhere(server: Server, method: str, path: str, **options: Any) -> set[int]:
    """The status codes of many fresh connections, which the kernel spreads over the API servers."""
    codes = set()
    for _ in range(12):
        with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
            codes.add(client.request(method, path, **options).status_code)
    return codes


def refusal(server: Server) -> str:
    start = time.monotonic()
    response = server.post(PROMPT)
    assert time.monotonic() - start < AT_ONCE_S
    assert response.status_code == 503, response.text
    return str(response.json()["error"]["details"]["reason"])


def test_the_plain_command_line_has_every_route(server: Server, first_tokens: list[int]) -> None:
    assert server.generate(PROMPT) == first_tokens
    for prefix in ("", "/v1/rl_memory"):
        for route in ("/memory", "/is_sleeping", "/weight_version", "/weights/checksums"):
            assert everywhere(server, "GET", prefix + route) == {200}


def test_all_api_servers_see_one_state(server: Server) -> None:
    request = server.kind.request(PROMPT, 4)
    assert everywhere(server, "POST", "/v1/completions", json=request) == {200}
    server.control.sleep(1)
    assert everywhere(server, "POST", "/v1/completions", json=request) == {503}
    server.control.wake_up()
    assert everywhere(server, "POST", "/v1/completions", json=request) == {200}


def scraped_everywhere(server: Server, name: str, **labels: str) -> set[float]:
    """The sum of the samples in scrapes over many fresh connections, as `everywhere`."""
    found = set()
    for _ in range(12):
        with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
            found.add(Scrape(client.get("/metrics").raise_for_status().text).total(name, **labels))
    return found


@pytest.mark.long
def test_all_api_servers_show_one_state_and_one_count(server: Server) -> None:
    sleeps = {"operation": "sleep", "level": "1", "step": "total"}
    [before] = scraped_everywhere(server, "transition_seconds_count", **sleeps)
    [refused] = scraped_everywhere(server, "refusals_total", reason="asleep")
    for _ in range(4):  # the kernel chooses the server
        server.control.sleep(1)
        assert scraped_everywhere(server, "sleeping") == {1}
        assert everywhere(server, "POST", "/v1/completions", json=server.kind.request(PROMPT, 4)) == {503}
        server.control.wake_up()
        assert scraped_everywhere(server, "sleeping") == {0}
    assert scraped_everywhere(server, "transition_seconds_count", **sleeps) == {before + 4}
    assert scraped_everywhere(server, "refusals_total", reason="asleep") == {refused + 4 * 12}


def test_all_api_servers_answer_one_timeline(server: Server) -> None:
    """Whichever of them has run a transition, all of them number it alike."""
    former = server.control.timeline()
    for _ in range(4):  # the kernel chooses the server
        server.control.sleep(1)
        server.control.wake_up()
    operations = [(former["next"] + number, name) for number, name in enumerate(("sleep", "wake_up") * 4, start=1)]
    for _ in range(12):
        answer = server.control.timeline(former["next"])
        assert answer["timeline"] == former["timeline"]
        assert [(event["seq"], event["operation"]) for event in answer["events"]] == operations


def test_native_sleep_and_wake(server: Server, first_tokens: list[int]) -> None:
    """Hazard 13. Stock, on the CPU or without sleep mode: 200, nothing is freed, and it counts as asleep."""
    before = server.resident_bytes()
    response = server.http.post("/sleep?level=1&mode=abort")
    assert response.status_code == 200
    assert (response.json()["status"], response.json()["level"]) == ("sleeping", 1)
    assert before - server.resident_bytes() > 32 << 20  # some 100 MiB, less what the servers take meanwhile
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.control.memory()["reason"] == refusal(server) == "asleep"
    response = server.http.post("/wake_up?tags=weights")
    assert (response.json()["status"], response.json()["tags"]) == ("sleeping", ["weights"])
    response = server.http.post("/wake_up")
    assert (response.json()["status"], response.json()["tags"]) == ("awake", None)
    assert server.generate(PROMPT) == first_tokens


def test_resume_does_not_open_a_sleeping_engine(server: Server, first_tokens: list[int]) -> None:
    """Hazard 4. Stock: `/resume` ignores the sleep, and the next step runs on unmapped memory."""
    server.control.sleep(1)
    response = server.http.post("/resume")
    assert response.status_code >= 400
    assert "asleep" in response.text
    assert refusal(server) == "asleep"
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_resume_does_not_open_stale_weights(server: Server, model_folder: Path, other_tokens: list[int]) -> None:
    """Hazard 5. Stock: level 2 and a wake of everything serve garbage without a reload."""
    server.http.post("/sleep?level=2")
    server.http.post("/wake_up")
    assert refusal(server) == "stale"
    assert server.http.post("/resume").status_code >= 400
    assert refusal(server) == "stale"
    server.control.update_weights(new_model(model_folder, OTHER_SEED))
    assert server.generate(PROMPT) == other_tokens


@pytest.mark.parametrize("level", [3, -1, 99])
def test_an_unknown_level(server: Server, level: int, first_tokens: list[int]) -> None:
    """Hazard 6. Stock: level 3 discards without saving buffers, a negative one pauses."""
    response = server.http.post(f"/sleep?level={level}")
    assert response.status_code == 422
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.generate(PROMPT) == first_tokens


def test_unknown_and_duplicate_tags(server: Server, first_tokens: list[int]) -> None:
    """Hazard 7. Stock: an unknown tag is a 200 for a call that did nothing, a duplicate a KeyError after waking."""
    server.http.post("/sleep")
    response = server.http.post("/wake_up?tags=weights&tags=optimizer")
    assert response.status_code == 422
    assert response.json()["error"]["details"]["got"] == ["optimizer"]
    assert server.http.post("/wake_up?tags=weights&tags=weights").status_code == 200
    assert server.http.post("/wake_up").json()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens


def test_waking_what_is_awake(server: Server, first_tokens: list[int]) -> None:
    """Hazard 8. Stock 0.26: `weights`, then everything, maps mapped memory; later ones skip the whole call."""
    server.http.post("/sleep")
    server.http.post("/wake_up?tags=weights")
    response = server.http.post("/wake_up?tags=weights&tags=kv_cache&tags=cuda_graph")
    assert response.json()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens


def test_both_of_vllm_s_tags_awake(server: Server, first_tokens: list[int]) -> None:
    """Callers of vLLM's route know two tags, as SkyRL does. The package's own route wakes what it is told."""
    for route, left in (("/wake_up", set()), ("/v1/rl_memory/wake_up", {"cuda_graph"})):
        server.http.post("/sleep")
        for tag in ("weights", "kv_cache"):
            assert server.http.post(f"{route}?tags={tag}").status_code == 200
        [engine] = server.control.memory()["engines"]
        tags = {name: tag["state"] for rank in engine["ranks"] for name, tag in rank["tags"].items()}
        assert {name for name, state in tags.items() if state != "resident"} == left
        server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens


def test_the_cache_wakes_before_discarded_weights(server: Server, model_folder: Path, other_tokens: list[int]) -> None:
    """Hazard 9. Stock 0.26: waking `kv_cache` copies saved buffers into weights that are not mapped."""
    server.http.post("/sleep?level=2")
    assert server.http.post("/wake_up?tags=kv_cache").status_code == 200
    assert refusal(server) == "asleep"
    assert server.http.post("/wake_up").json()["status"] == "awake"
    server.control.update_weights(new_model(model_folder, OTHER_SEED))
    assert server.generate(PROMPT) == other_tokens


@pytest.mark.long
def test_a_wake_while_a_sleep_waits(server: Server, first_tokens: list[int]) -> None:
    """Hazard 11. Stock: the wake unpauses, and the pause's callback later puts a serving engine to sleep."""
    with server.generating(PROMPT, 900) as request:
        with ThreadPoolExecutor(1) as pool:
            sleeping = pool.submit(server.http.post, "/sleep?level=1&mode=wait")
            server.wait_admitting(False)
            request.assert_running()
            assert server.http.post("/wake_up").status_code == 409
        assert sleeping.result().status_code == 200, sleeping.result().text
        assert len(server.kind.tokens(request.answer())) == 900
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    server.http.post("/wake_up")
    assert server.generate(PROMPT) == first_tokens


def test_a_sleep_that_fails_can_be_retried(server: Server, first_tokens: list[int]) -> None:
    """Hazard 2. Stock: after a failed sleep the wake is a no-op, then the engine resumes on unmapped memory."""
    response = server.http.post("/collective_rpc", json={"method": "sleep", "args": [7]})
    assert response.status_code >= 400
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.generate(PROMPT) == first_tokens
    server.http.post("/sleep")
    server.http.post("/wake_up")
    assert server.generate(PROMPT) == first_tokens


def test_workers_sleep_by_collective_rpc(server: Server, first_tokens: list[int]) -> None:
    response = server.http.post("/collective_rpc", json={"method": "sleep", "kwargs": {"level": 1}})
    assert response.status_code == 200
    assert server.control.memory()["reason"] == refusal(server) == "asleep"
    assert server.http.post("/collective_rpc", json={"method": "wake_up"}).status_code == 200
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize("method", ON_WEIGHTS)
def test_vllms_own_calls_do_not_touch_weights_that_sleep(server: Server, method: str, first_tokens: list[int]) -> None:
    """Stock vLLM: the workers read, or write, memory that is not there."""
    server.control.sleep(1)
    response = server.http.post("/collective_rpc", json={"method": method})
    assert response.status_code != 200 and "weights are asleep" in response.text
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_vllms_own_reset_closes_the_engine_until_an_update(
    server: Server, model_folder: Path, other_tokens: list[int]
) -> None:
    """Stock vLLM: goes on generating, with weights that are zeros."""
    assert server.http.post("/weight_checker", json={"action": "reset"}).json() == {"status": "reset"}
    assert server.control.memory()["content"] == refusal(server) == "failed"
    server.control.update_weights(new_model(model_folder, OTHER_SEED))
    assert server.generate(PROMPT) == other_tokens


def test_a_pause_outlives_an_update(server: Server, model_folder: Path, other_tokens: list[int]) -> None:
    """A trainer's own `/pause` is lifted by its own `/resume`, not by the update between them."""
    assert server.http.post("/pause?mode=keep").status_code == 200
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    server.control.update_weights(new_model(model_folder, OTHER_SEED), mode="keep")
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert server.http.post("/resume").status_code == 200
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert server.generate(PROMPT) == other_tokens


def test_requests_keep_their_kv_cache_over_an_update_in_vllms_own_pause(server: Server, other_folder: Path) -> None:
    """Stock: new requests find the prefixes of the former weights too."""
    prompt = list(range(5, 165))
    before, preemptions = server.generate(prompt), server.kind.recomputations(server.http, {})
    with server.generating(PROMPT, 900) as request:
        assert server.http.post("/pause?mode=keep&clear_cache=false").status_code == 200
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
        assert server.http.post("/collective_rpc", json=body).status_code == 200
        request.assert_running()
        assert server.http.post("/resume").status_code == 200
        after = server.generate(prompt)
        request.answer()
    assert server.kind.recomputations(server.http, {}) == preemptions
    server.http.post("/reset_prefix_cache")
    assert server.generate(prompt) == after != before


def test_a_pause_does_not_hide_a_sleep(server: Server, first_tokens: list[int]) -> None:
    server.http.post("/pause")
    server.http.post("/sleep")
    assert server.http.post("/resume").status_code >= 400
    assert refusal(server) == "asleep"
    server.http.post("/wake_up")
    assert server.http.get("/is_paused").json() == {"is_paused": False}  # as vLLM's own wake does
    assert server.generate(PROMPT) == first_tokens


def test_reset_prefix_cache_works_in_every_state(server: Server, first_tokens: list[int]) -> None:
    server.http.post("/sleep")
    assert server.http.post("/reset_prefix_cache").json() == {"success": True}
    server.http.post("/wake_up")
    assert server.http.post("/reset_prefix_cache").json() == {"success": True}
    assert server.generate(PROMPT) == first_tokens


def test_a_reload_forgets_the_prefix_cache(
    server: Server, other_folder: Path, model_folder: Path, other_tokens: list[int]
) -> None:
    """Hazard 17. Stock: an update resets no prefix cache and needs no pause."""
    prompt = list(range(5, 165))
    before = server.generate(prompt)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
    assert server.http.post("/collective_rpc", json=body).status_code == 200
    after = server.generate(prompt)
    server.http.post("/reset_prefix_cache")
    assert server.generate(prompt) == after != before
    assert server.generate(PROMPT) == other_tokens


def test_weight_transfer_without_a_backend_changes_nothing(server: Server, first_tokens: list[int]) -> None:
    for route in ("/start_weight_update", "/finish_weight_update"):
        assert (
            httpx.post(server.url + route, trust_env=False, timeout=60).status_code >= 400
        )  # vLLM closes the connection too
    assert server.generate(PROMPT) == first_tokens


def test_release_kv_cache_memory(server: Server, first_tokens: list[int]) -> None:
    assert server.http.post("/pause?mode=keep").status_code == 200
    assert server.http.post("/release_kv_cache_memory").status_code == 200
    engine = server.control.memory()["engines"][0]
    assert engine["ranks"][0]["tags"]["kv_cache"]["state"] == "discarded"
    assert refusal(server) == "asleep"
    server.http.post("/wake_up")
    assert server.generate(PROMPT) == first_tokens


def test_a_client_gets_a_typed_conflict(server: Server, model_folder: Path) -> None:
    server.http.post("/sleep?level=2")
    with pytest.raises(StateConflictError):
        server.control.update_weights(new_model(model_folder, OTHER_SEED))


# -- the flag --------------------------------------------------------------------------------------------------


def test_a_bad_option_ends_with_a_message(forked_python: Any) -> None:
    *_, command, serve = VLLM_SERVE
    output = forked_python(f"""
        import contextlib, io, json, sys
        sys.argv[1:] = [{serve!r}, FOLDER, "--rl-memory", "allocator=vram,poisonn=1"]
        said, code = io.StringIO(), None
        with contextlib.redirect_stderr(said):
            try:
                exec({command!r})
            except SystemExit as ended:
                code = ended.code
        print(json.dumps([code, said.getvalue()]))
    """)
    code, said = json.loads(output.splitlines()[-1])
    assert code == 2, said
    last = said.strip().splitlines()[-1]
    assert "rl_memory" in last and "poisonn" in last and "allocator" in last
    assert "Traceback" not in said


def test_what_the_flag_accepts(forked_python: Any) -> None:
    output = forked_python("""
        import json
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        load_general_plugins()
        found = []
        for flags in (["--rl-memory"], ["--rl-memory", "poison=true,host_arena_max_bytes=1GiB"],
                      ["--rl-memory", '{"poison": true}'], ["--rl-memory=poison=true"],
                      ["--rl-memory", "--enforce-eager"], []):
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            args = parser.parse_args(["--model", FOLDER, "--dtype", "float32", "--max-model-len", "128", *flags])
            found.append(AsyncEngineArgs.from_cli_args(args).create_engine_config().additional_config)
        print(json.dumps(found))
    """)
    poison = {"rl_memory": {"poison": True}}
    assert json.loads(output.splitlines()[-1]) == [
        {"rl_memory": {}},
        {"rl_memory": {"host_arena_max_bytes": 1 << 30, "poison": True}},
        poison,
        poison,
        {"rl_memory": {}},
        {},
    ]
