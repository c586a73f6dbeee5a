"""What an adapter needs of its engine, checked in the engine's sources without importing them.

A release, or a tree that a trainer has patched, needs none of its dependencies for this check.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Symbols, as "module:Class.method", with a signature's parameters that are given by name or position.
Symbols = Mapping[str, tuple[str, ...]]


def asked_of_hooks() -> set[str]:
    """A set that gets every symbol for which hooks of this process ask from now on."""
    from rl_memory_plugins.hooking import Hooks

    asked: set[str] = set()

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Hooks, path: str, *rest: Any) -> Any:
            asked.add(path)
            return original(self, path, *rest)

        return ask

    for name in ("wrap", "require"):
        setattr(Hooks, name, recording(getattr(Hooks, name)))
    return asked


@dataclass(frozen=True)
class Needs:
    """What an adapter needs.

    Args:
        package: The engine's package.
        symbols: What every version must have.
        either: Groups of symbols, each group as a sequence of ways. A version must have all symbols of one way of each
            group. The first way is that of the newest versions.
        optional: Not in every version, and replaced where they are there.
        texts: By module, text that must stand in it: attributes that are set and not declared.
    """

    package: str
    symbols: Symbols
    either: Sequence[Sequence[Symbols]] = ()
    optional: Sequence[str] = ()
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def known(self) -> set[str]:
        """Every symbol that is checked, and the classes of those that are methods."""
        names = [*self.symbols, *(name for ways in self.either for way in ways for name in way)]
        return {*names, *self.optional, *(name.rpartition(".")[0] for name in names)}

    def missing(self, folder: Path) -> list[str]:
        """The symbols, parameters and texts that the package in `folder` does not have."""
        found = _missing(folder, self.symbols)
        for ways in self.either:
            if all(_missing(folder, way) for way in ways):
                found += _missing(folder, ways[0])
        for module, texts in self.texts.items():
            file = _file(folder, module)
            text = file.read_text() if file is not None else ""
            found += [f"{module}: {wanted}" for wanted in texts if wanted not in text]
        return found

    def installed(self) -> Path:
        """The folder of the installed package."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).parent

    def main(self) -> None:
        """Print what each package of the command line lacks."""
        for argument in sys.argv[1:]:
            print(argument, self.missing(Path(argument)) or "has everything")


def _missing(folder: Path, symbols: Symbols) -> list[str]:
    return [symbol for symbol, parameters in symbols.items() if not _has(folder, symbol, parameters)]


def _has(package: Path, symbol: str, parameters: tuple[str, ...]) -> bool:
    module, _, attributes = symbol.partition(":")
    node = _find(package, module, attributes.split("."))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return all(name in names for name in parameters)
    return node is not None


def _find(package: Path, module: str, names: list[str]) -> ast.AST | None:
    file = _file(package, module)
    if file is None:
        return None
    scope: ast.AST = ast.parse(file.read_text())
    for position, name in enumerate(names):
        found = _member(scope, name)
        if isinstance(found, ast.ImportFrom) and position == 0:
            source = found.module or ""
            if found.level:
                base = module if file.name == "__init__.py" else module.rpartition(".")[0]
                source = ".".join([*base.split(".")[: len(base.split(".")) - found.level + 1], source])
            return _find(package, source, names)
        if found is None:
            return _inherited(package, module, scope, names[position:])
        scope = found
    return scope


def _inherited(package: Path, module: str, scope: ast.AST, names: list[str]) -> ast.AST | None:
    """A member of a class's bases."""
    for base in getattr(scope, "bases", ()):
        found = _find(package, module, [base.id, *names]) if isinstance(base, ast.Name) else None
        if found is not None:
            return found
    return None


def _member(scope: ast.AST, name: str) -> ast.AST | None:
    for node in getattr(scope, "body", ()):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", ())
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _file(package: Path, module: str) -> Path | None:
    path = package.joinpath(*module.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)
