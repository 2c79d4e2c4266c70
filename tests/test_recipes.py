"""Recipes: every key explained, the twins alike, each loadable, and the quickstart better than counting bytes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_asyncpp.cli import main
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.lightning_cli.command import AsyncppCLI, make_cli
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.tools.parsers import prepare_parser
from tests.helpers.unigram import unigram_loss

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OF_GPTS = [path for path in RECIPES if not path.stem.startswith("hf_")]  # the others: tests/trainer/hf
LARGE = [path for path in OF_GPTS if not path.stem.startswith("quickstart")]
QUICKSTARTS = [ROOT / "recipes" / f"{name}.yaml" for name in ("quickstart", "quickstart_sync")]
STRUCTURE = {
    "trainer",
    "model",
    "data",
    "logger",
    "callbacks",
    "config",
    "class_path",
    "init_args",
    "base",
    "optimizer",
}


def run(*arguments: str, cwd: Path, timeout: int = 280) -> str:
    command = ["timeout", "-k", "10", str(timeout), sys.executable, "-m", "lightning_asyncpp", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = []
    for above, line in zip(["", *lines], lines):
        key = re.match(r"\s*(?:- )?(\w+):", line)
        if key and key.group(1) not in STRUCTURE and not above.lstrip().startswith("#"):
            bare.append(line.strip())
    assert not bare


def loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    return content


@pytest.mark.parametrize("name", ["quickstart", "smollm_360m"])
def test_the_synchronous_twin_differs_in_the_strategy_alone(name: str) -> None:
    twins = [loaded(name), loaded(f"{name}_sync")]
    strategies = [twin["trainer"].pop("strategy") for twin in twins]
    assert twins[0] == twins[1]
    assert [s["class_path"].rpartition(".")[2] for s in strategies] == ["AsyncPipelineStrategy", "SyncPipelineStrategy"]
    assert strategies[0]["init_args"].get("weight_dtype") == strategies[1].get("init_args", {}).get("weight_dtype")


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_recipes_for_gpus_have_weight_versions_in_bf16(path: Path) -> None:
    """Autocast would keep converted weights for every microbatch in flight."""
    assert loaded(path.stem)["trainer"]["strategy"]["init_args"]["weight_dtype"] == "bf16"


@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda path: path.stem)
def test_published_results_belong_to_the_default_cut(path: Path) -> None:
    """They were taken when all stages had the same number of layers."""
    recipe = loaded(path.stem)
    with torch.device("meta"):
        model = GPT(GPTConfig(**recipe["model"]["init_args"]["config"]))
    partition = choose_partition(model, 0, recipe["trainer"]["devices"], "auto")
    assert partition.counts == partition.uniform


def test_the_adamw_twin_differs_in_the_optimizer_alone() -> None:
    twins = [loaded("smollm_360m"), loaded("smollm_360m_adamw")]
    wrapped = [twin["model"]["init_args"]["optimizer"]["init_args"].pop("base") for twin in twins]
    assert twins[0] == twins[1]
    muon, adamw = (base["init_args"] for base in wrapped)
    assert [base["class_path"].rpartition(".")[2] for base in wrapped] == ["MuonAdamW", "AdamW"]
    shared = {"lr": "lr", "weight_decay": "weight_decay", "adamw_betas": "betas"}
    assert {name: muon[name] for name in shared} == {name: adamw[other] for name, other in shared.items()}


@pytest.fixture(scope="module", params=OF_GPTS, ids=lambda path: path.stem)
def built(request: pytest.FixtureRequest) -> AsyncppCLI:
    """A recipe as the command builds it, but on the CPU: the model is on the meta device until a strategy cuts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["asyncpp", "--config", str(request.param), "--trainer.accelerator", "cpu"])
        return make_cli(run=False, save_config_callback=None)


def test_a_recipe_fits_together(built: AsyncppCLI) -> None:
    data, config = built.datamodule, built.model.config
    settings, problems = built.trainer.strategy.session.settings.resolve(built.trainer.world_size)
    assert problems == []
    assert settings is not None
    assert data.context_length == config.context_length
    assert data.batch_size % settings.microbatches == 0


