"""The target of every hook: the symbols of the installed engine that the adapter replaces or uses."""

from __future__ import annotations

import importlib

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, worst
from rl_memory_plugins.doctor.machine import installed_engines
from rl_memory_plugins.errors import RLMemoryError

#: The package of each adapter: its `install` puts in all hooks, and its `hooks` knows them.
ADAPTERS = {"vllm": "rl_memory_plugins.engines.vllm", "sglang": "rl_memory_plugins.engines.sglang"}


def targets() -> Finding:
    """Put in all hooks, as an enabled engine does. For a process of its own, which then ends."""
    engines = installed_engines()
    if not engines:
        return not_applicable("no engine is installed in this environment")
    return worst([targets_of(engine) for engine in engines])


def targets_of(engine: str) -> Finding:
    hooks = importlib.import_module(f"{ADAPTERS[engine]}.hooks").hooks
    try:
        importlib.import_module(f"{ADAPTERS[engine]}.switch").register()
        importlib.import_module(f"{ADAPTERS[engine]}.install").install()
    except (RLMemoryError, SystemExit) as error:
        symbols = getattr(error, "details", {}).get("symbols", [])
        return failure(
            f"{engine}: {error}",
            "use a version of the engine that docs/compatibility.md lists",
            **{engine: {"missing": symbols}},
        )
    except ImportError as error:
        return failure(
            f"{engine}: the engine cannot be imported: {error}", "repair the engine's installation", **{engine: None}
        )
    replaced, asked = sorted(hooks.table), sorted(hooks.asked)
    return ok(
        f"{engine}: {len(replaced)} symbols can be replaced and {len(asked) - len(replaced)} more are used; none is "
        "missing",
        **{engine: {"replaced": replaced, "used": [name for name in asked if name not in hooks.table]}},
    )
