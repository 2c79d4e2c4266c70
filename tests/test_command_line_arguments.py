"""What the command takes: recipes by their place, strategies by their names, and names that are nearly right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asyncpp.cli import main
from lightning_asyncpp.lightning_cli.arguments import written_out
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.lightning_cli.help import did_you_mean
from lightning_asyncpp.lightning_cli.messages import is_first_process

RECIPE = str(Path(__file__).parents[1] / "recipes/quickstart.yaml")
ASYNC, SYNC = "lightning_asyncpp.AsyncPipelineStrategy", "lightning_asyncpp.SyncPipelineStrategy"


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (["fit", "a.yaml", "--x", "3"], ["fit", "--config=a.yaml", "--x", "3"]),
        (["fit", "a.yaml", "b.yaml"], ["fit", "--config=a.yaml", "--config=b.yaml"]),
        (["fit", "-c", "a.yaml", "--x", "3"], ["fit", "--config=a.yaml", "--x", "3"]),
        (["--config", "a.yaml", "fit"], ["--config=a.yaml", "fit"]),
        (
            ["fit", "--trainer.strategy", "async_pipeline"],
            ["fit", f'--trainer.strategy={{"class_path": "{ASYNC}"}}'],
        ),
        (["fit", "--trainer.strategy=sync_pipeline"], ["fit", f'--trainer.strategy={{"class_path": "{SYNC}"}}']),
        (["fit", "--trainer.strategy", "ddp"], ["fit", "--trainer.strategy=ddp"]),
        (
            ["fit", "--optimizer", "Muon", "--optimizer.lr=3"],
            ["fit", "--model.init_args.optimizer=MuonAdamW", "--model.init_args.optimizer.lr=3"],
        ),
        ([], []),
    ],
)
def test_short_forms_are_written_out(
    given: list[str], written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).touch()
    assert written_out(given) == written


def strategy_of(*arguments: str) -> Any:
    return read_configuration(["fit", *arguments])["trainer"]["strategy"]


def with_strategy(folder: Path, strategy: Any) -> str:
    content = yaml.safe_load(Path(RECIPE).read_text())
    content["trainer"]["strategy"] = strategy
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize(
    ("strategy", "arguments", "class_path", "microbatches"),
    [
        ("async_pipeline", [], ASYNC, None),
        ("async_pipeline", ["--trainer.strategy.microbatches", "7"], ASYNC, 7),
        ({"class_path": "AsyncPipelineStrategy", "init_args": {"microbatches": 6}}, [], ASYNC, 6),
        ("auto", ["--trainer.strategy", "async_pipeline", "--trainer.strategy.microbatches", "4"], ASYNC, 4),
        (
            {"class_path": "AsyncPipelineStrategy", "init_args": {"microbatches": 6}},
            ["--trainer.strategy", "sync_pipeline"],
            SYNC,
            6,
        ),
        ("auto", ["--trainer.strategy", "SyncPipelineStrategy"], SYNC, None),
        ("SyncPipelineStrategy", [], SYNC, None),
    ],
    ids=[
        "name",
        "name and option",
        "short class",
        "command line",
        "another name",
        "class alone",
        "class alone in a recipe",
    ],
)
def test_a_strategy_by_its_name_takes_options(
    strategy: Any, arguments: list[str], class_path: str, microbatches: int | None, tmp_path: Path
) -> None:
    """In a recipe, on the command line, or in both; another pipeline keeps the options that it has, too."""
    read = strategy_of(with_strategy(tmp_path, strategy), *arguments)
    assert read["class_path"] == class_path
    assert read["init_args"]["microbatches"] == microbatches


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model.init_args.config.dimm", "3"], "there is no 'config.dimm'; did you mean config.dim"),
        (["--mircobatches", "3"], "there is no 'mircobatches'; did you mean trainer.strategy.microbatches?"),
        (["--lr", "3"], "there is no 'lr'; did you mean optimizer.lr"),
        (["--trainer.strategy.microbatchs", "3"], "there is no 'microbatchs'; did you mean microbatches"),
        (["--optimizer", "Adamm"], "there is no 'Adamm'; did you mean Adam?"),
        (["--optimizer", "AdamW", "--optimizer.lrr", "3"], "there is no 'lrr'; did you mean lr"),
        (["--data", "TextDataModul"], "there is no 'TextDataModul'; did you mean TextDataModule?"),
        (["--trainer.callbacks+=PipelineMonitr"], "there is no 'PipelineMonitr'; did you mean PipelineMonitor?"),
        (["--model.config.num_layer", "3"], "there is no 'config.num_layer'; did you mean config.num_layers"),
        (
            ["--trainer.microbatches", "3"],
            "there is no 'trainer.microbatches'; did you mean trainer.strategy.microb",
        ),
        (["--trainer.max_steps", "many"], 'Parser key "trainer.max_steps"'),
        (["--model", "nowhere.Model"], "No module named 'nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_may_have_been_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", RECIPE, *arguments])
    printed = capsys.readouterr().err
    assert said in printed
    assert "usage:" not in printed


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("  devices:", "  devicess:", "there is no 'trainer.devicess'; did you mean trainer.devices?"),
        ("microbatches:", "microbatchs:", "there is no 'microbatchs'; did you mean microbatches"),
        ("num_layers:", "num_layer:", "there is no 'num_layer'; did you mean config.num_layers"),
        (
            ".AsyncPipelineStrategy",
            ".AsyncPipelinStrategy",
            "'AsyncPipelinStrategy'; did you mean AsyncPipelineStrategy",
        ),
    ],
    ids=["trainer", "strategy", "config", "class"],
)
def test_an_unknown_key_of_a_recipe_is_answered_with_the_nearest(
    right: str, wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(Path(RECIPE).read_text().replace(right, wrong))
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", str(tmp_path / "recipe.yaml")])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["check", RECIPE, "--microbatchs", "2"],
            "there is no 'microbatchs'; did you mean trainer.strategy.microba",
        ),
        (["prepare", "x", "--output", "y", "--tokenizer", "byte", "--text_ke=3"], "did you mean --text-key?"),
        (
            ["prepare", "x", "--tokenizer", "byte"],
            "asyncpp prepare: error: the following arguments are required: --output\n",
        ),
        (["checkpoint", "inf"], "invalid choice: 'inf'"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_tools_answer_with_the_nearest_and_without_their_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert said in printed
    assert "usage:" not in printed


def test_the_nearest_name() -> None:
    known = ["trainer.max_steps", "trainer.min_steps", "model.config.dim", "data.batch_size"]
    assert did_you_mean("trainer.max_step", known) == "; did you mean trainer.max_steps?"
    assert did_you_mean("Batch-Size", known) == "; did you mean data.batch_size?"
    assert did_you_mean("frobnicate", known) == ""


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"])
def test_one_process_says_what_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert is_first_process()
    monkeypatch.setenv(name, "1")
    assert not is_first_process()