def test_the_model_of_a_recipe_is_built_with_its_optimizer(built: AsyncppCLI) -> None:
    with torch.device("meta"), torch.no_grad():  # experts' auxiliary losses are collected by strategies alone
        model = built.model.build_model()
        logits = model(torch.zeros(1, built.model.config.context_length, dtype=torch.int64))
    assert logits.shape == (1, built.model.config.context_length, built.model.config.vocab_size)
    named = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in named.values())
    optimizer = built.model.optimizer(named.items())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # SmolLM-360M's own number, and GPT-2's 124,439,808 without its positions, biases and second half of norms
    [("smollm_360m", 361_821_120), ("gpt2_124m", 123_551_232), ("moe_10b", 10_191_373_824)],
)
def test_models_have_the_size_that_they_are_named_after(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**loaded(name)["model"]["init_args"]["config"]))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_figures_in_comments_are_those_of_the_keys(path: Path) -> None:
    text, recipe = path.read_text(), loaded(path.stem)
    data, trainer = recipe["data"]["init_args"], recipe["trainer"]
    tokens = data["batch_size"] * data["context_length"]
    steps, power, billions = found(r"([\d,]+) of 2\*\*(\d+) tokens are ([\d.]+) billion", text)
    assert (int(steps.replace(",", "")), 2 ** int(power)) == (trainer["max_steps"], tokens)
    assert float(billions) == float(f"{trainer['max_steps'] * tokens / 1e9:.{len(billions.partition('.')[2])}f}")
    batches, millions = found(r"at every validation: (\d+) are ([\d.]+) million tokens", text)
    assert (int(batches), float(millions)) == (trainer["limit_val_batches"], round(int(batches) * tokens / 1e6, 1))
    (sequences,) = found(r"cut into \(int[^)]*\): here of (\d+) sequences", text)
    assert int(sequences) * trainer["strategy"]["init_args"]["microbatches"] == data["batch_size"]
    size, length, power = found(r"Sequences per replica and update \(int\): (\d+) of (\d+) are 2\*\*(\d+) tokens", text)
    assert (int(size), int(length), 2 ** int(power)) == (data["batch_size"], data["context_length"], tokens)
    config = recipe["model"]["init_args"]["config"]
    (wide,) = found(r"Attention heads \(int\), each (\d+) wide", text)
    assert int(wide) * config["num_heads"] == config["dim"]


@pytest.mark.parametrize(
    "path", [path for path in LARGE if "asyncpp prepare hf" in path.read_text()], ids=lambda p: p.stem
)
def test_what_a_recipe_says_of_its_tokens_prepares_them(path: Path) -> None:
    (command,) = found(r"#   asyncpp prepare ((?:.*\\\n)*.*\n)", path.read_text())
    arguments = prepare_parser().parse_args(shlex.split(command.replace("\\\n#", " ")))
    assert arguments.output == loaded(path.stem)["data"]["init_args"]["source"]
    # The repository holds the whole corpus in data/, and samples of it beside that.
    assert re.fullmatch(r"hf://datasets/HuggingFaceFW/fineweb-edu/(data|sample/\d+BT)", arguments.sources[0])


def found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match.groups()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_accepted_and_printed_with_overrides(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main([
            "fit", "--config", str(path), "--trainer.max_steps", "7",
            "--optimizer", "lightning_asyncpp.optim.MuonAdamW", "--optimizer.lr", "0.004", "--print_config",
        ])  # fmt: skip
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_steps"] == 7
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "lightning_asyncpp.optim.MuonAdamW"
    assert optimizer["init_args"]["lr"] == 0.004


@pytest.mark.slow
def test_quickstart_beats_a_unigram_model(tmp_path: Path) -> None:
    """Fewer updates, on less text."""
    check_quickstart(
        tmp_path, 0.3, max_steps=40, val_check_interval=40, limit_val_batches=12, data={"max_bytes": 2_000_000}
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_quickstart_is_well_below_a_unigram_model(tmp_path: Path) -> None:
    check_quickstart(tmp_path, 1.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_quickstart_with_experts_is_well_below_a_unigram_model(tmp_path: Path) -> None:
    check_quickstart(tmp_path, 1.5, name="quickstart_moe")


def check_quickstart(
    folder: Path, margin: float, data: dict[str, Any] | None = None, name: str = "quickstart", **trainer: int
) -> None:
    """``data`` and ``trainer`` replace arguments of the recipe."""
    data = {"cache_dir": str(folder / "cache"), **(data or {})}
    arguments = [f"--trainer.{key}={value}" for key, value in trainer.items()]
    arguments += [f"--data.init_args.{key}={value}" for key, value in data.items()]
    printed = run("fit", "--config", str(ROOT / "recipes" / f"{name}.yaml"), *arguments, cwd=folder, timeout=800)
    assert "Done. Checkpoint: " in printed
    assert list((folder / "runs" / name).glob("**/events.out.tfevents.*"))
    (checkpoint,) = (folder / "runs").glob("**/step=*.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    assert sum(value.numel() for value in content["state_dict"].values()) > 800_000
    val_loss = float(re.search(r"val_loss=([\d.]+)\.ckpt", checkpoint.name).group(1))  # type: ignore[union-attr]
    assert val_loss < unigram(data) - margin


def unigram(replaced: dict[str, Any]) -> float:
    config: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())["data"]["init_args"]
    data = TextDataModule(**{**config, **replaced})
    data.prepare_data()
    data.setup("fit")
    train, val = (
        torch.cat([batch.flatten() for batch in loader]) for loader in (data.train_dataloader(), data.val_dataloader())
    )
    loss = unigram_loss(train, val, 256)
    assert np.isfinite(loss)
    return float(loss)
