"""The command on a small recipe: training, then everything that can be done with its checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_asyncpp.cli import main
from lightning_asyncpp.lightning_cli.arguments import written_out
from tests.helpers import forked
from tests.helpers.pool import Pools, elastic_environment
from tests.helpers.workers import free_port

ROOT = Path(__file__).parents[1]
ASYNCPP = [str(Path(sys.executable).with_name("asyncpp"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
STEPS = 10  # as many as PipelineMonitor waits for


class Trained(NamedTuple):
    """What a short training left behind."""

    folder: Path
    printed: str
    checkpoint: Path
    val_loss: float


class Keep(BasePredictionWriter):
    """Keeps what ``predict`` returned in a file per rank."""

    def __init__(self, folder: str) -> None:
        super().__init__(write_interval="epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, Path(self.folder) / f"predictions-{trainer.global_rank}.pt")


class KeepMetrics(L.Callback):
    """Keeps what was logged in a file per rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save(metrics, Path(self.folder) / f"metrics-{trainer.global_rank}.pt")


def recipe(folder: Path) -> list[str]:
    """The quickstart's recipe, on the text of ``folder`` and with a small model."""
    return [
        "--config", str(ROOT / "recipes" / "quickstart.yaml"),
        "--data.init_args.source", str(folder / "text"), "--data.init_args.cache_dir", str(folder / "cache"),
        "--data.init_args.val_fraction", "0.2", "--data.init_args.batch_size", "8",
        "--data.init_args.context_length", "32", "--model.init_args.config.context_length", "32",
        "--model.init_args.config.num_layers", "2", "--model.init_args.config.dim", "32",
        "--trainer.limit_val_batches", "3",
    ]  # fmt: skip


def fit_arguments(folder: Path) -> list[str]:
    return [
        "fit", *recipe(folder), "--trainer.max_steps", str(STEPS), "--trainer.val_check_interval", str(STEPS),
        "--trainer.log_every_n_steps", "1", "--optimizer", "AdamW", "--optimizer.lr", "0.004",
        "--optimizer.weight_decay", "0.03",
    ]  # fmt: skip


def run(command: list[str], folder: Path) -> str:
    # A reader that waits for the end would wait for a rank that outlives the command.
    with (folder / "output").open("w+") as output:
        done = subprocess.run(
            ["timeout", "-k", "10", "240", *command], cwd=folder, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )  # fmt: skip
        output.seek(0)
        printed = output.read()
    assert done.returncode == 0, printed[-5000:]
    return printed


def write_text(folder: Path) -> None:
    """40 small documents."""
    (folder / "text").mkdir()
    for index in range(40):
        lines = [f"document {index} line {line} {index * line}\n" for line in range(30)]
        (folder / "text" / f"{index}.txt").write_text("".join(lines))


def run_ranks(arguments: list[str], folder: Path) -> str:
    """What the first rank of ``torchrun --nproc-per-node=2 -m lightning_asyncpp ARGUMENTS`` prints."""
    port = free_port()
    environments = [elastic_environment(rank, 2, port) | {"COLUMNS": "120"} for rank in range(2)]
    ranks = forked.run_ranks(["-m", "lightning_asyncpp", *arguments], folder, environments, seconds=240)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr[-5000:] for rank in ranks)
    return ranks[0].stderr + ranks[0].stdout


