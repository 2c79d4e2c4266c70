"""Recipes as nobody should write them: mutations of good ones, as trees and as bytes; the same for the same seed."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parents[2] / "recipes"
_NAMES = ("quickstart.yaml", "quickstart_moe.yaml", "smollm_360m.yaml", "moe_10b.yaml")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**200), 10**300, 1e308, -0.0, float("inf"), float("nan"), "", " ",
    "x", "null", "1e-3", "0x10", "1:30", "~", "\0", "\ud7ff", "ü" * 50, "a" * 5000, "../../..", "/", "*", "!!int 3",
    "${oc.env:HOME}", "{{7*7}}", "%s%n", "os.system", "lightning_asyncpp.AsyncPipelineStrategy", "builtins.eval",
    "lightning_asyncpp.optim.ErrorFeedback", "nowhere.Nothing", ".", "..a..", [], {}, [[]], [None], {"": None},
    [1, "a"],
    {"class_path": None}, {"class_path": []}, {"class_path": "lightning_asyncpp.GPTModule"}, {"init_args": {}},
    {"class_path": "os.system", "init_args": {"command": "false"}}, {"dict_kwargs": {"a": 1}},
)  # fmt: skip
_KEYS = ("", "x", "class_path", "init_args", "dict_kwargs", "__class__", "config", "fit", "a.b", ".", "0", "max_steps")
_TEXTS = (
    b"!!python/object/apply:os.system ['touch CANARY']", b"!!python/name:os.system", b"!!python/module:os",
    b"!!python/object/new:os.system [touch CANARY]", b"!<tag:yaml.org,2002:python/object/apply:os.remove> [x]",
    b"!!binary aGVsbG8=", b"!!set {a, b}", b"!!timestamp 2001-01-01", b"2001-01-01", b"!!float x", b"!!int []",
    b"!x y",
    b"&a [*a]", b"&a {b: *a}", b"*nowhere", b"{<<: [1]}", b"{<<: {<<: 3}}", b"? [a, b]\n: 3", b"[", b"{", b"]", b"'",
    b'"',
    b"|", b">-", b"@", b"`", b"%YAML 9.9", b"---\n...\n---", b"\xff\xfe", b"\xc3\x28", b"\x00", b"\x85",
    b"\xef\xbb\xbf",
    b"[" * 40, b"[" * 20_000, b"{a: " * 20_000, b"- " * 20_000, b"9" * 5000, b"0x" + b"f" * 5000, b"1:" * 3000 + b"1",
    b"\ta: 1", b"1" + b"_" * 3000 + b"1", b".5e999999999", b"[" + b"1," * 20_000 + b"]",
    b"\n".join(b"l%d: &l%d [%s]" % (i, i, b",".join([b"*l%d" % (i - 1)] * 9 if i else [b"x"])) for i in range(12)),
)  # fmt: skip


def recipes(seed: int) -> Iterator[bytes]:
    """Endlessly many."""
    draw = random.Random(seed)
    good = [yaml.safe_load((RECIPES / name).read_text()) for name in _NAMES]
    while True:
        with _room_to_nest():
            recipe = _recipe(good, draw)
        yield recipe


@contextlib.contextmanager
def _room_to_nest() -> Iterator[None]:
    """What is deepened and copied five times has up to 1600 levels, of which PyYAML takes three frames each to write.

    Only while a recipe is made: it is read in the room that a user's has.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _recipe(good: list[Any], draw: random.Random) -> bytes:
    tree = copy.deepcopy(draw.choice(good))
    if draw.random() < 0.95:  # a part of a recipe is read much faster, and nothing comes before its mistakes
        tree = {key: tree[key] for key in draw.sample(sorted(tree), 1)}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
        _mutate(tree, draw)
    text = yaml.safe_dump(tree, allow_unicode=True).encode()
    return _scrambled(text, draw) if draw.random() < 0.5 else text


def _mutate(tree: Any, draw: random.Random) -> None:
    """Change one place anywhere in a tree."""
    places = list(_places(tree))
    if not places:
        return
    parent, key = draw.choice(places)
    what = draw.choice(("value", "value", "value", "remove", "add", "rename", "wrap", "deepen", "copy"))
    if what == "remove":
        del parent[key]
    elif what == "wrap":
        parent[key] = draw.choice(([parent[key]], {"x": parent[key]}, {"class_path": parent[key]}, str(parent[key])))
    elif what == "deepen":
        for _ in range(draw.choice((5, 30, 100))):
            parent[key] = [parent[key]] if draw.random() < 0.5 else {draw.choice(_KEYS): parent[key]}
    elif what == "copy":
        parent[key] = copy.deepcopy(tree)
    elif what in ("add", "rename") and isinstance(parent, dict):
        name = draw.choice((*_KEYS, 3, None, True, 1.5))
        parent[name] = parent.pop(key) if what == "rename" else copy.deepcopy(draw.choice(_VALUES))
    else:
        parent[key] = copy.deepcopy(draw.choice(_VALUES))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in entries:
        yield node, key
        yield from _places(child)


def _scrambled(text: bytes, draw: random.Random) -> bytes:
    """Change a few bytes of a text, or put something into it that YAML knows and a recipe does not."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 0, 1, 5, 50)))
        put = draw.choice((b"", draw.randbytes(3), draw.choice(_TEXTS), draw.choice(_TEXTS)))
        if draw.random() < 0.7 and (colons := [i for i in range(len(text)) if text[i : i + 2] in (b": ", b":\n")]):
            start = end = draw.choice(colons) + 1  # where a value is expected
            put = b" " + put
        text = text[:start] + put + text[end:]
    return text
