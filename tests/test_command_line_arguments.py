"""The command accepts short forms, refuses mistakes before anything starts, and ends with short messages."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_asyncpp import GPTModule, cli
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import DataError
from lightning_asyncpp.errors import TRACEBACK, BatchMismatchError, ConfigurationError, PeerLostError, raised_alike
from lightning_asyncpp.lightning_cli import command
from lightning_asyncpp.lightning_cli.arguments import written_out
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.models import write_texts

RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = str(RECIPES / "quickstart.yaml")
MOE = str(RECIPES / "quickstart_moe.yaml")
ASYNC, SYNC = "lightning_asyncpp.AsyncPipelineStrategy", "lightning_asyncpp.SyncPipelineStrategy"
CALLBACKS = "--trainer.callbacks"
Printed = pytest.CaptureFixture[str]
SIZES = {"vocab_size": 256, "context_length": 32, "num_layers": 2, "dim": 16, "num_heads": 2}
MODEL = {"class_path": "lightning_asyncpp.GPTModule", "init_args": {"config": SIZES}}
TEXT = {"source": str(RECIPES.with_name("docs") / "start"), "context_length": 32, "batch_size": 8}
DATA = {"class_path": "lightning_asyncpp.data.TextDataModule", "init_args": TEXT}
TRAINER = {"strategy": {"class_path": ASYNC, "init_args": {"microbatches": 4}}, "accelerator": "cpu", "devices": 2}
FIT = ["fit", f"--config={json.dumps({'model': MODEL, 'data': DATA, 'trainer': TRAINER})}"]  # quick to parse


class Untidy(L.LightningModule):
    """User's module that raises an error whose place only a traceback shows."""

    def __init__(self) -> None:
        super().__init__()
        self.number = int("seven")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (["fit", "a.yaml", "b.yaml", "--x", "3"], ["fit", "--config=a.yaml", "--config=b.yaml", "--x", "3"]),
        (["fit", "-c", "a.yaml"], ["fit", "--config=a.yaml"]),
        (["fit", "--trainer.strategy=sync_pipeline"], ["fit", f'--trainer.strategy={{"class_path": "{SYNC}"}}']),
        (["fit", "--trainer.strategy", "ddp"], ["fit", "--trainer.strategy=ddp"]),
        (
            ["fit", "--optimizer", "Muon", "--optimizer.lr=3"],
            ["fit", "--model.init_args.optimizer=MuonAdamW", "--model.init_args.optimizer.lr=3"],
        ),
        (
            ["fit", "--trace=d", "--trace.mini_batches=5", "-c", "a.yaml"],  # last, else the recipe's list replaces it
            [
                "fit", "--config=a.yaml", f"{CALLBACKS}+=lightning_asyncpp.PipelineTrace", f"{CALLBACKS}.dirpath=d",
                f"{CALLBACKS}.mini_batches=5",
            ],
        ),
    ],
    ids=["recipes", "-c", "strategy", "strategy-of-lightning", "optimizer", "trace"],
)  # fmt: skip
def test_short_forms_are_written_out(
    given: list[str], written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).touch()
    assert written_out(given) == written


SIX = {"class_path": "AsyncPipelineStrategy", "init_args": {"microbatches": 6}}


