"""The process of one check: `python -m rl_memory_plugins.doctor.child MODULE:FUNCTION FILE` writes its finding."""

from __future__ import annotations

import importlib
import sys
from functools import reduce
from pathlib import Path

import msgspec

from rl_memory_plugins.doctor.check import Check
from rl_memory_plugins.doctor.runner import attempt


def main() -> None:
    function, answer = sys.argv[1:]
    module, _, name = function.partition(":")
    examine = reduce(getattr, name.split("."), importlib.import_module(module))
    finding = attempt(Check("", examine, ""))  # type: ignore[arg-type]
    Path(answer).write_bytes(msgspec.json.encode(finding))


if __name__ == "__main__":
    main()
