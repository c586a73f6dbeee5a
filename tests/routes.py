"""The paths that an engine's server takes POST requests and WebSockets to, from its sources without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ADDS_ROUTE = {"post", "put", "api_route", "add_api_route", "websocket"}


def post_routes(folder: Path) -> set[str]:
    """Of all Python files below; for a path that a variable of the environment may change, the usual one."""
    routes: set[str] = set()
    for file in folder.rglob("*.py"):
        routes.update(_routes_in(ast.parse(file.read_text("utf-8-sig"))))
    return routes


def _routes_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in ADDS_ROUTE and not _only_reads(node):
            path = node.args[0]
            if isinstance(path, ast.Call) and path.args:  # os.environ.get(name, usual)
                path = path.args[-1]
            if isinstance(path, ast.Constant) and isinstance(path.value, str) and path.value.startswith("/"):
                yield path.value


def _only_reads(call: ast.Call) -> bool:
    methods = next((keyword.value for keyword in call.keywords if keyword.arg == "methods"), None)
    return isinstance(methods, ast.List) and not {"POST", "PUT"} & {ast.literal_eval(item) for item in methods.elts}
