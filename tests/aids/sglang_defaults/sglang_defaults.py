"""An SGLang plugin: other defaults for the engine's arguments, for tests that start engines with SGLang's own.

The variable `SGLANG_TEST_DEFAULTS` holds them as JSON, e.g. `{"device": "cpu"}`. An argument that a test gives stays.
"""

import json
import os
from typing import Any


def register() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    defaults = json.loads(os.environ.get("SGLANG_TEST_DEFAULTS", "{}"))
    if hasattr(Engine, "server_args_class"):
        _of_structs(defaults, Engine, ServerArgs)
    else:
        _of_dataclasses(defaults, ServerArgs)


def _of_structs(defaults: dict[str, Any], engine: Any, arguments: Any) -> None:
    """A struct calls the `__post_init__` that its class was made with, and its attributes are descriptors."""
    make, from_command_line = engine.server_args_class, arguments.from_cli_args.__func__

    def from_cli_args(cls: Any, args: Any) -> Any:
        for name, value in defaults.items():
            if getattr(args, name, None) in (None, False):
                setattr(args, name, value)
        return from_command_line(cls, args)

    engine.server_args_class = staticmethod(lambda *args, **kwargs: make(*args, **{**defaults, **kwargs}))
    arguments.from_cli_args = classmethod(from_cli_args)


def _of_dataclasses(defaults: dict[str, Any], arguments: Any) -> None:
    original = arguments.__post_init__

    def __post_init__(self: Any) -> None:
        for name, value in defaults.items():
            if getattr(self, name) == getattr(type(self), name):
                setattr(self, name, value)
        original(self)

    arguments.__post_init__ = __post_init__
