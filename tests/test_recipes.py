"""Recipes load and explain every key, the AdamW twin differs in the optimizer, and quickstarts beat a unigram model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.lightning_cli.command import AsyncppCLI, make_cli
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.tools.parsers import prepare_parser
from tests.helpers.models import unigram_loss

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OF_GPTS = [path for path in RECIPES if not path.stem.startswith("hf_")]  # tests/trainer/hf tests the others
LARGE = [path for path in OF_GPTS if not path.stem.startswith("quickstart")]
STRUCTURE = {
    "trainer", "model", "data", "logger", "callbacks", "config", "class_path", "init_args", "base", "optimizer"
}  # fmt: skip


def run(*arguments: str, cwd: Path, timeout: int = 280) -> str:
    command = ["timeout", "-k", "10", str(timeout), sys.executable, "-m", "lightning_asyncpp", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    keys = [(above, re.match(r"\s*(?:- )?(\w+):", line)) for above, line in zip(["", *lines], lines)]
    assert not [key[1] for above, key in keys if key and key[1] not in STRUCTURE and not above.lstrip().startswith("#")]


def loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    return content


def test_the_adamw_twin_differs_in_the_optimizer_alone() -> None:
    twins = [loaded("smollm_360m"), loaded("smollm_360m_adamw")]
    wrapped = [twin["model"]["init_args"]["optimizer"]["init_args"].pop("base") for twin in twins]
    assert twins[0] == twins[1]
    muon, adamw = (base["init_args"] for base in wrapped)
    assert [base["class_path"].rpartition(".")[2] for base in wrapped] == ["MuonAdamW", "AdamW"]
    shared = {"lr": "lr", "weight_decay": "weight_decay", "adamw_betas": "betas"}
    assert {name: muon[name] for name in shared} == {name: adamw[other] for name, other in shared.items()}


def test_published_results_belong_to_the_default_cut() -> None:
    """The default cut gives all stages the same number of layers, as when the results were measured."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**loaded("quickstart")["model"]["init_args"]["config"]))
    auto, uniform = (choose_partition(model, 0, 2, how).counts for how in ("auto", "uniform"))
    assert auto == uniform


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> AsyncppCLI:
    """Return a recipe as the command builds it, but for the CPU; its model stays on the meta device until it is cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["asyncpp", "--config", str(request.param), "--trainer.accelerator", "cpu"])
        return make_cli(run=False, save_config_callback=None)


@pytest.mark.parametrize("built", OF_GPTS, indirect=True, ids=lambda path: path.stem)
def test_a_recipe_fits_together(built: AsyncppCLI) -> None:
    data, config = built.datamodule, built.model.config
    settings, problems = built.trainer.strategy.session.settings.resolve(built.trainer.world_size)
    assert problems == []
    assert settings is not None
    assert data.context_length == config.context_length
    assert data.batch_size % settings.microbatches == 0


# SmolLM-360M's own number, and GPT-2's 124,439,808 without position embeddings and biases, also of norms
PARAMETERS = {"smollm_360m": 361_821_120, "gpt2_124m": 123_551_232, "moe_10b": 10_191_373_824}


@pytest.mark.parametrize("built", OF_GPTS, indirect=True, ids=lambda path: path.stem)
def test_the_model_of_a_recipe_is_built_with_its_optimizer(built: AsyncppCLI, request: pytest.FixtureRequest) -> None:
    """The model has the size in the recipe's name; synchronous twins are left out, since they have the same model."""
    with torch.device("meta"), torch.no_grad():  # only strategies collect experts' auxiliary losses
        model = built.model.build_model()
        logits = model(torch.zeros(1, built.model.config.context_length, dtype=torch.int64))
    assert logits.shape == (1, built.model.config.context_length, built.model.config.vocab_size)
    named = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in named.values())
    optimizer = built.model.optimizer(named.items())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    size = sum(parameter.numel() for parameter in named.values())
    assert size == PARAMETERS.get(request.node.callspec.id.removesuffix("_adamw"), size)


@pytest.mark.parametrize(
    "path", [path for path in LARGE if "asyncpp prepare hf" in path.read_text()], ids=lambda p: p.stem
)
def test_what_a_recipe_tells_of_its_tokens_prepares_them(path: Path) -> None:
    (command,) = found(r"#   asyncpp prepare ((?:.*\\\n)*.*\n)", path.read_text())
    arguments = prepare_parser().parse_args(shlex.split(command.replace("\\\n#", " ")))
    assert arguments.output == loaded(path.stem)["data"]["init_args"]["source"]


def found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match.groups()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["quickstart", "quickstart_moe"])
def test_a_whole_quickstart_is_well_below_a_unigram_model(name: str, tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path / "cache")}
    given = ["--config", str(ROOT / "recipes" / f"{name}.yaml"), f"--data.init_args.cache_dir={cache['cache_dir']}"]
    assert "Done. Checkpoint: " in run("fit", *given, cwd=tmp_path, timeout=800)
    (checkpoint,) = (tmp_path / "runs").glob("**/step=*.ckpt")
    (val_loss,) = found(r"val_loss=([\d.]+)\.ckpt", checkpoint.name)
    data = TextDataModule(**{**loaded(name)["data"]["init_args"], **cache})
    data.prepare_data()
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader())
    train, val = (torch.cat([batch.flatten() for batch in loader]) for loader in loaders)
    assert float(val_loss) < unigram_loss(train, val, 256) - 1.5
