"""The command runs a small grid, resumes it after an interruption, and reports the results."""

from __future__ import annotations

import csv
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from torch.optim import SGD

from lightning_asyncpp import cli
from lightning_asyncpp.errors import NonFiniteGradientError
from research.ablations import training
from research.ablations.__main__ import main
from tests.helpers.models import write_texts

FIT = {
    "trainer": {"max_steps": 8, "max_epochs": -1, "val_check_interval": 4, "check_val_every_n_epoch": None},
    "model": {
        "class_path": "lightning_asyncpp.GPTModule",
        "init_args": {"config": {"vocab_size": 256, "context_length": 32, "num_layers": 1, "dim": 16, "num_heads": 2}},
    },
    "data": {
        "class_path": "lightning_asyncpp.data.TextDataModule",
        "init_args": {"context_length": 32, "batch_size": 4, "val_fraction": 0.2},
    },
}  # fmt: skip
GRID = {
    "name": "tiny", "recipe": "fit.yaml", "lr_extensions": 0, "delays": [{"stages": 2, "microbatches": 2}],
    "optimizers": {"AdamW": {"class_path": "torch.optim.AdamW", "lr": [0.001, 1e30]}},
}  # fmt: skip


class Dies(SGD):
    def step(self, closure: Any = None) -> Any:
        os._exit(1)


class Fails(SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("a mistake")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    fit = yaml.safe_load(yaml.safe_dump(FIT))
    fit["data"]["init_args"] |= {"source": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(fit))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID))
    write_texts(tmp_path / "text", 20)
    return [str(tmp_path / "grid.yaml"), "--output", str(tmp_path / "out"), "--workers", "1"]


def results(folder: Path) -> list[dict[str, str]]:
    path = folder / "out" / "tiny" / "results.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


class HereSlot:
    """Slot that trains in this process; its second training is interrupted."""

    started: ClassVar[list[Path]] = []

    def start(self, folder: Path) -> Future[None]:
        self.started.append(folder)
        if len(self.started) == 2:
            raise KeyboardInterrupt
        with suppress(training.DivergedError, NonFiniteGradientError):
            cli.run(["fit", "--config", str(folder / "fit.yaml")])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stop(self) -> None:
        pass


def test_a_grid_goes_on_after_an_interruption(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.ablations.__main__.slots", lambda *_: [HereSlot()])
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    (first,) = results(tmp_path)
    assert (first["lr"], first["delay"], first["stages"]) == ("0.001", "least microbatches=2", "2")
    assert 4.5 < float(first["loss"]) < 5.8  # ln 256 at first
    main(arguments)
    assert [(run["lr"], run["status"], run["loss"]) for run in results(tmp_path)] == [
        ("0.001", "finished", first["loss"]), ("1e+30", "diverged", ""),
    ]  # fmt: skip
    assert len(HereSlot.started) == 3, "what has ended runs once"
    table = (tmp_path / "out" / "tiny" / "table.md").read_text()
    assert f"**{float(first['loss']):.3f}** | diverged |" in table
    assert (tmp_path / "out" / "tiny" / "curves.svg").stat().st_size > 1000
    curves = [(line["step"], line["metric"]) for line in csv.DictReader((tmp_path / "out/tiny/curves.csv").open())]
    assert curves == [("4", "val_loss"), ("8", "val_loss")]


def test_a_process_trains_one_after_the_other_and_is_replaced_when_it_has_died(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fit = yaml.safe_load((tmp_path / "fit.yaml").read_text())
    fit["trainer"]["max_steps"] = 4
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(fit))
    grid: dict[str, Any] = yaml.safe_load(yaml.safe_dump(GRID))
    grid["optimizers"]["AdamW"]["lr"] = [0.001]
    grid["optimizers"]["dies"] = {"class_path": f"{__name__}.Dies", "lr": [1.0]}
    grid["optimizers"]["fails"] = {"class_path": f"{__name__}.Fails", "lr": [1.0]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    with pytest.raises(SystemExit, match="2 trainings failed; the same command tries them again"):
        main(arguments)
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]) == ["1/3", "FAILED", "FAILED"]
    (log,) = (tmp_path / "out" / "cells").glob("fails*/training.log")
    assert "a mistake" in log.read_text()
    assert [(run["optimizer"], run["status"]) for run in results(tmp_path)] == [("AdamW", "finished")]
