"""What a checkpoint names is shown, and read only by leave; nothing is written where it says."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.cli import main
from lightning_asyncpp.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=8, num_layers=1, dim=16, num_heads=2)
OWN = "lightning_asyncpp.data.TextDataModule"


class Stream(io.StringIO):
    """What a terminal is, or is not."""

    def __init__(self, text: str, is_terminal: bool) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Place:
    """A private folder, a checkpoint of somebody else's that names it, and who evaluates that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.private, self.theirs, self.own = folder / "private", folder / "theirs", folder / "own"
        self.checkpoint = folder / "theirs.ckpt"
        self._patch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.own))
        monkeypatch.setattr(sys, "argv", ["asyncpp"])
        self.private.mkdir()
        for number in range(12):
            (self.private / f"{number}.txt").write_text(f"a secret, and no more than one: {number}\n" * 9)

    def write(self, **changed: Any) -> None:
        data = {"_class_path": OWN, "source": str(self.private), "cache_dir": str(self.theirs), **changed}
        state = {f"model.{name}": tensor for name, tensor in GPT(CONFIG).state_dict().items()}
        content = {"state_dict": state, "hyper_parameters": {"config": asdict(CONFIG)}, "data": {"tokenizer": "byte"}}
        torch.save({**content, "datamodule_hyper_parameters": data}, self.checkpoint)

    def evaluate(self, *arguments: str, answer: str | None = None) -> tuple[int, str, str]:
        """Exit code, and what was printed; with an answer there is a terminal."""
        self._patch.setattr(sys, "stdin", Stream(answer or "", answer is not None))
        self._patch.setattr(sys.stderr, "isatty", lambda: answer is not None, raising=False)
        self._capsys.readouterr()
        code = 0
        try:
            main(["evaluate", str(self.checkpoint), "--split", "all", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def written(self) -> set[str]:
        return {path.name for path in (self.theirs, self.own) if path.exists()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    made = Place(tmp_path, monkeypatch, capsys)
    made.write()
    return made


def test_without_a_terminal_nothing_is_read(place: Place) -> None:
    code, _, error = place.evaluate()
    assert code == 2
    assert place.written() == set()
    assert error.startswith(f"asyncpp evaluate: error: {place.checkpoint} names the data that its model was trained")
    for line in (f"  class   {OWN}", f"  reads   {str(place.private)!r}, text: '**/*.txt', ", "  writes  '"):
        assert line in error
    assert f"{str(place.own / 'lightning_asyncpp')!r}, the text as tokens" in error
    assert str(place.theirs) not in error.replace(str(place.checkpoint), "")
    assert error.endswith("To evaluate on this, give --yes; or name what to evaluate on: --data\n")


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(place: Place, answer: str, agrees: bool) -> None:
    code, out, error = place.evaluate(answer=answer)
    assert f"  reads   {str(place.private)!r}" in error
    assert "Read this? [y/N] " in error
    assert code == (0 if agrees else 2)
    assert ("nats per token" in out) == agrees
    assert place.written() == ({"own"} if agrees else set()), "and never where the checkpoint says"


def test_who_agrees_beforehand_is_not_asked(place: Place) -> None:
    code, out, error = place.evaluate("--yes")
    assert (code, place.written()) == (0, {"own"})
    assert "nats per token" in out
    assert "names the data" not in error


def test_who_names_the_data_is_not_asked(place: Place, tmp_path: Path) -> None:
    cache = tmp_path / "mine"
    code, _, _ = place.evaluate("--data", str(place.private), "--cache-dir", str(cache))
    assert (code, place.written(), cache.is_dir()) == (0, set(), True)


@pytest.mark.parametrize("kind", ["os.system", "theirs.Data", "lightning_asyncpp.data.TextDataModule.x", 3])
def test_a_class_of_others_is_not_imported(place: Place, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(_class_path=kind)
    monkeypatch.setitem(sys.modules, "theirs", None)
    code, _, error = place.evaluate("--yes")
    assert code == 2
    assert f"data of the class {kind!r}, which is none of this package's and is not imported" in error
    assert place.written() == set()


@pytest.mark.parametrize("changed", [{"source": ["a"]}, {"source": ""}, {"val_source": 3}, {"patterns": 5}])
def test_what_is_no_place_is_refused(place: Place, changed: dict[str, Any]) -> None:
    place.write(**changed)
    code, _, error = place.evaluate("--yes")
    assert code == 2
    assert "names no data that can be read; name what to evaluate it on: --data" in error


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"source": "s3://bucket/a"}, ["reads   's3://bucket/a', tokens", "lightning_asyncpp', what is streamed"]),
        ({"source": "stdlib"}, ["reads   stdlib (of this Python)"]),
        ({"source": "/a\x1b[2Jb", "patterns": ["../*"]}, ["reads   '/a\\x1b[2Jb', text: '../*'"]),
        ({"val_source": "/etc"}, ["reads   '/etc', text"]),
    ],
)
def test_all_places_are_shown_without_what_acts_on_a_terminal(
    place: Place, changed: dict[str, Any], lines: list[str]
) -> None:
    place.write(**changed)
    _, _, error = place.evaluate()
    assert all(line in error for line in lines), error


def test_help_says_how_to_agree(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert "--yes" in capsys.readouterr().out
