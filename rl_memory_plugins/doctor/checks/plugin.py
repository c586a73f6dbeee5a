"""Whether the engines load the plugin, whether it is enabled, and in which processes."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning, worst
from rl_memory_plugins.doctor.given_options import given_options
from rl_memory_plugins.doctor.machine import PROC, installed_engines, own_processes

PLUGIN = "rl_memory"
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
LISTS = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}

#: Variables that an enabled engine sets for its child processes.
CHILD_VARIABLES = ("RLMEM_VLLM_HOOKS", "RLMEM_SGLANG")

#: How the commands of engines begin: the titles that engines give their processes, and their modules.
TITLES = ("VLLM::", "sglang::")
MODULES = ("vllm.entrypoints", "sglang.launch_server")


def loaded() -> Finding:
    """Whether each engine of this environment would load the plugin."""
    engines = installed_engines()
    if not engines:
        return not_applicable("no engine is installed in this environment")
    return worst([_loaded_by(name) for name in engines])


def _loaded_by(engine: str) -> Finding:
    entry = [entry for entry in metadata.entry_points(group=GROUPS[engine]) if entry.name == PLUGIN]
    if not entry:
        return failure(
            f"{engine}: no installed distribution has the entry point {PLUGIN} in {GROUPS[engine]}",
            "install rl_memory_plugins with pip into the engine's own environment; a PYTHONPATH does not suffice",
        )
    listed = os.environ.get(LISTS[engine])
    names = None if listed is None or (engine == "sglang" and not listed) else listed.split(",")
    if names is not None and PLUGIN not in names:
        return failure(
            f"{engine}: {LISTS[engine]}={listed!r} does not list {PLUGIN}, so the engine does not load the plugin",
            f"add {PLUGIN} to {LISTS[engine]} or unset it; `rl-memory serve` adds it",
        )
    try:
        entry[0].load()
    except Exception as error:
        return failure(f"{engine}: the plugin cannot be imported: {type(error).__name__}: {error}", "reinstall it")
    return ok(f"{engine} finds and loads the plugin ({entry[0].value})", **{engine: entry[0].value})


def options() -> Finding:
    """Whether the variables `RL_MEMORY…` of this environment enable the plugin, and are valid."""
    config = given_options()
    if isinstance(config, Finding):
        return config
    from rl_memory_plugins.config import ENV_PREFIX, OTHER_VARIABLES

    known = {ENV_PREFIX + name.upper() for name in (*type(config).model_fields, *OTHER_VARIABLES)}
    given = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    enabled = type(config).from_environment() is not None
    unknown = [name for name in given if name not in known]
    if unknown:
        return warning(f"not an option, and ignored: {', '.join(unknown)}", "compare with docs/options.md")
    how = "RL_MEMORY enables the plugin" if enabled else "RL_MEMORY is not set: the flag --rl-memory enables the plugin"
    return ok(f"{how}; options that differ from their defaults: {config.to_dict() or 'none'}", options=config.to_dict())


def processes() -> Finding:
    """The processes of this user that run an engine or have a status board open.

    A process that has changed its title hides its environment. Then the process that has started it counts.
    """
    rows = [row for row in map(_process, own_processes()) if row is not None]
    if not rows:
        return not_applicable("no process of this user has a status board open or names an engine in its command")
    enabled = {row["pid"] for row in rows if row["signs"]}
    for row in rows:
        if not row["signs"] and row["parent"] in enabled:
            row["signs"] = [f"started by {row['parent']}"]
            enabled.add(row["pid"])  # a parent has its number before its children
    told = [f"{row['pid']} ({row['command']}: {', '.join(row['signs']) or 'no sign of the plugin'})" for row in rows]
    without = [row for row in rows if not row["signs"]]
    if without and len(without) == len(rows):
        return warning(
            "; ".join(told), "start the engine with --rl-memory, if it should sleep or be updated", processes=rows
        )
    return ok("; ".join(told), processes=rows)


def _process(pid: int) -> dict[str, Any] | None:
    folder = PROC / str(pid)
    try:
        words = folder.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
        maps = folder.joinpath("maps").read_text(errors="replace")
        status = dict(line.split(":", 1) for line in folder.joinpath("status").read_text().splitlines())
        environment = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or is not ours to read
        return None
    signs = []
    if any(word.split("=")[0].replace("_", "-") == "--rl-memory" for word in words):
        signs.append("flag")
    if any(entry.partition("=")[0] in CHILD_VARIABLES for entry in environment):
        signs.append("child of an enabled engine")
    if any(entry.startswith("RL_MEMORY=") for entry in environment):
        signs.append("RL_MEMORY")
    if any(line.endswith(".board") and "/rl-memory-" in line for line in maps.splitlines()):
        signs.append("status board open")
    if not _runs_engine(words) and "status board open" not in signs:
        return None
    return {"pid": pid, "parent": int(status["PPid"]), "command": _short(words), "signs": signs}


def _short(words: list[str]) -> str:
    """The command without its options, among which may be a key."""
    if words[0].startswith(TITLES):
        return words[0]
    return " ".join(
        [Path(words[0]).name, *(word for word in words[1:4] if word.startswith(MODULES) or word == "serve")]
    )


def _runs_engine(words: list[str]) -> bool:
    """Whether this command is an engine's, and no command that starts one, such as a shell's."""
    if words[0].startswith(TITLES):
        return True
    program = Path(words[0]).name
    return program.startswith(("python", "vllm")) and any(
        word.startswith(MODULES) or Path(word).name == "vllm" for word in words[:4]
    )
