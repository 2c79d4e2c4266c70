"""Each optimizer on the command line by the name of its class."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import instantiate_class

from lightning_asyncpp.cli import main
from lightning_asyncpp.models import GPT, GPTConfig
from tests.helpers.workers import worker_context

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW",
    "MuonAdamW": "lightning_asyncpp.optim.MuonAdamW",
    "NorMuonAdamW": "lightning_asyncpp.optim.NorMuonAdamW",
    "SOAP": "lightning_asyncpp.optim.SOAP",
}


@pytest.fixture(scope="module")
def clean() -> Iterator[Any]:
    """A process in which no other library has put an optimizer of the same name beside the package's."""
    with worker_context().Pool(1) as pool:
        yield pool


def parsed(clean: Any, *arguments: str) -> dict:
    """What the recipe's optimizer becomes; nothing is run."""
    return yaml.safe_load(clean.apply(printed_config, arguments))["model"]["init_args"]["optimizer"]


def printed_config(*arguments: str) -> str:
    """What the command prints."""
    sys.argv = ["asyncpp"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["fit", "--config", str(RECIPE), *arguments, "--print_config"])
    return printed.getvalue()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        item if item[0] in ("AdamW", "SOAP") else pytest.param(*item, marks=pytest.mark.slow)
        for item in OPTIMIZERS.items()
    ],
)
def test_a_short_name_finds_the_class_and_its_arguments(clean, name, path):
    config = parsed(clean, f"--optimizer={name}", "--optimizer.lr=0.004", "--optimizer.weight_decay=0.2")
    assert config["class_path"] == path
    model = GPT(GPTConfig(vocab_size=8, context_length=4, num_layers=1, dim=8, num_heads=1))
    optimizer = instantiate_class(model.named_parameters(), config)
    assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(0.004, 0.2)}


@pytest.mark.parametrize(("name", "path"), [("Muon", "MuonAdamW"), ("NorMuon", "NorMuonAdamW")])
def test_the_name_of_a_rule_for_matrices_means_the_optimizer_of_a_whole_model(clean, name, path):
    assert parsed(clean, f"--optimizer={name}")["class_path"] == f"lightning_asyncpp.optim.{path}"
    wrapped = parsed(clean, "--optimizer", "ErrorFeedback", "--optimizer.base", name)
    assert wrapped["init_args"]["base"]["class_path"] == f"lightning_asyncpp.optim.{path}"
    full = parsed(clean, "--optimizer=torch.optim.Muon")
    assert full["class_path"] == "torch.optim.Muon"
