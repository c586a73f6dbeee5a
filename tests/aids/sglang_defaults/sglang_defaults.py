"""An SGLang plugin for SGLang's own tests: other defaults for the engine's arguments, and sessions of updates.

The variable `SGLANG_TEST_DEFAULTS` holds the defaults as JSON, e.g. `{"device": "cpu"}`. An argument that a test gives
stays. SGLang from 0.5.21 refuses updates outside of a session, which older tests do not open: natively each update gets
one here, with the package on by its option `implicit_update_session`.
"""

import json
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    defaults = json.loads(os.environ.get("SGLANG_TEST_DEFAULTS", "{}"))
    if hasattr(Engine, "server_args_class"):
        _of_structs(defaults, Engine, ServerArgs)
    else:
        _of_dataclasses(defaults, ServerArgs)
    if "RL_MEMORY" not in os.environ:
        _open_sessions()


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


def _open_sessions() -> None:
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    if hasattr(Updater, "begin_weight_update"):
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            setattr(Updater, name, _in_session(getattr(Updater, name), io_struct))


def _in_session(update: Callable[[Any, Any], Any], io_struct: Any) -> Callable[[Any, Any], Any]:
    import msgspec

    def update_in_session(self: Any, recv_req: Any) -> Any:
        if self._session is not None:
            return update(self, recv_req)
        self.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=recv_req.selector))
        output = update(self, recv_req)  # it refuses itself if no session has begun
        ended = self.end_weight_update(io_struct.EndWeightUpdateReqInput())
        return output if ended.success else msgspec.structs.replace(output, success=False, message=ended.message)

    return update_in_session
