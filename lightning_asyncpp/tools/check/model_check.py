"""Trains the first updates of a module several ways, with real Trainers in this process, and compares them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_asyncpp.core.cut.network import network_in, prefix_of
from lightning_asyncpp.core.cut.partition_choice import Asked
from lightning_asyncpp.core.cut.units import stages_of_parameters, telling
from lightning_asyncpp.core.randomness import random_states, set_random_states
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.check.record import Apart, Record, first_difference, largest_differences
from lightning_asyncpp.tools.check.reference_strategy import PlainStrategy, ReferenceStrategy
from lightning_asyncpp.tools.check.report import CheckReport, Comparison, Difference
from lightning_asyncpp.tools.check.same_draws import SameDraws
from lightning_asyncpp.tools.check.weights import possible_weights
from lightning_asyncpp.trainer.strategy import DelayedGradientStrategy

# What is rounding: three quarters of the digits of a dtype for a loss, half of them for a gradient, where terms cancel.
_DIGITS = {"loss": 0.75, "gradient used": 0.5}
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
Change = Callable[[L.LightningModule], None]


def check_model(
    module: L.LightningModule,
    data: Iterable[Any],
    stages: int = 2,
    micro_batches: int | None = None,
    staleness: Staleness | None = None,
    slack: Slack = 0,
    lookahead: int | None = None,
    partition: Asked = "auto",
    delay: int = 1,
    updates: int = 4,
    seed: int = 0,
    **trainer: Any,
) -> CheckReport:
    """Train the first updates of a module several ways, in this process, and compare them.

    Each is a ``Trainer`` of its own with a copy of the module, its optimizer, schedulers and hooks:

    * ``pieces``: a pipeline without delay against the whole model. To the last bit; what differs, cutting the model
      changes.
    * ``delayed``: a pipeline with the delay against the rule that it trains by, on the whole model. To the last bit;
      what differs, the delay changes.
    * ``whole``: losses and gradients of whole batches against those of their microbatches, up to rounding; what
      differs, cutting batches changes.

    Args:
        module: a LightningModule; it is not changed.
        data: a loader, or a list of batches, which are repeated where there are too few.
        stages: number of stages.
        micro_batches: as for the strategy.
        staleness: as for the strategy.
        slack: as for the strategy.
        lookahead: as for the strategy.
        partition: as for the strategy; nothing is measured, numbers of parameters count instead.
        delay: 0 for ``sync_pipeline``.
        updates: number of updates.
        seed: of the run.
        **trainer: of the Trainers, such as ``gradient_clip_val``, ``precision``, ``callbacks``; ``accelerator`` is the
            CPU if it is not given.

    Raises:
        ConfigurationError: the pipeline cannot train the module, with every problem that was found.
    """
    batches = list(itertools.islice(data, updates))
    if not batches:
        raise ConfigurationError("check_model got no batch: give it a loader or a list with one or more")
    asked = {"stages": stages, "micro_batches": micro_batches, "partition": partition}
    delayed = {**asked, "delay": 1, "staleness": staleness, "slack": slack, "lookahead": lookahead}
    check = _Check(module, batches, updates, seed, trainer)
    with _quietly():
        comparisons = [check.compare_stages("pieces", {**asked, "delay": 0})]
        if delay and comparisons[0].difference is None:
            comparisons.append(check.compare_stages("delayed", delayed))
        comparisons.append(check.compare_whole())
    return CheckReport(check.layers, check.settings.micro_batches, check.losses, comparisons)


class _Check:
    """Runs Trainers and compares what they recorded.

    Attributes:
        settings: of the pipeline that ran last.
        layers: names of those of each stage.
        losses: of the first pipeline's reference.
    """

    settings: ResolvedSettings

    def __init__(
        self, module: L.LightningModule, batches: Sequence[Any], updates: int, seed: int, trainer: Mapping[str, Any]
    ) -> None:
        self._module, self._batches, self._updates, self._seed, self._trainer = module, batches, updates, seed, trainer
        self._device = torch.device("cuda", 0) if trainer.get("accelerator") in ("gpu", "cuda") else torch.device("cpu")
        self._counts: tuple[int, ...] = ()
        self._stages: dict[str, int] = {}
        self.layers: list[list[str]] = []
        self.losses: list[float] = []

    def compare_stages(self, name: str, arguments: Mapping[str, Any]) -> Comparison:
        """Compare a pipeline with the reference, to the last bit."""
        strategy = DelayedGradientStrategy(**arguments)
        found = self._run(strategy)
        self._note_stages(strategy)
        expected = self._run(ReferenceStrategy(self.settings, self._counts, self._seed, self._device))
        self.losses = self.losses or expected.losses()
        apart = first_difference(expected, found)
        return Comparison(name, apart and self._difference(name, apart), "equal to the last bit")

    def compare_whole(self) -> Comparison:
        """Compare whole batches with their microbatches."""
        apart, most = self._whole_apart()
        if apart is None:
            at_most = [f"{most.get(kind, 0.0):.1e} for a {kind}" for kind in _DIGITS]
            return Comparison("whole", None, f"equal up to rounding: at most {' and '.join(at_most)}")
        if self._rounding_apart(self._plain(1), self._plain(1, seed=self._seed + 1))[0]:
            return Comparison("whole", None, "not compared: the step draws permutations, or numbers that are not torch's")
        if any(isinstance(layer, _BatchNorm) for layer in self._module.modules()) and not self._whole_apart(_freeze)[0]:
            return Comparison("whole", None, "equal but for BatchNorm, whose statistics are those of a microbatch")
        hint = ""
        for text, weight in possible_weights(self._batches[0]):
            if not self._whole_apart(lambda module, w=weight: (_freeze(module), setattr(module, "micro_batch_weight", w)))[0]:
                hint = f"They agree with `def micro_batch_weight(self, micro_batch): return float({text})`."
                break
        return Comparison("whole", dataclasses.replace(self._difference("whole", apart), hint=hint))

    def _whole_apart(self, change: Change = lambda module: None) -> tuple[Apart | None, dict[str, float]]:
        return self._rounding_apart(self._plain(1, change), self._plain(self.settings.micro_batches, change))

    def _rounding_apart(self, one: tuple[Record, float], many: tuple[Record, float]) -> tuple[Apart | None, dict[str, float]]:
        """The first difference that is no rounding, and the largest one of each kind."""
        eps, most, first = max(one[1], many[1]), dict[str, float](), None
        for key, apart, values in largest_differences(one[0], many[0]):
            most[key.kind] = max(most.get(key.kind, 0.0), apart)
            if first is None and apart > eps ** _DIGITS[key.kind]:
                first = Apart((key,), values)
        return first, most

    def _plain(self, micro_batches: int, change: Change = lambda module: None, seed: int | None = None) -> tuple[Record, float]:
        """What a batch gives in so many pieces, and the eps of the coarsest dtype in it."""
        settings = dataclasses.replace(self.settings, micro_batches=micro_batches, delay=0)
        strategy = PlainStrategy(settings, self._counts, self._seed, self._device)
        draws = SameDraws()
        return self._run(strategy, draws, change, keep=True, seed=seed), draws.eps

    def _run(
        self, strategy: Strategy, context: AbstractContextManager[Any] | None = None,
        change: Change = lambda module: None, keep: bool = False, seed: int | None = None,
    ) -> Record:
        record, given = Record(keep), dict(self._trainer)
        module, callbacks = copy.deepcopy((self._module, given.pop("callbacks", [])))
        change(module)
        L.seed_everything(self._seed if seed is None else seed, workers=False, verbose=False)
        trainer = L.Trainer(**{
            "strategy": strategy, "accelerator": "cpu", "devices": 1, "max_steps": self._updates, "max_epochs": 1, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": [record, *callbacks], **given,
        })
        with context or nullcontext():
            trainer.fit(module, _Batches(copy.deepcopy(self._batches), self._updates))
        return record

    def _note_stages(self, strategy: DelayedGradientStrategy) -> None:
        session, module = strategy.session, strategy.lightning_module
        network = network_in(module)
        assert session.resolved is not None and session.partition is not None and session.stage is not None and network is not None
        self.settings, self._counts, prefix = session.resolved, session.partition.counts, prefix_of(module)
        self._stages = {prefix + name: stage for name, stage in stages_of_parameters(network, self._counts).items()}
        units = iter(session.stage.units)
        self.layers = [telling([prefix + unit.name for unit in itertools.islice(units, count)]) for count in self._counts]

    def _difference(self, comparison: str, apart: Apart) -> Difference:
        first = apart.keys[0]
        return Difference(comparison, first.update, first.kind, first.name, self._stages.get(first.name), apart.values, len(apart.keys) - 1)


class _Batches:
    """Batches as a loader."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), self._count)


def _freeze(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


@contextmanager
def _quietly() -> Iterator[None]:
    """Neither log nor warn, and leave random numbers as they were."""
    states, seeds, disabled = random_states(), {name: os.environ.get(name) for name in _SEEDS}, logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        set_random_states(states)
        for name, value in seeds.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
