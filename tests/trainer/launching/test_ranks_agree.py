"""Ranks that were started with something else are refused before the first batch, with both values; nothing hangs."""

from __future__ import annotations

import os
import re
import warnings
from collections import UserDict
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_asyncpp.strategy_parts import identity, mixin
from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, Samples, fit, make_trainer


class Told(Net):
    """Its hyper-parameters are those of this process."""

    def __init__(self, run: Run, own: Own | None = None) -> None:
        super().__init__(run)
        self.own = own or Own()
        self.save_hyperparameters(self.own.hyper_parameters)
        if self.own.activation is not None:
            self.model = nn.Sequential(*self.model, self.own.activation)


@dataclass
class Own:
    """What a process may be told otherwise."""

    activation: nn.Module | None = None
    hyper_parameters: dict[str, Any] = field(default_factory=dict)


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    # what the last rank is told otherwise: of the run, or of its module -> what all ranks say
    "layer": ({"activation": nn.Dropout(0.2)}, r"model layers: it is '\(\d\): Dropout\(p=0.1.*' on .*Dropout\(p=0.2"),
    "clipping": ({"trainer": {"gradient_clip_val": 0.5}}, "trainer gradient_clip_val: it is None on .* and 0.5 on"),
    "accumulation": ({"trainer": {"accumulate_grad_batches": 2}}, "trainer accumulate_grad_batches: it is 1 on"),
    "sanity": ({"trainer": {"num_sanity_val_steps": 2}}, "trainer num_sanity_val_steps: it is 0 on .* and 2 on"),
    "length": ({"trainer": {"limit_train_batches": 3}}, "trainer limit_train_batches: it is 1.0 on .* and 3 on"),
    "saves": (
        {"callbacks": ((ModelCheckpoint, {"every_n_train_steps": 2}),), "trainer": {"enable_checkpointing": True}},
        "checkpoint and early-stopping callbacks",
    ),
    "stops": ({"callbacks": ((EarlyStopping, {"monitor": "train_loss"}),)}, "checkpoint and early-stopping callbacks"),
    "slack": ({"options": {"staleness": "least", "slack": 1}}, "2 problems:\n.*staleness: it is 'uniform' on"),
    "policy": ({"options": {"nonfinite_gradients": "skip"}}, "nonfinite_gradients: it is 'stop' on .* and 'skip' on"),
    "replicas": ({"options": {"data_parallel_size": 2}}, "strategy data_parallel_size: it is 1 on .* and 2 on"),
    "form": ({"options": {"state_dict_type": "sharded"}}, "strategy state_dict_type: it is 'full' on .* 'sharded' on"),
    "background": ({"options": {"async_checkpoints": True}}, "strategy async_checkpoints: it is False on .* True on"),
    "timeout": ({"options": {"timeout": timedelta(seconds=99)}}, "strategy timeout: it is 1800.0 on .* and 99.0 on"),
    "strategy": ({"strategy": "sync"}, "strategy strategy: it is 'Async.*' on .* 'Sync.*' on"),
}  # fmt: skip


SAME: dict[str, dict[str, Any]] = {  # what both are told, for the other to be one of the same kind
    "layer": {"activation": nn.Dropout(0.1)},
}


def train(told: dict[str, Any]) -> None:
    """A run of what this rank is told."""
    of_module = {entry.name for entry in fields(Own)}
    own = Own(**{name: value for name, value in told.items() if name in of_module})
    of_run = {name: value for name, value in told.items() if name not in of_module}
    run = Run(lambda run: Told(run, own), samples=16)
    of_run["options"] = {"micro_batches": 2, **of_run.get("options", {})}
    fit(replace(run, **of_run))


def train_by_name(name: str) -> None:
    """A run in which rank 1 is told something else."""
    train({**SAME.get(name, {}), **(OTHER[name][0] if os.environ["RANK"] == "1" else {})})


@pytest.mark.parametrize("name", OTHER)
def test_what_ranks_must_share(pools: Pools, name: str) -> None:
    outcomes = pools.outcomes(2, train_by_name, name)
    assert [outcome.error for outcome in outcomes] == ["ConfigurationError"] * 2, outcomes
    for outcome in outcomes:
        assert re.search(OTHER[name][1], outcome.message, re.DOTALL), outcome.message
        assert re.search("[Aa]ll ranks of a run must be started with the same script", outcome.message)


def two_sections() -> None:
    """Rank 1 is told another clipping, and other hyper-parameters."""
    other = {"trainer": {"gradient_clip_val": 0.5}} if os.environ["RANK"] == "1" else {}
    train({**other, "hyper_parameters": {"width": 1 + int(os.environ["RANK"])}})


def test_what_else_differs_is_named_too(pools: Pools) -> None:
    """Where ranks are refused; by itself it may be right."""
    for outcome in pools.outcomes(2, two_sections):
        problems = outcome.message.splitlines()
        assert problems[0].endswith("2 problems:")
        assert "1. ranks differ in trainer gradient_clip_val: it is None" in problems[1]
        assert "2. ranks differ in hyper-parameters width: it is 1 on rank 0" in problems[2]
        assert problems[3].startswith("All ranks of a run must be started with the same script")


