"""The package uses few private names of Lightning, torch and torchmetrics, since any release may remove them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_asyncpp"
MOST = 28
OF_OTHERS = {
    "_asdict", "_fields", "_replace", "_exit", "_getframe",  # of Python: named tuples, os and sys, all documented
    "_option_string_actions",  # of Python's argparse, since its first release
    "_DistributedEnv", "_datasets",  # of litdata
}  # fmt: skip
LOOKED_UP = ("required", "getattr", "hasattr", "setattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes that a file of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if ast.unparse(node.value) in ("self", "cls") else ""


def used(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that a file reads, and whether its imports or ``required`` mark them as third-party names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, False
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("lightning_asyncpp"):
            yield from ((name, True) for name in [*str(node.module).split("."), *(a.name for a in node.names)])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKED_UP:
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.func.id == "required"


def private_names() -> dict[str, set[str]]:
    """Return third-party private names, with the files that use them."""
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = {name for tree in trees.values() for name in defined(tree)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name, is_others in used(tree):
            if is_private(name) and name not in OF_OTHERS and (is_others or name not in own):
                found.setdefault(name, set()).add(file)
    return found


def test_there_are_few() -> None:
    found = private_names()
    assert {"_current_fx_name", "_in_fabric_backward"} < found.keys(), "the search finds nothing"
    assert len(found) <= MOST, "\n".join(f"{name}: {', '.join(sorted(files))}" for name, files in sorted(found.items()))
