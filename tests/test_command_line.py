"""The command trains a small recipe, tests and predicts with its checkpoint, and records a trace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_asyncpp.cli import main
from tests.helpers import programs as forked
from tests.helpers.models import write_texts
from tests.helpers.pool import Pools, elastic_environment, free_port

ROOT = Path(__file__).parents[1]
ASYNCPP = [str(Path(sys.executable).with_name("asyncpp"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
STEPS = 10  # PipelineMonitor logs every 10 batches


class Trained(NamedTuple):
    """Results of a short training."""

    folder: Path
    printed: str
    checkpoint: Path
    val_loss: float


class Keep(BasePredictionWriter):
    """Callback that saves each rank's predictions and logged metrics in files."""

    def __init__(self, folder: str) -> None:
        super().__init__(write_interval="epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, Path(self.folder) / f"predictions-{trainer.global_rank}.pt")

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save(metrics, Path(self.folder) / f"metrics-{trainer.global_rank}.pt")


def recipe(folder: Path) -> list[str]:
    """Return arguments for the quickstart's recipe, with the text in ``folder`` and a small model."""
    return [
        "--config", str(ROOT / "recipes" / "quickstart.yaml"),
        "--data.init_args.source", str(folder / "text"), "--data.init_args.cache_dir", str(folder / "cache"),
        "--data.init_args.val_fraction", "0.2", "--data.init_args.batch_size", "8",
        "--data.init_args.context_length", "32", "--model.init_args.config.context_length", "32",
        "--model.init_args.config.num_layers", "2", "--model.init_args.config.dim", "32",
        "--trainer.limit_val_batches", "3",
    ]  # fmt: skip


def run(command: list[str], folder: Path) -> str:
    # The output goes to a file, since reading a pipe to its end would also wait for ranks that outlive the command.
    with (folder / "output").open("w+") as output:
        done = subprocess.run(
            ["timeout", "-k", "10", "240", *command], cwd=folder, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )  # fmt: skip
        output.seek(0)
        printed = output.read()
    assert done.returncode == 0, printed[-5000:]
    return printed


def run_ranks(arguments: list[str], folder: Path) -> str:
    """Run ``torchrun --nproc-per-node=2 -m lightning_asyncpp ARGUMENTS`` without torchrun; return rank 0's output."""
    port = free_port()
    environments = [elastic_environment(rank, 2, port) | {"COLUMNS": "120"} for rank in range(2)]
    ranks = forked.run_ranks(["-m", "lightning_asyncpp", *arguments], folder, environments, seconds=240)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr[-5000:] for rank in ranks)
    return ranks[0].stderr + ranks[0].stdout