def trained_by(run_command: Callable[[list[str], Path], str], folder: Path) -> Trained:
    write_text(folder)
    printed = run_command(fit_arguments(folder), folder)
    (checkpoint,) = (folder / "runs").glob("**/step=*.ckpt")
    found = re.fullmatch(r"step=(\d+)-val_loss=([\d.]+)\.ckpt", checkpoint.name)
    assert found is not None
    assert int(found.group(1)) == STEPS
    return Trained(folder, printed, checkpoint, float(found.group(2)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By the command in two processes, as torchrun starts them, but without a new interpreter for each."""
    return trained_by(run_ranks, tmp_path_factory.mktemp("command"))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def command_in_worker(folder: str, arguments: list[str]) -> str:
    """``asyncpp ...`` in a process that stands where torchrun would have started it."""
    before, argv = os.getcwd(), sys.argv
    os.chdir(folder)
    try:
        main(arguments)
    finally:
        os.chdir(before)
        sys.argv = argv
    return ""


def kept(trained: Trained, name: str) -> list[Any]:
    return [torch.load(trained.folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]


def test_fit_takes_another_optimizer_by_its_short_name(trained: Trained) -> None:
    """Of the class that torch has, with its own arguments, in the place of the recipe's."""
    (written,) = (trained.folder / "runs").glob("**/config.yaml")
    config = yaml.safe_load(written.read_text())
    assert config["trainer"]["max_steps"] == STEPS
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.AdamW"
    assert optimizer["init_args"]["lr"] == 0.004
    content = torch.load(trained.checkpoint, weights_only=True)
    assert content["global_step"] == STEPS
    state = content["optimizer_states"][0]
    (group,) = state["param_groups"]
    assert group["weight_decay"] == 0.03
    assert set(group["param_names"]) == {name.removeprefix("model.") for name in content["state_dict"]}
    assert {frozenset(moments) for moments in state["state"].values()} == {frozenset({"step", "exp_avg", "exp_avg_sq"})}
    assert f"Done. Checkpoint: {trained.checkpoint.relative_to(trained.folder)}; " in trained.printed


def test_progress_bar(trained: Trained) -> None:
    """Loss, validation loss, throughput and bubble of the run, under short names."""
    last = trained.printed[trained.printed.rindex("Epoch 0") : trained.printed.rindex("Done.")]
    shown = {name: float(value) for name, value in re.findall(r"([\w/]+)=(\d[\d.]*)", last)}
    assert list(shown) == ["loss", "tok/s", "bubble", "val"]
    assert shown["val"] == pytest.approx(trained.val_loss, rel=0.01)
    assert 4.5 < shown["loss"] < 6.5  # ln 256 = 5.55 before the first step
    assert shown["tok/s"] > 0
    assert 0 < shown["bubble"] < 100


@pytest.mark.parametrize("subcommand", [pytest.param("validate", marks=pytest.mark.slow), "test"])
def test_evaluating_a_checkpoint(two_ranks: Pools, trained: Trained, subcommand: str) -> None:
    """The loss is that of the name of the file; a language model's test set is the validation set here."""
    keep = [
        "--trainer.callbacks+",
        "tests.test_command_line.KeepMetrics",
        "--trainer.callbacks.folder",
        str(trained.folder),
    ]
    arguments = [subcommand, *recipe(trained.folder), "--trainer.limit_test_batches", "3", *keep]
    arguments += ["--ckpt_path", str(trained.checkpoint)]
    two_ranks.run(2, command_in_worker, str(trained.folder), arguments)
    first, second = kept(trained, "metrics")
    name = {"validate": "val_loss", "test": "test_loss"}[subcommand]
    assert first[name] == pytest.approx(trained.val_loss, abs=6e-4)
    assert first == second


def test_predicting_with_a_checkpoint(two_ranks: Pools, trained: Trained) -> None:
    """A loss per sequence, on rank 0; their mean is the validation loss."""
    keep = ["--trainer.callbacks+", "tests.test_command_line.Keep", "--trainer.callbacks.folder", str(trained.folder)]
    arguments = ["predict", *recipe(trained.folder), "--trainer.limit_predict_batches", "3", *keep]
    arguments += ["--ckpt_path", str(trained.checkpoint)]
    two_ranks.run(2, command_in_worker, str(trained.folder), arguments)
    first, second = kept(trained, "predictions")
    assert [batch.shape for batch in first] == [(8,)] * 3
    assert float(torch.cat(first).mean()) == pytest.approx(trained.val_loss, abs=6e-4)
    assert second == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("command", [ASYNCPP, [*TORCHRUN, "-m", "lightning_asyncpp"]], ids=["asyncpp", "torchrun"])
def test_what_is_installed_trains_the_same(trained: Trained, tmp_path: Path, command: list[str]) -> None:
    """The command, which has Lightning launch the second rank, and torchrun, with which Lightning launches nothing."""
    other = trained_by(lambda arguments, folder: run([*command, *arguments], folder), tmp_path)
    states = [torch.load(t.checkpoint, weights_only=True)["state_dict"] for t in (trained, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert other.val_loss == trained.val_loss


@pytest.mark.slow
def test_modules_of_the_folder_it_is_called_in_are_found(tmp_path: Path) -> None:
    (tmp_path / "my_own_module.py").write_text(
        "import lightning as L\n\n\nclass MyModule(L.LightningModule):\n    def __init__(self, width: int = 3):\n"
        "        super().__init__()\n"
    )
    printed = run([*ASYNCPP, "fit", "--model", "my_own_module.MyModule", "--print_config"], tmp_path)
    assert "class_path: my_own_module.MyModule" in printed
    assert "width: 3" in printed


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["fit", "--trace", "--config", "a: 1"], ["fit", "--config=a: 1", "+=lightning_asyncpp.PipelineTrace"]),
        (["fit", "--trace", "d", "--x"], ["fit", "--x", "+=lightning_asyncpp.PipelineTrace", ".dirpath=d"]),
        (["fit", "--trace=d"], ["fit", "+=lightning_asyncpp.PipelineTrace", ".dirpath=d"]),
        (
            ["fit", "--trace", "--trace.first_mini_batch", "3", "--trace.mini_batches=5"],
            ["fit", "+=lightning_asyncpp.PipelineTrace", ".first_mini_batch=3", ".mini_batches=5"],
        ),
    ],
)
def test_trace_stands_for_a_callback(arguments: list[str], written: list[str]) -> None:
    """It comes last: no --config takes the place of the list that it is added to."""
    full = [f"--trainer.callbacks{text}" if text[:1] in ("+", ".") else text for text in written]
    assert written_out(arguments) == full


def test_fit_records_a_trace(two_ranks: Pools, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the callbacks of the recipe, and it is read by the command of that name."""
    folder = trained.folder / "traces"
    arguments = ["fit", "--trace", str(folder), *recipe(trained.folder), "--trainer.max_steps", "3"]
    two_ranks.run(
        2,
        command_in_worker,
        str(trained.folder),
        [*arguments, "--trainer.logger.init_args.save_dir", str(trained.folder / "logs")],
    )
    main(["trace", str(folder)])
    printed = capsys.readouterr().out
    assert "2 stages, 4 microbatches per mini-batch, lookahead 0, no flush; mini-batches 0 to 2:" in printed
    assert re.search(r"sent +stale\n", printed)


def test_what_stages_trained_in_a_single_process(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``validate`` without a pipeline reports the pipeline's loss; ``generate`` writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    alone = ["--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.accelerator", "cpu"]
    main(["validate", *recipe(trained.folder), *alone, "--ckpt_path", str(trained.checkpoint)])
    found = re.search(r"val_loss\W+(\d+\.\d+)", capsys.readouterr().out.replace(trained.checkpoint.name, ""))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(trained.val_loss, abs=6e-4)
    main(["generate", str(trained.checkpoint), "--prompt", "document 3", "--max-new-tokens", "5"])
    assert capsys.readouterr().out.startswith("document 3")


@pytest.mark.slow
def test_validate_launches_its_ranks(trained: Trained) -> None:
    checkpoint = ["--ckpt_path", str(trained.checkpoint)]
    printed = run([*ASYNCPP, "validate", *recipe(trained.folder), *checkpoint], trained.folder)
    found = re.search(r"val_loss[^\w=]+(\d+\.\d+)", printed)  # in the table, not in the name of the file
    assert found is not None, printed
    assert float(found.group(1)) == pytest.approx(trained.val_loss, abs=6e-4)
