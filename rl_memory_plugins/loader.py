"""The plugin loader that a patched SGLang calls (see `patches/`).

SGLang 0.5.11 and later scan the entry-point group `sglang.srt.plugins` themselves. Earlier releases have no
loader; the diffs in `patches/` add a call of `load_sglang_plugins` to each of their processes. It does what the
releases with a loader do, so a plugin need not know which of the two called it:

- once per process, whichever patched place comes first;
- `SGLANG_PLUGINS`, a comma-separated list of names, restricts what is loaded;
- an `Exception` of one plugin is logged and the others still load. A plugin that wants to stop the process
  raises something that is not an `Exception`, such as `SystemExit`.

There is no `HookRegistry` here: a plugin that needs one must check for `sglang.srt.plugins.hook_registry`.
This module imports the standard library only, because it runs inside engine processes before anything else.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

__all__ = ["GROUP", "load_sglang_plugins"]

GROUP = "sglang.srt.plugins"

logger = logging.getLogger(__name__)

_loaded = False


def load_sglang_plugins() -> None:
    """Call every entry point of the group `sglang.srt.plugins`, the first time only."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # set first: a plugin may import a module that leads back here
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    for entry_point in entry_points(group=GROUP):
        if allowed and entry_point.name not in allowed:
            continue
        try:
            entry_point.load()()
        except Exception:
            logger.exception("SGLang plugin %s (%s) failed", entry_point.name, entry_point.value)
        else:
            logger.info("SGLang plugin %s loaded", entry_point.name)