@pytest.mark.parametrize(
    ("strategy", "arguments", "expected"),
    [
        ("async_pipeline", ["--trainer.strategy.microbatches", "7"], (ASYNC, 7)),
        (SIX, [], (ASYNC, 6)),
        (SIX, ["--trainer.strategy", "sync_pipeline"], (SYNC, 6)),
        ("auto", ["--trainer.strategy", "SyncPipelineStrategy"], (SYNC, None)),
    ],
    ids=["name-and-option", "short-class", "another-pipeline-keeps-the-options", "class-instead-of-lightnings"],
)
def test_a_strategy_by_its_name_takes_options(strategy: Any, arguments: Any, expected: Any, tmp_path: Path) -> None:
    """A strategy's name accepts options in a recipe, on the command line, or in both."""
    content = {"model": f"{__name__}.Untidy", "trainer": {"strategy": strategy}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    read = read_configuration(["fit", str(tmp_path / "recipe.yaml"), *arguments])["trainer"]["strategy"]
    assert (read["class_path"], read["init_args"]["microbatches"]) == expected


def paths_of_optimizers(names: tuple[str, ...]) -> list[str]:
    recipe = f"--config={json.dumps({'model': MODEL})}"
    found = [read_configuration(["fit", recipe, f"--optimizer={name}"]) for name in names]
    return [config["model"]["init_args"]["optimizer"]["class_path"] for config in found]


@pytest.mark.slow  # starts a process that imports everything again
def test_a_short_name_finds_the_optimizers_class() -> None:
    """A short name finds its class in a process where no other library has defined a class of the same name."""
    names = ("AdamW", "SOAP", "MuonAdamW", "Muon", "NorMuon", "torch.optim.Muon")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        paths = pool.apply(paths_of_optimizers, (names,))
    ours = [f"lightning_asyncpp.optim.{name}" for name in ("SOAP", "MuonAdamW", "MuonAdamW", "NorMuonAdamW")]
    assert paths == ["torch.optim.AdamW", *ours, "torch.optim.Muon"]


PREPARE = ["prepare", "x", "--tokenizer", "byte"]
NUMBERS = ("plan --devices 0", "plan --devices -2", "plan --memory -5", "plan --mfu 0")
NUMBERS += ("check --updates 0", "check --stages -1", "check --microbatches 0")
MISTAKES = {
    "option": ([*FIT, "--mircobatches=3"], "there is no 'mircobatches'; did you mean trainer.strategy.microbatches?"),
    "optimizer": ([*FIT, "--optimizer", "Adamm"], "there is no 'Adamm'; did you mean Adam?"),
    "in-a-recipe": ([*FIT, "--config=trainer: {devicess: 2}"], "'trainer.devicess'; did you mean trainer.devices?"),
    "type": ([*FIT, "--trainer.max_steps", "many"], 'Parser key "trainer.max_steps"'),
    "no-module": ([*FIT, "--model", "nowhere.Model"], "No module named 'nowhere'"),
    "no-recipe": (["fit"], "model. Give a recipe that names a model; `asyncpp recipes` lists"),
    "subcommand": (["fti"], "there is no subcommand 'fti'; did you mean fit?\n"),
    "check": (["check", RECIPE, "--microbatchs", "2"], "'microbatchs'; did you mean trainer.strategy.microba"),
    "prepare": ([*PREPARE, "--output", "y", "--text_ke=3"], "did you mean --text-key?"),
    "several": (
        ["fit", MOE, "--model.config.num_heads=3", "--model.config.moe={top_k: 50, every: 0}"],
        "num_heads=3\n  - moe.top_k=50: must be from 1 to num_experts=8\n  - moe.every=0: must be at least 1",
    ),
    "lookahead": ([*FIT, "--trainer.strategy.lookahead=-1"], "lookahead=-1 must be 0 or more\n"),
    "devices": ([*FIT, "--trainer.devices", "lots"], "the Trainer refuses its arguments: `devices`"),
    "best": (["test", FIT[1], "--ckpt_path=best"], "--ckpt_path best: only the process that trained knows"),
    "copy": (["recipes", "--copy", "quickstart.yaml", str(RECIPES)], "quickstart.yaml exists already"),
    "pickle": (["checkpoint", "convert", "x", "y.safetensors", "--to=full"], "--to full cannot write y.safetensors"),
    **{text: (text.split(), "must be a") for text in NUMBERS},
    "data": ([*FIT, "--data.source", "nowhere"], "source='nowhere': there is no such folder. Give "),
}


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_shortly_before_anything_starts(
    arguments: list[str], answer: str, capsys: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command prints one error, often with a suggestion, and no usage or traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert answer in printed
    assert not any(text in printed for text in ("usage:", "Traceback", "starting"))
    assert printed.count("error: ") == 1


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, capsys: Printed) -> None:
    with pytest.raises(SystemExit):
        main([*FIT, "--trainer.devices", "9", "--data.source", str(tmp_path)])
    first, *problems = capsys.readouterr().err.splitlines()[-3:]
    assert first.endswith("2 problems:")
    assert "holds no text file" in problems[0]
    assert "microbatches=4 is" in problems[1]


def test_a_line_tells_what_starts(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(command.AsyncppCLI, "_run_subcommand", lambda *_: None)
    main(FIT)
    monkeypatch.setenv("RANK", "1")
    main(FIT)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asyncpp: ")]
    assert lines == ["asyncpp: fit: starting 2 processes (AsyncPipelineStrategy, CPU)"]


def ends_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli, "run", run)
    with pytest.raises(SystemExit) as end:
        main(["fit"])
    return int(end.value.code or 0)


ENDINGS = {
    "data": (DataError("no such shard"), 2, 2),
    "batches": (BatchMismatchError("other batches"), 1, 2),
    "configuration": (ConfigurationError("cannot"), 2, 1),
    "peer": (PeerLostError("rank 2 (stage 0) failed first: ValueError: x\n\n    Traceback ..."), 1, 3),
}


@pytest.mark.parametrize(("error", "code", "lines"), ENDINGS.values(), ids=ENDINGS)
def test_the_packages_own_errors_end_it_shortly(
    error: Exception, code: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """Other ranks print only the first line of a ``PeerLostError``; ``ASYNCPP_TRACEBACK=1`` shows the traceback."""
    for rank, mark in enumerate(("", "[rank 1] ")):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        assert ends_with(error, monkeypatch) == code
        printed = capsys.readouterr().err.splitlines()
        assert printed[0] == f"asyncpp: error: {mark}{str(error).splitlines()[0]}"
        assert len(printed) == (1 if rank and isinstance(error, PeerLostError) else lines)
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(type(error)):
        main(["fit"])


def test_other_ranks_shorten_what_all_raise(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert ends_with(raised_alike(DataError("no such shard " * 40), 0), monkeypatch) == 2
    assert len(capsys.readouterr().err) < 140


def test_the_error_of_other_code_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'seven'$") as caught:
        main([*FIT, "--model", f"{__name__}.Untidy"])
    assert caught.traceback[-1].name == "__init__"
    assert caught.value.__suppress_context__


def test_a_run_is_made_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run follows its new, longer schedule, whatever the checkpoint's hyperparameters say."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "text", 8)
    model = {**MODEL, "init_args": {"config": SIZES, "warmup_steps": 1}}
    data = {"source": "text", "context_length": 32, "batch_size": 2, "val_fraction": 0.3}
    saving = {"dirpath": ".", "save_last": True, "every_n_train_steps": 1}
    trainer = {
        "accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": -1, "limit_val_batches": 0,
        "enable_progress_bar": False, "callbacks": [{"class_path": "ModelCheckpoint", "init_args": saving}],
    }  # fmt: skip
    recipe = {"model": model, "data": {**DATA, "init_args": data}, "trainer": trainer}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    fit = ["fit", "recipe.yaml", "--optimizer=AdamW", "--optimizer.lr=1.0"]
    main([*fit, "--trainer.max_steps=2", "--model.init_args.total_steps=2"])
    main([*fit, "--trainer.max_steps=4", "--model.init_args.total_steps=9", "--ckpt_path=last.ckpt"])
    content = torch.load("last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    assert content["hyper_parameters"]["total_steps"] == 9
    module = GPTModule(GPTConfig(**SIZES), warmup_steps=1, total_steps=9)
    assert content["lr_schedulers"][0]["_last_lr"] == [learning_rate_factor(module)(4)]
