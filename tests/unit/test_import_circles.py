"""No module of the package imports another that imports it back, at whatever time: lazily, or for types only."""

from __future__ import annotations

import ast
from pathlib import Path

import rl_memory_plugins

ROOT = Path(rl_memory_plugins.__file__).parent


def module_name(path: Path) -> str:
    parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, source: str, modules: set[str]) -> set[str]:
    """Those of `modules` that the module `name` imports anywhere in its source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            owner = f"{name.rsplit('.', node.level)[0]}.{node.module}" if node.level else str(node.module)
            for alias in node.names:
                inner = f"{owner}.{alias.name}"
                found.add(inner if inner in modules else owner)
    return found & modules


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other (strongly connected components of more than one module)."""

    def reach(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for other in imports[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reached = {name: reach(name) for name in imports}
    groups = {
        tuple(sorted({name} | {other for other in reached[name] if name in reached[other]}))
        for name in imports
        if name in reached[name]
    }
    return sorted(map(list, groups))


def test_no_module_imports_itself_by_way_of_others() -> None:
    sources = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}
    modules = set(sources)
    assert circles({name: imports_of(name, source, modules) for name, source in sources.items()}) == []


def test_the_check_above_can_fail() -> None:
    modules = {"p", "p.a", "p.b", "p.c"}
    sources = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "def late():\n    from .c import thing",
        "p.c": "if TYPE_CHECKING:\n    import p.a",
    }
    found = circles({name: imports_of(name, source, modules) for name, source in sources.items()})
    assert found == [["p.a", "p.b", "p.c"]]
