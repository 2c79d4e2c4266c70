"""What the command finds out before it starts processes, and says once: devices, data, stages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpp.cli import main
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.lightning_cli import command
from lightning_asyncpp.lightning_cli.before_start import refused_by_trainer
from lightning_asyncpp.lightning_cli.startup import say_what_is_logged

RECIPE = str(Path(__file__).parents[1] / "recipes/quickstart.yaml")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")


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


@needs_no_gpu
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_gpus_that_are_not_there(accelerator: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--trainer.accelerator", accelerator)
    assert "finds 0 GPUs on this machine: give --trainer.accelerator cpu\n" in printed
    assert f"accelerator='{accelerator}' and devices=2" in printed


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    lightnings = MisconfigurationException("You requested gpu: [0, 1]\n But your machine only has: [0]")
    refusal = str(refused_by_trainer(lightnings, {"accelerator": "gpu", "devices": 2}))
    assert refusal.startswith("the recipe has accelerator='gpu' and devices=2, and torch ")
    assert refusal.endswith("finds 1 GPUs on this machine: give --trainer.devices 1, or --trainer.accelerator cpu")
    other = MisconfigurationException("something\n  else")
    assert str(refused_by_trainer(other, {"accelerator": "gpu"})) == "the Trainer refuses its arguments: something else"


def test_data_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--data.source", str(tmp_path / "nowhere"))
    assert printed.startswith(f"source='{tmp_path / 'nowhere'}': there is no such folder. Give ")
    assert printed.count("\n") == 1
    assert "holds no text file" in said(capsys, "--data.source", str(tmp_path))


def test_tokens_that_cannot_be_read(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = said(capsys, "--data.source", str(tokens))
    assert str(tokens) in printed
    assert printed.count("\n") == 1


def test_more_stages_than_layers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trainer.devices", "9", "--trainer.strategy.micro_batches", "9"]
    assert said(capsys, *arguments).startswith("the model has 6 layers with parameters, fewer than the 9 stages: use")
    assert "partition=[1, 2] places 3 layers" in said(capsys, "--trainer.strategy.partition=[1,2]")


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the number of layers nor the Trainer's arguments wait until the micro-batches are right."""
    printed = said(capsys, "--trainer.devices", "9", "--trainer.sync_batchnorm", "true", "--data.source", str(tmp_path))
    first, *problems = printed.splitlines()
    assert first == "4 problems:"
    for number, (problem, line) in enumerate(
        zip(
            [
                "holds no text file",
                "sync_batchnorm=True: BatchNorm would",
                "micro_batches=4 is",
                "the model has 6 layers",
            ],
            problems,
            strict=True,
        ),
        start=1,
    ):
        assert line.startswith(f"  {number}. ")
        assert problem in line


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


def test_more_stages_than_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--trainer.devices", "5").startswith("micro_batches=4 is smaller than the number of stages (5)")


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
