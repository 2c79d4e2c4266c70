"""Whatever a recipe holds, it is read, or a message says why not: no other error, no code of its own, no long wait."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_asyncpp.cli import AsyncppCLI, main, make_cli
from tests.fuzz.recipe_inputs import recipes

SECONDS = 60  # most that reading one recipe may take; it is a matter of milliseconds


class _Made(Exception):  # noqa: N818  (no error)
    def __init__(self, cli: AsyncppCLI, parser: Any) -> None:
        self.cli, self.parser = cli, parser


class _Keeps(AsyncppCLI):
    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        raise _Made(self, parser)


@pytest.fixture(scope="module")
def command() -> _Made:
    """The command and its parser, which takes a second to build."""
    before = sys.argv
    sys.argv = ["asyncpp", "fit"]
    try:
        make_cli(_Keeps)
    except _Made as made:
        return made
    finally:
        sys.argv = before
    raise AssertionError("no parser was made")


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Reading starts no process and leaves no file."""

    def refuse(*arguments: Any, **_: Any) -> NoReturn:
        raise AssertionError(f"a recipe ran {arguments}")

    for owner, name in ((os, "system"), (os, "popen"), (subprocess, "Popen"), (os, "remove"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.chdir(tmp_path)
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.yaml"}


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> NoReturn:
        raise TimeoutError(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(command: _Made, recipe: bytes) -> str:
    """What is said about a recipe; nothing if it was read."""
    Path("recipe.yaml").write_bytes(recipe)
    said = io.StringIO()
    code = 0
    before, sys.argv = sys.argv, ["asyncpp", "fit", "--config", "recipe.yaml"]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), limited(SECONDS):
            AsyncppCLI.parse_arguments(command.cli, command.parser, None)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    message = said.getvalue().rpartition("error: ")[2].strip() if code else ""
    assert (code == 2 and message) or not code, said.getvalue()
    return message


def read_all(command: _Made, seed: int, count: int) -> list[str]:
    said = []
    for number, recipe in enumerate(itertools.islice(recipes(seed), count)):
        try:
            said.append(read(command, recipe))
        except Exception as error:
            raise AssertionError(f"seed {seed}, recipe {number}: {error!r}: {recipe[:3000]!r}") from error
    return said


def test_a_seed_draws_the_same_recipes_whatever_was_drawn_before() -> None:
    first = list(itertools.islice(recipes(100), 100))
    assert list(itertools.islice(recipes(100), 100)) == first


def test_recipes_nest_deeper_than_the_stack_and_are_read_in_no_more_of_it() -> None:
    before = sys.getrecursionlimit()
    little = len(inspect.stack()) + 150
    sys.setrecursionlimit(little)
    try:
        limits = [sys.getrecursionlimit() for _ in itertools.islice(recipes(1), 60)]
    finally:
        sys.setrecursionlimit(before)
    assert limits == [little] * 60


def test_recipes(command: _Made) -> None:
    said = read_all(command, seed=1, count=60)
    assert len({text[:40] for text in said}) > 10, "all of them fail for the same reason"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_recipes(command: _Made, seed: int) -> None:
    said = read_all(command, seed=100 + seed, count=2500)
    assert len({text[:40] for text in said}) > 30


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (b"trainer: \xff", "no text in UTF-8"),
        (b"trainer: &a {callbacks: *a}", r"*a stands inside of what it stands for (line 1)"),
        (b"trainer: " + b"[" * 500 + b"]" * 500, "more than 32 levels inside of each other"),
        # Some parsers in C have a limit of their own, which they meet before they report the 33rd level.
        (b"trainer: " + b"[" * 5000 + b"]" * 5000, "level"),
        (b"trainer: {max_steps: 1" + b"0" * 5000 + b"}", "a number of 5001 characters"),
        (b"trainer: {max_steps: !!float x}", "not what the tag before it says"),
        (b"trainer:\n  gradient_clip_val: " + b"1:" * 180 + b"1.", "a value that is too large"),
        (b"config: 3", "cannot be read"),
        (b"trainer: !!python/object/apply:os.system [touch CANARY]", "could not determine a constructor"),
        (b"\n".join(b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9 if i else [b"x"])) for i in range(9)),
         "more than 10000 values, those counted that aliases repeat"),
    ],
    ids=["bytes", "itself", "levels", "many levels", "digits", "tag", "base 60", "config", "code", "aliases"],
)  # fmt: skip
def test_what_is_said(command: _Made, recipe: bytes, text: str) -> None:
    assert text in read(command, recipe)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("trainr: {}", "trainr"),
        ("trainr: {a: {b: {}}}", "trainr"),
        ("trainer: {foo: {}}", "trainer.foo"),
        ("trainer.foo: {}", "trainer.foo"),
        ("trainr: {a: 1}", "trainr.a"),  # which jsonargparse refuses itself
    ],
)
def test_an_unknown_name_is_refused_with_nothing_under_it_too(command: _Made, recipe: str, name: str) -> None:
    assert f"option '{name}'" in read(command, recipe.encode())


@pytest.mark.parametrize(
    "trainer", ["{}", "{strategy: {class_path: lightning_asyncpp.AsyncPipelineStrategy, init_args: {}}, plugins: []}"]
)
def test_known_names_may_have_nothing_under_them(command: _Made, trainer: str) -> None:
    demos = "lightning.pytorch.demos.boring_classes"
    recipe = f"""
        trainer: {trainer}
        model: {{class_path: {demos}.BoringModel, init_args: {{}}}}
        data: {{class_path: {demos}.BoringDataModule}}
    """
    assert read(command, recipe.encode()) == ""


def test_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_bytes(b"trainer: &a {callbacks: *a, x: \xff}")
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "recipe.yaml"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert "error: a file is no text in UTF-8" in printed
    assert "Traceback" not in printed
