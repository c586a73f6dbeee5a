"""What must work where only the wheel is installed: `python -I tests/installed.py VERSION [EXTRA]...`.

An extra that is not named must be missing, and its absence an error that names it.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import rl_memory_plugins
from rl_memory_plugins.trainer import EngineClient

version, *extras = sys.argv[1:]
assert rl_memory_plugins.__version__ == metadata.version("rl_memory_plugins") == version, rl_memory_plugins.__version__
assert "site-packages" in rl_memory_plugins.__file__, rl_memory_plugins.__file__
assert rl_memory_plugins.EngineClient is EngineClient
EngineClient("http://127.0.0.1:1").close()
for group in ("vllm.general_plugins", "vllm.endpoint_plugins", "sglang.srt.plugins"):
    assert callable(metadata.entry_points(group=group)["rl_memory"].load()), group
for extra, module in (("server", "config"), ("cli", "cli")):
    try:
        importlib.import_module(f"rl_memory_plugins.{module}")
        found = True
    except ModuleNotFoundError as error:
        assert f"pip install 'rl_memory_plugins[{extra}]'" in str(error), error
        found = False
    assert found == (extra in extras), (extra, found)
print(f"rl_memory_plugins {version} is installed, with {', '.join(extras) or 'no extras'}")
