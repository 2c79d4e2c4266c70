"""What the command finds out before it starts processes, and says once: devices, data, stages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lightning_asyncpp.cli import main
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.lightning_cli import command
from lightning_asyncpp.lightning_cli.messages import say_what_is_logged

RECIPE = str(Path(__file__).parents[1] / "recipes/quickstart.yaml")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A prepared folder whose index was cut short."""
    (tmp_path / "text").mkdir()
    for index in range(4):
        (tmp_path / "text" / f"{index}.txt").write_text("words and words " * 40)
    data = TextDataModule(str(tmp_path / "text"), context_length=8, cache_dir=str(tmp_path / "cache"), val_fraction=0.3)
    data.prepare_data()
    data.check_source()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (folder / "train" / "index.json").write_text("{")
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says, which ends with an error before anything starts."""
    with pytest.raises(SystemExit) as end:
        main(["fit", RECIPE, *arguments])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "starting" not in printed
    assert printed.count("asyncpp: error: ") == 1
    return printed.partition("asyncpp: error: ")[2]


def test_data_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--data.source", str(tmp_path / "nowhere"))
    assert printed.startswith(f"source='{tmp_path / 'nowhere'}': there is no such folder. Give ")
    assert printed.count("\n") == 1
    assert "holds no text file" in said(capsys, "--data.source", str(tmp_path))


def test_tokens_that_cannot_be_read(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--data.source", str(tokens))
    assert str(tokens) in printed
    assert printed.count("\n") == 1


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *problems = said(capsys, "--trainer.devices", "9", "--data.source", str(tmp_path)).splitlines()
    assert first == "2 problems:"
    assert "holds no text file" in problems[0]
    assert "microbatches=4 is" in problems[1]


def test_a_number_of_devices_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--trainer.devices", "lots")
    assert printed == (
        "the Trainer refuses its arguments: `devices` selected with `CPUAccelerator` should be an int > 0.\n"
    )


def test_lightning_advertises_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.AsyncppCLI, "_run_subcommand", lambda *_: None)
    records: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: records.append(record.getMessage()))
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        main(["fit", RECIPE])
    finally:
        logger.removeHandler(handler)
    assert any(text.startswith("GPU available") for text in records)
    assert not [text for text in records if "Tip" in text]


def test_more_stages_than_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--trainer.devices", "5").startswith("microbatches=4 is smaller than the number of stages (5)")


def test_a_line_says_what_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.AsyncppCLI, "_run_subcommand", lambda *_: None)
    main(["fit", RECIPE])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asyncpp: ")]
    assert lines == ["asyncpp: fit: starting 2 processes (AsyncPipelineStrategy, CPU)"]


def test_preparing_text_is_said_by_the_command_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script has it from `logging`, if it wants to."""
    (tmp_path / "text").mkdir()
    for index in range(4):
        (tmp_path / "text" / f"{index}.txt").write_text("words and words " * 40)
    data = TextDataModule(str(tmp_path / "text"), context_length=8, cache_dir=str(tmp_path / "cache"))
    logger = logging.getLogger("lightning_asyncpp")
    logger.handlers.clear()  # of a command that ran in this process
    logger.setLevel(logging.NOTSET)
    say_what_is_logged()
    say_what_is_logged()
    try:
        data.prepare_data()
        data.prepare_data()
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    printed = capsys.readouterr().err
    assert printed.count("asyncpp: ") == 1
    assert printed.startswith(f"asyncpp: preparing tokens of {tmp_path / 'text'} (4 files) in ")