def trained_by(run_command: Callable[[list[str], Path], str], folder: Path) -> Trained:
    write_texts(folder / "text")
    steps = ["--trainer.max_steps", str(STEPS), "--trainer.val_check_interval", str(STEPS)]
    optimizer = ["--optimizer", "AdamW", "--optimizer.lr", "0.004", "--optimizer.weight_decay", "0.03"]
    printed = run_command(["fit", *recipe(folder), *steps, "--trainer.log_every_n_steps", "1", *optimizer], folder)
    (checkpoint,) = (folder / "runs").glob("**/step=*.ckpt")
    found = re.fullmatch(rf"step={STEPS}-val_loss=([\d.]+)\.ckpt", checkpoint.name)
    assert found is not None
    return Trained(folder, printed, checkpoint, float(found.group(1)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train with the command in two processes, as torchrun starts them, but without a new interpreter for each."""
    return trained_by(run_ranks, tmp_path_factory.mktemp("command"))


def command_in_worker(folder: str, arguments: list[str]) -> str:
    """Run ``asyncpp ...`` in a folder, in a worker whose environment is like torchrun's."""
    before, argv = os.getcwd(), sys.argv
    os.chdir(folder)
    try:
        main(arguments)
    finally:
        os.chdir(before)
        sys.argv = argv
    return ""


def kept_by(pools: Pools, subcommand: str, trained: Trained, name: str) -> list[Any]:
    """Run another subcommand with the checkpoint, and return what each rank saved under ``name``."""
    arguments = [f"--trainer.limit_{subcommand}_batches=3", "--trainer.callbacks+=tests.test_command_line.Keep"]
    arguments += [f"--trainer.callbacks.folder={trained.folder}", f"--ckpt_path={trained.checkpoint}"]
    pools.run(2, command_in_worker, str(trained.folder), [subcommand, *recipe(trained.folder), *arguments])
    return [torch.load(trained.folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]


def test_fit_takes_another_optimizer_by_its_short_name(trained: Trained) -> None:
    """``--optimizer AdamW`` replaces the recipe's optimizer by torch's class, with the given arguments."""
    (written,) = (trained.folder / "runs").glob("**/config.yaml")
    optimizer = yaml.safe_load(written.read_text())["model"]["init_args"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("torch.optim.AdamW", 0.004)
    content = torch.load(trained.checkpoint, weights_only=True)
    assert content["global_step"] == STEPS
    state = content["optimizer_states"][0]
    (group,) = state["param_groups"]
    assert group["weight_decay"] == 0.03
    assert set(group["param_names"]) == {name.removeprefix("model.") for name in content["state_dict"]}
    assert {frozenset(moments) for moments in state["state"].values()} == {frozenset({"step", "exp_avg", "exp_avg_sq"})}


def test_progress_bar(trained: Trained) -> None:
    """The bar shows loss, throughput, bubble and validation loss by short names; the last line names the checkpoint."""
    last = trained.printed[trained.printed.rindex("Epoch 0") : trained.printed.rindex("Done.")]
    shown = {name: float(value) for name, value in re.findall(r"([\w/]+)=(\d[\d.]*)", last)}
    assert list(shown) == ["loss", "tok/s", "bubble", "val"]
    assert shown["val"] == pytest.approx(trained.val_loss, rel=0.01)
    assert 4.5 < shown["loss"] < 6.5  # ln 256 = 5.55 before the first step
    assert shown["tok/s"] > 0
    assert 0 < shown["bubble"] < 100
    assert f"Done. Checkpoint: {trained.checkpoint.relative_to(trained.folder)}; " in trained.printed


def test_evaluating_a_checkpoint(pools: Pools, trained: Trained) -> None:
    """The test loss is the loss in the checkpoint's name, since the test set of this data is the validation set."""
    first, second = kept_by(pools, "test", trained, "metrics")
    assert first["test_loss"] == pytest.approx(trained.val_loss, abs=6e-4)
    assert first == second


def test_predicting_with_a_checkpoint(pools: Pools, trained: Trained) -> None:
    """Rank 0 returns one loss per sequence; their mean is the validation loss."""
    first, second = kept_by(pools, "predict", trained, "predictions")
    assert [batch.shape for batch in first] == [(8,)] * 3
    assert float(torch.cat(first).mean()) == pytest.approx(trained.val_loss, abs=6e-4)
    assert second == [None] * 3


def test_fit_records_a_trace(pools: Pools, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """``--trace`` keeps the recipe's callbacks, and ``asyncpp trace`` reads the recording."""
    folder = trained.folder / "traces"
    logs = f"--trainer.logger.init_args.save_dir={trained.folder / 'logs'}"
    arguments = ["fit", f"--trace={folder}", *recipe(trained.folder), "--trainer.max_steps=3", logs]
    pools.run(2, command_in_worker, str(trained.folder), arguments)
    main(["trace", str(folder)])
    printed = capsys.readouterr().out
    assert "2 stages, 4 microbatches per mini-batch, lookahead 0, no flush; mini-batches 0 to 2:" in printed
    assert re.search(r"sent +stale\n", printed)


@pytest.mark.slow
@pytest.mark.parametrize("command", [ASYNCPP, [*TORCHRUN, "-m", "lightning_asyncpp"]], ids=["asyncpp", "torchrun"])
def test_what_is_installed_trains_the_same(trained: Trained, tmp_path: Path, command: list[str]) -> None:
    """Results are equal with ``asyncpp``, where Lightning launches the second rank, and with torchrun."""
    other = trained_by(lambda arguments, folder: run([*command, *arguments], folder), tmp_path)
    contents = [torch.load(t.checkpoint, weights_only=True) for t in (trained, other)]
    states = [(content["state_dict"], content["optimizer_states"][0]["state"]) for content in contents]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert other.val_loss == trained.val_loss
