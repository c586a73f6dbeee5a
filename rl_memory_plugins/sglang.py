"""SGLang with one more argument: `Engine(model_path=…, rl_memory=True)`, and `ServerArgs` for `launch_server`.

With the package installed, `sglang.Engine` takes the argument too. The classes of this module enable it by default.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints import engine

from rl_memory_plugins.engines.sglang import register

__all__ = ["Engine", "server_args"]

register()


class Engine(engine.Engine):  # type: ignore[misc]
    """`sglang.Engine`. `rl_memory` is `True` for the defaults, or options (`config.RLMemoryConfig.parse`)."""

    def __init__(self, *, rl_memory: Any = True, **kwargs: Any) -> None:
        super().__init__(rl_memory=rl_memory, **kwargs)


def server_args(*, rl_memory: Any = True, **kwargs: Any) -> Any:
    """`sglang.srt.server_args.ServerArgs` for `launch_server`, with `rl_memory` as for `Engine`."""
    make = getattr(engine.Engine, "server_args_class", engine.ServerArgs)
    return make(rl_memory=rl_memory, **kwargs)