def with_seeds(seeds: tuple[int, int]) -> list[str]:
    """What is warned of where ranks were given these."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train({"seed": seeds[int(os.environ["RANK"])], "trainer": {"max_steps": 1, "max_epochs": -1}})
    return [str(warning.message) for warning in caught]


def test_other_seeds_are_warned_of(pools: Pools) -> None:
    text = "ranks differ in seed seed_everything: it is '7' on rank 0 .stage 1. and '42' on rank 1 .stage 0.. The"
    found = [warning for warning in pools.run(2, with_seeds, (7, 42))[0] if re.search(text, warning)]
    assert len(found) == 1
    assert not [warning for warning in pools.run(2, with_seeds, (7, 7))[0] if "seed_everything" in warning]


def other_versions() -> None:
    """Rank 1 has another torch, and is told another clipping, which nobody gets to."""
    found = {**identity.versions(), **({"torch": "2.11.9"} if os.environ["RANK"] == "1" else {})}
    with mock.patch.object(mixin, "versions", return_value=found):
        train_by_name("clipping")


def test_other_versions(pools: Pools) -> None:
    for outcome in pools.outcomes(2, other_versions):
        assert outcome.error == "ConfigurationError"
        assert f"versions torch: it is {torch.__version__.partition('+')[0]}" in outcome.message.replace("'", "")
        assert "2.11.9" in outcome.message


def train_with_own_hyper_parameters() -> list[str]:
    """What rank 1 makes for itself is another width, which may matter, and the name of a run, which may not."""
    rank = os.environ["RANK"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train({"hyper_parameters": {"width": 4 + int(rank), "name": f"owl-{rank}", "same": 1, "odd": Odd()}})
    return [str(warning.message) for warning in caught if "Every rank trains with its own" in str(warning.message)]


class Odd(UserDict[str, Any]):
    """Of somebody else's class, which looks its values up."""

    def items(self) -> Any:
        raise KeyError("missing")


def test_hyper_parameters_of_a_process(pools: Pools) -> None:
    """Every rank runs the script by itself, and may draw names: only the user knows which of them matter."""
    said, other = pools.run(2, train_with_own_hyper_parameters)
    assert not other
    assert len(said) == 1
    assert "hyper-parameters width: it is 4 on rank 0 (stage 1) and 5 on rank 1 (stage 0)" in said[0]
    assert "hyper-parameters name: it is 'owl-0' on rank 0" in said[0]
    assert "same" not in said[0]


class ByLayer(Net):
    """Every layer has a group of its own, with a learning rate of its own, as where rates decay with depth."""

    def configure_optimizers(self) -> Any:
        rank = os.environ["RANK"]
        self.save_hyperparameters({"local_rank": rank, "device_name": f"cuda:{rank}", "data": f"/scratch/{rank}"})
        groups = [
            {"params": list(layer.parameters()), "lr": 0.01 * 0.9**index}
            for index, layer in enumerate(self.model)
            if any(True for _ in layer.parameters())
        ]
        return torch.optim.AdamW(groups)


class GroupOfALayer(ByLayer):
    """Has as many layers with parameters as stages, so that a stage has one group."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


class Printed(nn.Module):
    """Shows where it is in the memory of a process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def extra_repr(self) -> str:
        return f"function={object()!r}, device=cuda:{os.environ['RANK']}"


class Unprintable(Printed):
    def extra_repr(self) -> str:
        raise RuntimeError("of this rank")


class WithPrinted(ByLayer):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(*self.model, Printed())
        self.save_hyperparameters({"local_rank": os.environ["RANK"], "data": f"/scratch/{os.environ['RANK']}"})


class WithUnprintable(ByLayer):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(*self.model, Unprintable())


@pytest.mark.parametrize("module", [ByLayer, GroupOfALayer, WithPrinted, WithUnprintable])
def test_what_a_process_may_have_of_its_own(pools: Pools, module: Any) -> None:
    pools.run(2, fit, Run(module, samples=16, options={"micro_batches": 2}))


def test_replicas_that_differ(pools: Pools) -> None:
    outcomes = pools.outcomes(4, train_replica_by_name, "clipping")
    for outcome in outcomes:
        assert outcome.error == "ConfigurationError"
        assert "trainer gradient_clip_val: it is None on ranks 0, 2, 3 and 0.5 on rank 1 (stage 0)" in outcome.message


def train_replica_by_name(name: str) -> None:
    """As :func:`train_by_name`, with two replicas."""
    other = OTHER[name][0] if os.environ["RANK"] == "1" else {}
    train({"options": {"data_parallel_size": 2}, **other})


def train_replica_on(what: str) -> None:
    """Two replicas of one stage, of which the second has a seed, or data, of its own."""
    other = os.environ["RANK"] == "1"
    L.seed_everything(6 if other and what == "seed" else 5, verbose=False)
    run = Run(Net, samples=16, shuffle=what != "own data", options={"data_parallel_size": 2, "micro_batches": 1})
    data = Samples(run.samples, seed=int(other and what != "seed"))
    make_trainer(run).fit(Net(run), DataLoader(data, batch_size=4, shuffle=what == "seed"))


def test_replicas_that_deal_out_data_in_other_orders(pools: Pools) -> None:
    """Rows would be seen twice, and others never."""
    for outcome in pools.outcomes(2, train_replica_on, "seed"):
        assert outcome.error == "ConfigurationError"
        assert re.search(r"data seed of \w+: it is 5 on rank 0 .stage 0. and 6 on rank 1", outcome.message)


def test_replicas_with_data_of_their_own(pools: Pools) -> None:
    pools.run(2, train_replica_on, "own data")
