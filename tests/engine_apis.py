"""The names in an engine's API that touch what this package manages, from its sources without importing them.

An API that a new release adds must be honoured, refused or found harmless; nobody shall find it by a wrong answer. Each
engine's `test_apis.py` has lists of the names that are known, and fails for every other name.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

#: A name with one of these words may concern memory that sleeps, weights that change, or requests that are held back.
WORDS = re.compile(
    r"(?:^|_)(?:awake|checkpoint|discard|free|load|memory|offload(?:ing|er)?|paused?|preload|release|reload|reset|"
    r"restore|resume|sleep(?:ing)?|snapshot|suspend|swap|unload|updates?|wake|weights?)(?:_|$)"
)

Find = Callable[[ast.Module], Iterable[str]]
#: Files of the engine's package, by a glob; and what counts in them.
Place = tuple[str, Find]


def members(*classes: str) -> Find:
    """The public methods and fields of these classes; of all classes of the file if none is named."""

    def find(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield item.name
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        yield item.target.id

    return find


def functions(tree: ast.Module) -> Iterator[str]:
    """The functions of a module. SGLang moves methods of its model runner into such functions."""
    return (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def requests(tree: ast.Module) -> Iterator[str]:
    """The names of request types, in snake case."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and re.search(r"Req(Input)?$", node.name):
            yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()


def names(folder: Path, places: Iterable[Place]) -> set[str]:
    """The names that `WORDS` finds, each as `FILE: NAME`.

    Args:
        folder: The folder of the engine's package.
        places: A place may be missing: not every version has every file.
    """
    return {
        f"{path.relative_to(folder)}: {name}"
        for files, find in places
        for path in folder.glob(files)
        for name in find(ast.parse(path.read_text("utf-8-sig")))
        if WORDS.search(name) and not name.startswith("_")
    }


def unknown(found: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """The names that no pattern of `known` matches.

    Args:
        known: Patterns, separated by whitespace, for each way in which the package treats a name.
    """
    patterns = " ".join(known.values()).split()
    return sorted(
        one for one in found if not any(fnmatch.fnmatchcase(one.split(": ")[1], pattern) for pattern in patterns)
    )


HELP = """
The engine has an API that this package does not know. Read what it does in the engine's sources. If the package honours
it, or must honour it, add it to HONOURED, with a test. If it breaks the contract, refuse it in `modes.py` and add it to
REFUSED, and to docs/compatibility.md. If it does nothing without an option that is refused, add it to REFUSED_WITH.
Only if it cannot concern memory, weights or requests of a running engine that sleeps or is updated, add it to
HARMLESS."""
