import json
import os
import shlex
import socket
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import uvicorn
from fake_control import rank_status
from fastapi import FastAPI
from typer.testing import CliRunner

from rl_memory_plugins import cli
from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory import torch_saver
from rl_memory_plugins.records import UNKNOWN, EngineStatus
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
SGLANG = [sys.executable, "-m", "sglang.launch_server"]


class Executed(Exception):
    pass


@pytest.fixture
def executed(monkeypatch):
    """What `serve` would have become: `(command, environment)`."""
    done = []

    def execvpe(file, command, environment):
        assert file == command[0]
        done.append((command, environment))
        raise Executed

    monkeypatch.setattr(os, "execvpe", execvpe)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cli, "version", lambda name: "0.0")  # as if vLLM were installed under its own name
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "RL_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    return done


def run(*arguments):
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def cpu_build(monkeypatch):
    """vLLM is installed under the name of its CPU build."""

    def version(name):
        raise cli.PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", version)


def test_a_headless_node_of_the_cpu_build_is_refused_where_a_server_would_start(executed, cpu_build):
    done = run("serve", "vllm", "m", "--node-rank", "1", "--headless")
    assert done.exit_code == 1 and "headless" in done.output
    assert not executed


def test_the_cpu_build_of_vllm_is_started_by_its_server_module(executed, cpu_build):
    run("serve", "vllm", "m", "--port", "1")
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert executed[0][0] == [*module, "--model", "m", "--port", "1", "--rl-memory"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("flag", ["--rl-memory", "--rl_memory"])
def test_serve_preloads_the_memory_saver_where_that_is_asked_for(executed, monkeypatch, engine, flag):
    monkeypatch.setattr(torch_saver, "preload_libraries", lambda: ["/lib/torch_memory_saver.so"])
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so:/lib/torch_memory_saver.so")
    run("serve", engine, "m", f"{flag}=allocator=tms,tms_hook_mode=preload")
    run("serve", engine, "m", flag, '{"allocator": "tms", "tms_hook_mode": "preload"}', "--port", "1")
    run("serve", engine, "m", flag, "allocator=tms")
    run("serve", engine, "m")
    monkeypatch.setenv("RL_MEMORY_ALLOCATOR", "tms")
    monkeypatch.setenv("RL_MEMORY_TMS_HOOK_MODE", "preload")
    run("serve", engine, "m")
    preloaded = [environment["LD_PRELOAD"] for _, environment in executed]
    as_asked, as_before = "/lib/torch_memory_saver.so:/lib/other.so", "/lib/other.so:/lib/torch_memory_saver.so"
    assert preloaded == [as_asked, as_asked, as_before, as_before, as_asked]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serve_preloads_it_where_rl_memory_asks_for_that(executed, monkeypatch, engine):
    monkeypatch.setattr(torch_saver, "preload_libraries", lambda: ["/lib/torch_memory_saver.so"])
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    monkeypatch.setenv("RL_MEMORY", "allocator=tms,tms_hook_mode=preload")
    run("serve", engine, "m")
    run("serve", engine, "m", "--rl-memory")  # an engine takes the flag, though it names nothing
    preloaded = [environment["LD_PRELOAD"] for _, environment in executed]
    assert preloaded == ["/lib/torch_memory_saver.so:/lib/other.so", "/lib/other.so"]


@pytest.mark.parametrize("engine, command", [("vllm", [*VLLM, "m"]), ("sglang", [*SGLANG, "--model-path", "m"])])
@pytest.mark.parametrize("value", ["1", "TRUE", "yes", "on", "poison=1", '{"poison": true}'])
def test_serve_adds_no_flag_that_would_hide_rl_memory(executed, monkeypatch, engine, command, value):
    monkeypatch.setenv("RL_MEMORY", value)
    run("serve", engine, "m")
    run("serve", engine, "m", "--rl-memory", "poison=1")
    assert [done for done, _ in executed] == [command, [*command, "--rl-memory", "poison=1"]]
    assert executed[0][1]["RL_MEMORY"] == value


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("value", ["", " ", "0", "false", "no", "OFF"])
def test_serve_enables_the_plugin_where_rl_memory_is_off(executed, monkeypatch, engine, value):
    monkeypatch.setenv("RL_MEMORY", value)
    run("serve", engine, "m")
    assert executed[0][0][-1] == "--rl-memory"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serve_names_what_is_wrong_with_rl_memory(executed, monkeypatch, engine):
    monkeypatch.setenv("RL_MEMORY", "poisson=1")
    result = run("serve", engine, "m")
    assert result.exit_code == 1
    assert "InvalidRequestError: bad rl_memory options: poisson" in result.stderr
    assert executed == []


@pytest.mark.parametrize(
    "given, command",
    [
        (["m"], ["m", "--rl-memory"]),
        (["m", "-tp", "2", "--x=1", "--help"], ["m", "-tp", "2", "--x=1", "--help", "--rl-memory"]),
        (["m", "--rl-memory", "poison=1", "--x"], ["m", "--rl-memory", "poison=1", "--x"]),
        (["m", "--rl-memory=poison=1"], ["m", "--rl-memory=poison=1"]),
        (["m", "--rl-memory", "--", "x"], ["m", "--rl-memory", "--", "x"]),
        (["m", "--rl_memory"], ["m", "--rl_memory"]),
        (["m", "--rl-memory-x"], ["m", "--rl-memory-x", "--rl-memory"]),
        (["--config", "c.yaml"], ["--config", "c.yaml", "--rl-memory"]),
        (["m", "--url", "u", "--json", "-h"], ["m", "--url", "u", "--json", "-h", "--rl-memory"]),
    ],
)
def test_serve_vllm_passes_everything_on_in_order(executed, given, command):
    result = run("serve", "vllm", *given)
    assert isinstance(result.exception, Executed), result.output
    assert executed[0][0] == [*VLLM, *command]
    assert "VLLM_PLUGINS" not in executed[0][1]


@pytest.mark.parametrize(
    "given, command",
    [
        (["m", "--tp", "2"], ["--model-path", "m", "--tp", "2", "--rl-memory"]),
        (["--model-path", "m"], ["--model-path", "m", "--rl-memory"]),
        (["m", "--rl-memory"], ["--model-path", "m", "--rl-memory"]),
    ],
)
def test_serve_sglang(executed, given, command):
    run("serve", "sglang", *given)
    assert executed[0][0] == [*SGLANG, *command]


@pytest.mark.parametrize(
    "listed, expected",
    [("", "rl_memory"), ("a", "a,rl_memory"), ("rl_memory", "rl_memory"), ("a,rl_memory", "a,rl_memory")],
)
def test_a_list_of_allowed_plugins_gets_ours(executed, monkeypatch, listed, expected):
    monkeypatch.setenv("VLLM_PLUGINS", listed)
    run("serve", "vllm", "m")
    assert executed[0][1]["VLLM_PLUGINS"] == expected


@pytest.mark.parametrize("listed, expected", [("", ""), ("a", "a,rl_memory")])
def test_an_empty_list_means_all_plugins_to_sglang(executed, monkeypatch, listed, expected):
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    run("serve", "sglang", "m")
    assert executed[0][1]["SGLANG_PLUGINS"] == expected


@pytest.mark.parametrize("engine, name", [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_missing_engine_is_named(executed, monkeypatch, engine, name):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda module: None)
    result = run("serve", engine, "m")
    assert result.exit_code == 1
    assert f"UnsupportedError: {name} is not installed" in result.stderr
    assert executed == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serve_without_a_model(executed, engine):
    result = run("serve", engine)
    assert result.exit_code == 1
    assert "name a model" in result.stderr
    assert executed == []


def test_the_modules_that_serve_runs_exist():
    found = [find_spec(engine) for engine in ("vllm", "sglang")]
    for engine, module in zip(found, ("entrypoints/cli/main.py", "launch_server.py"), strict=True):
        if engine is not None:
            path = Path(engine.submodule_search_locations[0], module)
            assert '__name__ == "__main__"' in path.read_text()


@pytest.fixture(params=[""])
def key(request):
    return request.param


@pytest.fixture
def url(control, key):
    app = FastAPI()
    app.include_router(build_router(lambda: control, ControlAuth([key])))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


def test_status(url):
    result = run("status", "--url", url)
    assert result.exit_code == 0, result.output
    assert "admits requests; weights valid, version v7" in result.stdout
    assert "4.0 KiB" in result.stdout
    answer = json.loads(run("status", "--url", url, "--json").stdout)
    assert answer["admitting"] is True
    assert answer["engines"][0]["ranks"][0]["device"] == "cpu:0"


def test_sleep_and_wake_up(url, control):
    result = run("sleep", "--url", url, "--level", "2", "--tags", "weights,kv_cache", "--mode", "wait")
    assert result.exit_code == 0, result.output
    assert control.calls.pop() == ("sleep", (2, ["kv_cache", "weights"], "wait"))
    assert "preserved" in result.stdout
    assert "total 0.500 s" in result.stdout
    assert "admits no requests (asleep)" in run("status", "--url", url).stdout
    answer = json.loads(run("wake-up", "--url", url, "--json").stdout)
    assert answer["status"] == "awake"
    assert control.calls.pop() == ("wake_up", ["kv_cache", "weights", "cuda_graph"])


def test_sleep_takes_globs_of_weights_to_keep(url, control):
    assert run("sleep", "--url", url, "--level", "2", "--keep", "*.embed.*", "--keep", "norm").exit_code == 0
    assert control.kept == ("*.embed.*", "norm")
    assert run("sleep", "--url", url).exit_code == 0
    assert control.kept is None


def test_the_status_says_what_is_under_way(url, control):
    control.engines = [
        EngineStatus([rank_status()], busy="sleep"),
        EngineStatus([rank_status()], paused=True, engine_rank=1),
        EngineStatus([rank_status()], busy=UNKNOWN, engine_rank=2),
    ]
    printed = run("status", "--url", url).stdout
    assert "engine 0: sleep is under way" in printed
    assert "engine 1: paused" in printed
    assert "engine 2: its ranks did not report their state" in printed


def test_checksums(url):
    assert json.loads(run("checksums", "--url", url).stdout)["tensors"] == {"layer.weight@0": "ab12"}


def test_the_url_comes_from_the_environment_too(url, monkeypatch):
    monkeypatch.setenv("RL_MEMORY_URL", url)
    assert run("status").exit_code == 0


@pytest.mark.parametrize("key", ["s3cret"], indirect=True)
def test_the_key_comes_from_the_environment_too(url, monkeypatch):
    assert run("status", "--url", url).exit_code == 1
    monkeypatch.setenv("RL_MEMORY_API_KEY", "s3cret")
    assert run("status", "--url", url).exit_code == 0


def test_a_servers_error_keeps_its_type(url, control):
    control.failure = DeviceMemoryError("3 GiB are missing", needed_bytes=5)
    result = run("wake-up", "--url", url)
    assert result.exit_code == 1
    assert result.stderr == "DeviceMemoryError: 3 GiB are missing\n"
    assert result.stdout == ""
    record = json.loads(run("wake-up", "--url", url, "--json").stderr)
    assert record == {
        "error": "DeviceMemoryError",
        "message": "3 GiB are missing",
        "details": {"needed_bytes": 5},
    }


@pytest.mark.parametrize("arguments", [["--level", "7"], ["--tags", "nope"], ["--mode", "x"]])
def test_bad_arguments_are_the_servers_to_refuse(url, control, arguments):
    result = run("sleep", "--url", url, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("InvalidRequestError: ")
    assert control.calls == []


@pytest.mark.parametrize("key", ["s3cret"], indirect=True)
def test_the_key(url):
    assert "AuthenticationError" in run("status", "--url", url).stderr
    assert run("status", "--url", url, "--api-key", "s3cret").exit_code == 0


def test_a_proxy_in_the_environment_is_not_used(url, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert run("status", "--url", url).exit_code == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "not a url", "http://[", "ftp://x"])
def test_no_server(url):
    result = run("status", "--url", url)
    assert result.exit_code == 1
    assert f"cannot reach {url}" in result.stderr


def test_a_server_without_the_plugin(url):
    result = run("status", "--url", url + "elsewhere")
    assert result.exit_code == 1
    assert "was its engine started with --rl-memory?" in result.stderr


@pytest.mark.parametrize("command", ["status", "sleep", "wake-up"])
def test_another_servers_answer(command, monkeypatch):
    monkeypatch.setattr(cli, "_call", lambda *_: {"ok": True})
    result = run(command)
    assert result.exit_code == 1
    assert "did not answer as control routes do" in result.stderr
    assert json.loads(run(command, "--json").stdout) == {"ok": True}


def commands(group=None, path=()):
    """All commands with their words, e.g. `("serve", "vllm")`."""
    group = group or typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        yield (*path, name), command


def options_of(command):
    return {option: parameter for parameter in command.params for option in getattr(parameter, "opts", ())}


def test_every_command_says_what_it_does_and_most_show_how():
    for words, command in commands():
        assert command.help and command.help.rstrip().endswith(".")
        assert all(option.help for option in options_of(command).values() if hasattr(option, "help")), words
        if words[0] != "version" and words[-1] not in ("vllm", "sglang", cli.FILE):
            assert command.epilog and "rl-memory " in command.epilog, words


def test_examples_are_commands_with_options_that_exist():
    known = dict(commands())
    epilogs = [cli.app.info.epilog, *(command.epilog for command in known.values() if command.epilog)]
    examples = [line for epilog in epilogs for line in epilog.split("\n\n") if line.startswith("rl-memory ")]
    assert len(examples) > 15
    for example in examples:
        _, *words = shlex.split(example, comments=True)
        if words[0] == "serve":
            command = known["serve", cli.FILE if words[1].endswith(".yaml") else words[1]]
            if command.context_settings.get("allow_extra_args"):
                continue  # the engine's own options
            words = words[1:]
        else:
            command = known[words[0],]
        if "--help" not in words:
            command.make_context(words[0], words[1:], resilient_parsing=False).close()


def test_options_have_one_name_and_one_meaning_in_all_commands():
    asking = ("status", "sleep", "wake-up", "load", "checksums", "timeline", "doctor")
    known = dict(commands())
    for name in asking:
        options = options_of(known[name,])
        assert {"--url", "--api-key", "--json"} <= set(options), name
        assert options["--api-key"].envvar == "RL_MEMORY_API_KEY"
        assert options["--url"].envvar == "RL_MEMORY_URL" or name == "doctor"  # which asks no server unless it is told
    [variables] = [line for line in cli.app.info.epilog.split("\n\n") if "RL_MEMORY_URL" in line]
    assert "doctor" in variables, "the help names the exception"


def test_a_server_that_hangs_keeps_no_status_waiting(monkeypatch):
    monkeypatch.setattr(cli, "STATUS_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = run("status", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert result.exit_code == 1 and result.stderr.startswith("NoAnswerError: no answer from")


def test_version():
    assert run("version").stdout.startswith("rl_memory_plugins ")


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_size(count, text):
    assert cli.size(count) == text


def test_a_relay_is_served_for_the_engines_that_are_named(monkeypatch):
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.append((app, options)))
    done = run("relay", "http://127.0.0.1:8000", "http://127.0.0.1:8001", "--host", "10.0.0.1", "--api-key", "k")
    assert done.exit_code == 0, done.output
    [(app, options)] = served
    assert (options["host"], options["port"]) == ("10.0.0.1", 8100)
    assert "/v1/rl_memory/update_weights_from_ipc" in {route.path for route in app.routes}


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ([], None),
        (["--advertise", "127.0.0.1"], ["127.0.0.1"]),
        (["--advertise", "127.0.0.1, [::1]:5000", "--advertise", "lo"], ["127.0.0.1", "[::1]:5000", "lo"]),
    ],
)
@pytest.mark.parametrize("tls", [False, True])
def test_a_relay_may_have_other_hosts_behind_it(monkeypatch, given, addresses, tls):
    made = []
    monkeypatch.setattr("rl_memory_plugins.trainer.relay.Relay", lambda *_, **options: made.append(options))
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: None)
    done = run("relay", "http://127.0.0.1:8000", "http://10.0.0.12:8100", *given, *(["--tls"] if tls else []))
    assert done.exit_code == 0, done.output
    assert [(options["advertise"], options["tls"]) for options in made] == [(addresses, tls)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--advertise", "nowhere0"], "cannot advertise 'nowhere0'"),
        (["--advertise", "127.0.0.1:70000"], "a port from 0 to 65535"),
        (["--advertise", "127.0.0.1,"], "cannot advertise ''"),
        (["--advertise", "198.51.100.1"], "advertise an address of this host"),
        (["--tls"], "tls has no use without advertise="),
    ],
)
def test_a_relay_refuses_addresses_that_it_cannot_use(monkeypatch, given, said):
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: pytest.fail("served"))
    done = run("relay", "http://127.0.0.1:8000", *given)
    assert done.exit_code == 1 and "InvalidRequestError" in done.output and said in done.output


def test_a_relay_refuses_hosts_that_are_none():
    done = run("relay", "http://127.0.0.1:8000", "--update-hosts", "nowhere/99")
    assert done.exit_code == 1 and "update_hosts" in done.output
