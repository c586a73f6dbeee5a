"""The command `rl-memory`, also as `python -m rl_memory_plugins`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from rl_memory_plugins.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"rl-memory: {error}")
    app()


if __name__ == "__main__":
    main()
