"""The parts of this package that need more than msgspec and httpx, by the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around the imports that an extra of this package installs.

    Raises:
        ModuleNotFoundError: one of them is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'rl_memory_plugins[{extra}]'", name=error.name
        ) from None
