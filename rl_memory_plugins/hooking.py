"""Replace symbols of an engine. A missing symbol stops the start, and the error names all missing symbols."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from rl_memory_plugins.errors import UnsupportedError

_all: list[Hooks] = []


def replaced() -> dict[str, list[str]]:
    """The symbols that this package has replaced in this process, by the engine that has them."""
    return {hooks.engine: sorted(hooks.table) for hooks in _all if hooks.table}


class Hooks:
    """The symbols of one engine that this package has replaced in this process.

    Args:
        distribution: The engine's distribution names, for error messages; the first one installed counts.
    """

    def __init__(self, *distribution: str) -> None:
        self._distributions = distribution
        self.engine = distribution[0]
        self.table: dict[str, Callable[..., Any]] = {}  # "module:Owner.name" → the engine's own function
        self.asked: set[str] = set()  # every path that was asked for, also those that are used and not replaced
        self._absent: dict[str, Exception] | None = None  # the symbols that `install` has missed so far, and why
        _all.append(self)

    def install(self, *roles: Callable[[Hooks], None]) -> None:
        """Put in the hooks of all roles.

        Raises:
            UnsupportedError: names every symbol that a role needs and the installed engine does not have. The other
                hooks are in place, so the start must end here.
        """
        absent: dict[str, Exception] = {}
        self._absent = absent
        try:
            for role in roles:
                role(self)
        finally:
            self._absent = None
        if absent:
            raise self._unsupported(absent) from next(iter(absent.values()))

    def wrap(self, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function at `"package.module:Owner.name"` by `make(original)`, once per process.

        Raises:
            UnsupportedError: the installed engine does not have the symbol. `install` raises it at its end.
        """
        if path in self.table:
            return
        owner, name, original = self._find(path)
        if owner is None:
            return
        # A class stores a static or class method as a wrapper around its function.
        kind = type(owner.__dict__.get(name)) if isinstance(owner, type) else None
        if kind is classmethod:
            original = original.__func__
        replacement: Any = functools.wraps(original)(make(original))
        setattr(owner, name, kind(replacement) if kind in (staticmethod, classmethod) else replacement)
        self.table[path] = original

    def require(self, path: str) -> Any:
        """The object at `path`, for symbols that are used and not replaced. Raises as `wrap` does."""
        owner, _, found = self._find(path)
        # A role may set attributes on the object that it requires; the stand-in accepts them.
        return SimpleNamespace() if owner is None else found

    def _find(self, path: str) -> tuple[Any, str, Any]:
        """The owner, the name and the object of a path. During `install` the owner of a missing symbol is `None`."""
        self.asked.add(path)
        module, _, attributes = path.partition(":")
        *owners, name = attributes.split(".")
        missing = module
        try:
            owner = importlib.import_module(module)
            for position, part in enumerate(owners):
                missing = f"{module}:{'.'.join(owners[: position + 1])}"
                owner = getattr(owner, part)
            missing = path
            return owner, name, getattr(owner, name)
        except (ImportError, AttributeError) as error:
            if self._absent is None:
                raise self._unsupported({path: error}) from error
            self._absent.setdefault(missing, error)
            return None, name, None

    def _unsupported(self, absent: dict[str, Exception]) -> UnsupportedError:
        version = "not installed"
        for distribution in self._distributions:
            try:
                version = f"{distribution} {metadata.version(distribution)}"
                break
            except metadata.PackageNotFoundError:
                continue
        names = ", ".join(map(_described, absent.items()))
        return UnsupportedError(
            f"rl_memory needs {names}, which this engine ({version}) does not have",
            symbols=list(absent),
            engine=version,
        )


def _described(absent: tuple[str, Exception]) -> str:
    """A symbol, with the reason if its module exists and cannot be imported."""
    symbol, cause = absent
    is_there = isinstance(cause, ImportError) and not symbol.startswith(cause.name or "")
    return f"{symbol} ({cause})" if is_there else symbol
