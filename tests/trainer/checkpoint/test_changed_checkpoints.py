"""A checkpoint in which something is missing, or cannot be, is refused: nothing of a run begins anew in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_asyncpp.core.checkpoint.origin import PIPELINE
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader
from tests.trainer.checkpoint.test_checkpoints import ResumableNet, saving
from tests.trainer.pool import Pools
from tests.trainer.runs import Run, Samples, fit, fit_and_hear

Change = Callable[[dict[str, Any]], None]


def of_pipeline(**values: Any) -> Change:
    return lambda content: content[PIPELINE].update(values)


def no_random_numbers(content: dict[str, Any]) -> None:
    for progress in content[PIPELINE]["progress"]:
        progress["random"] = None


def fewer_random_numbers(content: dict[str, Any]) -> None:
    for progress in content[PIPELINE]["progress"]:
        del progress["random"]["numpy"]


CHANGES: dict[str, tuple[Change, str]] = {
    "no optimizer": (lambda content: content.update(optimizer_states=[]), "holds 0 states of optimizers, and this run"),
    "no random numbers": (no_random_numbers, "holds no random numbers of the training"),
    "fewer": (fewer_random_numbers, "its random numbers cannot be taken up, .* .KeyError: 'numpy'"),
    "partition": (of_pipeline(partition=[10**15]), r"says of its pipeline partition=\[1000000000000000\] of 2 stages"),
    "layers": (of_pipeline(partition=[2, -1]), r"partition=\[2, -1\] of 2 stages"),
    "stages": (of_pipeline(num_stages=-1), "says of its pipeline num_stages=-1"),
    "replicas": (of_pipeline(data_parallel_size="x"), "data_parallel_size='x'"),
}


@pytest.fixture(scope="module")
def written(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("written")
    trainer = {"max_epochs": 1, "enable_checkpointing": True}
    run = Run(ResumableNet, callbacks=(saving(folder),), trainer=trainer, samples=16)
    pools.run(2, fit, run)
    return replace(run, callbacks=(), trainer={"max_epochs": 2}), folder / "step=2.ckpt"


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused(pools: Pools, tmp_path: Path, written: tuple[Run, Path], change: str) -> None:
    run, path = written
    content = torch.load(path, weights_only=True)
    make, text = CHANGES[change]
    make(content)
    torch.save(content, tmp_path / "changed.ckpt")
    for outcome in pools.outcomes(2, fit, replace(run, ckpt_path=str(tmp_path / "changed.ckpt"))):
        assert outcome.error == "ConfigurationError"
        assert re.search(text, outcome.message), outcome.message


def test_another_seed_is_said_to_go_unheard(pools: Pools, written: tuple[Run, Path]) -> None:
    run, path = written
    resumed = replace(run, ckpt_path=str(path), seed=run.seed + 1)
    _, found = pools.run(2, fit_and_hear, resumed, "seed_everything")[0]
    assert [text for text in found if "seed_everything='6' (it was '5'); the checkpoint's random numbers go on" in text]


class Particular(DataLoader):
    """Knows what it wrote."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def test_a_state_of_another_loader() -> None:
    loader = ResumableLoader(Particular(Samples(8)), lambda: 0)
    loader.load_state_dict({"epoch": 1})
    with pytest.raises(ConfigurationError, match="damaged or another loader's: KeyError: 'epoch'"):
        loader.load_state_dict({"dataset": 7})
