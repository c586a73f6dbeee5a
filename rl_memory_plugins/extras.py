"""Imports of packages that only an extra of this package installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """For imports in the body: name the extra that installs a missing package.

    Raises:
        ModuleNotFoundError: a package is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'rl_memory_plugins[{extra}]'", name=error.name
        ) from None
