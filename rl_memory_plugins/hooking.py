"""Replacing an engine's symbols, loudly: a symbol that is not there stops the start and is named."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rl_memory_plugins.errors import UnsupportedError


class Hooks:
    """The symbols of one engine that this package has replaced, in this process.

    Args:
        distribution: The engine's distribution names, for error messages; the first one installed counts.
    """

    def __init__(self, *distribution: str) -> None:
        self._distributions = distribution
        self.table: dict[str, Callable[..., Any]] = {}  # "module:Owner.name" → what was there before

    def wrap(self, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function at `"package.module:Owner.name"` by `make(original)`, once per process.

        Raises:
            UnsupportedError: the symbol does not exist in the installed engine.
        """
        if path in self.table:
            return
        owner, name = self._owner(path)
        original = getattr(owner, name, None)
        if original is None:
            raise self._missing(path)
        # What a class keeps beside the function it was given; a class method's function takes the class.
        kind = type(owner.__dict__.get(name)) if isinstance(owner, type) else None
        if kind is classmethod:
            original = original.__func__
        replacement: Any = functools.wraps(original)(make(original))
        setattr(owner, name, kind(replacement) if kind in (staticmethod, classmethod) else replacement)
        self.table[path] = original

    def require(self, path: str) -> Any:
        """The object at `path`, for symbols that are used and not replaced."""
        owner, name = self._owner(path)
        if not hasattr(owner, name):
            raise self._missing(path)
        return getattr(owner, name)

    def _owner(self, path: str) -> tuple[Any, str]:
        module, _, attributes = path.partition(":")
        *owners, name = attributes.split(".")
        try:
            owner = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
        except (ImportError, AttributeError) as error:
            raise self._missing(path) from error
        return owner, name

    def _missing(self, path: str) -> UnsupportedError:
        version = "not installed"
        for distribution in self._distributions:
            try:
                version = f"{distribution} {metadata.version(distribution)}"
                break
            except metadata.PackageNotFoundError:
                continue
        return UnsupportedError(
            f"rl_memory needs {path}, which this engine ({version}) does not have", symbol=path, engine=version
        )
