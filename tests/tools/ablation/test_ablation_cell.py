"""One training of an ablation: what it records, and when it counts as diverged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp import DelayedGradientStrategy, GPTModule
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.ablation.grid import CellKey
from lightning_asyncpp.tools.ablation.recipe.rows import make_rows
from lightning_asyncpp.tools.ablation.recipe.yaml_files import read_yaml, write_yaml
from lightning_asyncpp.tools.ablation.results import CellResult
from lightning_asyncpp.tools.ablation.run.cell import train
from lightning_asyncpp.tools.ablation.run.recorder import Recorder
from lightning_asyncpp.tools.ablation.run.training_folders import Table
from tests.tools.ablation.small import ADAMW, FIT, load_recipe, write_ablation

LR = 0.01


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cell")


def trained(place: Path, monkeypatch: pytest.MonkeyPatch, lr: float = LR, **changes: Any) -> CellResult:
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    recipe = load_recipe(write_ablation(place, **changes))
    (row,) = make_rows(recipe)
    table = Table(recipe, [row], place / "out")
    return train(table.make_cell(CellKey(row.key, lr, 3), "cpu"))


def test_a_training_ends_with_the_loss_that_the_trainer_alone_has(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained(place, monkeypatch, delays=[1])
    assert [step for step, _ in result.curve] == [5, 10, 12]
    assert [step for step, _ in result.train_curve] == list(range(1, 13))
    assert (result.status, result.steps) == ("finished", 12)
    assert result.loss == result.curve[-1][1] < result.curve[0][1]
    assert result.seconds > 0
    assert result.versions["torch"].startswith(torch.__version__.partition("+")[0])
    assert (result.versions["device"], result.versions["threads"]) == ("cpu", str(torch.get_num_threads()))
    assert result.loss == loss_of_the_trainer_alone(place)


def loss_of_the_trainer_alone(place: Path) -> float:
    L.seed_everything(3)
    module = GPTModule(
        FIT["model"]["init_args"]["config"],
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
    )
    data = TextDataModule(
        str(place / "text"), cache_dir=str(place / "cache"), context_length=32, batch_size=4, val_fraction=0.2
    )
    trainer = L.Trainer(
        strategy=DelayedGradientStrategy(delay=1), accelerator="cpu", devices=1, max_steps=12, max_epochs=-1,
        val_check_interval=5, check_val_every_n_epoch=None, limit_val_batches=2, num_sanity_val_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("delay", [0, 1])
def test_a_huge_learning_rate_is_recorded_as_diverged(place: Path, monkeypatch: pytest.MonkeyPatch, delay: int) -> None:
    result = trained(place, monkeypatch, lr=1e30, delays=[delay])
    assert (result.status, result.loss) == ("diverged", None)
    assert 0 < result.steps < 12
    assert result.reason
    assert all(math.isfinite(value) for _, value in result.curve + result.train_curve)


def test_a_loss_above_the_bound_ends_the_training_as_diverged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained(place, monkeypatch, diverged_above=0.5)
    assert (result.status, result.loss, result.steps) == ("diverged", None, 5)
    assert "above 0.5" in result.reason
    assert [step for step, _ in result.curve] == [5]


@pytest.mark.parametrize("metric", ["val_los", "train_loss"])  # the latter is logged, but not by the validation
def test_a_metric_that_the_validation_does_not_log_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"no '{metric}'; it logs val_loss: name"):
        trained(place, monkeypatch, metric=metric)


def test_an_optimizer_that_cannot_be_built_is_no_result(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Invalid beta"):
        trained(place, monkeypatch, optimizers={"A": ADAMW | {"init_args": {"betas": [1.5, 0.9]}}})


class Stubborn(GPTModule):
    """Takes an optimizer and trains with another one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_module_that_ignores_its_optimizer_is_no_result(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ablation(place)
    fit = read_yaml(place / "fit.yaml")
    fit["model"]["class_path"] = f"{__name__}.Stubborn"
    write_yaml(place / "fit.yaml", fit)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    (row,) = make_rows(load_recipe(path))
    table = Table(load_recipe(path), [row], place / "out")
    with pytest.raises(ConfigurationError, match="trains with SGD, not with AdamW"):
        train(table.make_cell(CellKey(row.key, LR, 3), "cpu"))


def test_a_full_disk_under_the_progress_ends_no_training(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "none"))
    recorder.setup(L.Trainer(logger=False, enable_checkpointing=False), L.LightningModule(), "fit")
    assert not (tmp_path / "none").exists()
    assert Recorder.current is recorder
