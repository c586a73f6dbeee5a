"""An SGLang plugin: other defaults for the engine's arguments, for tests that start engines with SGLang's own.

The variable `SGLANG_TEST_DEFAULTS` holds them as JSON, e.g. `{"device": "cpu"}`. An argument that a test gives stays.
"""

import json
import os
from typing import Any


def register() -> None:
    from sglang.srt.server_args import ServerArgs

    defaults = json.loads(os.environ.get("SGLANG_TEST_DEFAULTS", "{}"))
    original = ServerArgs.__post_init__

    def __post_init__(self: Any) -> None:
        for name, value in defaults.items():
            if getattr(self, name) == getattr(type(self), name):
                setattr(self, name, value)
        original(self)

    ServerArgs.__post_init__ = __post_init__
