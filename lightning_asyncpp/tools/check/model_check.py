"""Training of a module's first updates in several ways, with real Trainers in this process, to compare the results."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_asyncpp.core.cut.network import network_in, prefix_of
from lightning_asyncpp.core.cut.own_forward import cut_of
from lightning_asyncpp.core.cut.partition_choice import Asked
from lightning_asyncpp.core.cut.units import stages_of_parameters, telling
from lightning_asyncpp.core.randomness import random_states, set_random_states
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.messages import quiet
from lightning_asyncpp.tools.check.record import (
    EQUAL,
    EQUAL_BUT_FOR_ORDER,
    GRADIENT,
    LOSS,
    OF_ORDER,
    CheckReport,
    Difference,
    Record,
    Rounding,
    first_difference,
)
from lightning_asyncpp.tools.check.reference_strategy import BATCH_NORMS, ReferenceStrategy
from lightning_asyncpp.trainer.strategy import DelayedGradientStrategy

_QUIET: Mapping[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "limit_val_batches": 0, "num_sanity_val_steps": 0, "max_epochs": 1, "devices": 1,
}  # fmt: skip


def batches_of(source: LightningDataModule | LightningModule) -> Iterator[Any]:
    """Return the training batches of a source; several loaders are combined as the Trainer combines them."""
    source.prepare_data()
    source.setup("fit")
    given = source.train_dataloader()
    loaders = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    return (batch for batch, _, _ in loaders)


def check_model(
    module: LightningModule,
    data: Iterable[Any] | LightningDataModule,
    stages: int = 2,
    microbatches: int | None = None,
    staleness: Staleness | None = None,
    slack: Slack = 0,
    lookahead: int | None = None,
    partition: Asked = "auto",
    delay: int = 1,
    updates: int = 4,
    seed: int = 0,
    **trainer: Any,
) -> CheckReport:
    """Train a module for a few updates in several ways, in this process, and compare the results.

    Each training has its own ``Trainer`` and a copy of the module, with its optimizer, schedulers and hooks. There are
    three comparisons, the first two bit for bit, or up to the order of sums if several stages use the same value:

    - ``pieces``: a pipeline without delay against the whole model. Cutting the model must change nothing.
    - ``delayed``: a pipeline with delay against the whole model, whose gradients have the same delay. This comparison
      is left out if ``pieces`` finds a difference, and with ``delay=0``.
    - ``whole``: losses and gradients of whole batches against those of their microbatches, up to rounding.

    Args:
        module: a LightningModule, which is not changed.
        data: a loader, a list of batches, or a LightningDataModule; batches are repeated if there are too few.
        stages: number of stages.
        microbatches, staleness, slack, lookahead, partition: as for the strategy.
        delay: 1 for ``async_pipeline``, 0 for ``sync_pipeline``.
        updates: number of updates.
        seed: seed of the run.
        **trainer: arguments of the Trainers, such as ``gradient_clip_val``, ``precision``, ``callbacks``. The default
            accelerator is the CPU.

    Raises:
        ConfigurationError: the pipeline cannot train the module, for the reasons in the message, or there is no batch.
    """
    accumulated = trainer.get("accumulate_grad_batches", 1)
    given = batches_of(data) if isinstance(data, LightningDataModule) else data
    batches = list(itertools.islice(given, updates * accumulated))
    if not batches:
        raise ConfigurationError("check_model got no batch: pass a loader or a list with at least one")
    batches = list(itertools.islice(itertools.cycle(batches), updates * accumulated))
    asked = {"stages": stages, "microbatches": microbatches, "partition": partition}
    delayed = {**asked, "staleness": staleness, "slack": slack, "lookahead": lookahead}
    device = torch.device("cuda", 0) if trainer.get("accelerator") in ("gpu", "cuda") else torch.device("cpu")
    check = _Check(module, batches, updates, seed, trainer, device)
    with _quietly():
        comparisons = {"pieces": check.compare_stages("pieces", delay=0, **asked)}
        if delay and not isinstance(comparisons["pieces"], Difference):
            comparisons["delayed"] = check.compare_stages("delayed", delay=1, **delayed)
        comparisons["whole"] = check.compare_whole()
    return CheckReport(check.layers, check.settings.microbatches, check.losses, comparisons, accumulated)


@dataclass
class _Check:
    """Trainings of a module, and comparisons of their records."""

    module: LightningModule
    batches: Sequence[Any]
    updates: int
    seed: int
    trainer: Mapping[str, Any]
    device: torch.device
    settings: ResolvedSettings = field(init=False)
    layers: list[list[str]] = field(init=False)
    losses: list[float] = field(default_factory=list)
    _stages: Mapping[str, int] = field(default_factory=dict)
    _stale_counts: list[tuple[Collection[str], int]] = field(default_factory=list)

    def compare_stages(self, name: str, **arguments: Any) -> Difference | str:
        """Compare a pipeline with the reference.

        The results must be equal bit for bit, or up to the order of sums if several stages use the same value.
        """
        print(f"check_model: comparing {name} ...", file=sys.stderr, flush=True)
        strategy = DelayedGradientStrategy(**arguments)
        found = self._run(strategy)
        self._note_stages(strategy)
        cut = cut_of(cast(Any, network_in(cast(Any, strategy.lightning_module))))
        is_exact = cut is None or cut.is_exact
        del strategy
        zeros = {(key[0], key[2]) for key, value in found.seen.items() if key[1] == GRADIENT and value.shown == 0.0}
        expected = self._run(ReferenceStrategy(self.settings, self._stale_counts, self.seed, self.device, zeros=zeros))
        self.losses = self.losses or expected.numbers(LOSS)
        apart, equal = first_difference(expected, found), EQUAL
        if apart is not None and not is_exact:
            apart, equal = first_difference(expected, found, OF_ORDER), EQUAL_BUT_FOR_ORDER
        return equal if apart is None else self._placed(name, apart)

    def compare_whole(self) -> Difference | str:
        """Compare whole batches with their microbatches."""
        print("check_model: comparing whole ...", file=sys.stderr, flush=True)
        apart = self._apart_from_whole()
        if apart is None:
            norms = any(isinstance(layer, BATCH_NORMS) for layer in self.module.modules())
            of = "; not compared: BatchNorm, which normalises over the samples of each microbatch" if norms else ""
            return f"losses and gradients are equal up to rounding{of}"
        if first_difference(self._plain(1)[0], *self._plain(1, seed=1)):
            return "not compared: the step draws a permutation, or draws random numbers without torch"
        right = (text for text, hook in _possible_hooks(self.batches[0]) if self._apart_from_whole(**hook) is None)
        return self._placed("whole", apart, next((f"With {r}, the results agree." for r in right), ""))

    def _apart_from_whole(self, **hooks: Any) -> Difference | None:
        whole, _ = self._plain(1, **hooks)
        return first_difference(whole, *self._plain(self.settings.microbatches, **hooks))

    def _plain(self, parts: int, seed: int = 0, **hooks: Any) -> tuple[Record, Rounding]:
        """Train on the initial weights, with batches cut into ``parts``; return the record and its tolerances."""
        settings = replace(self.settings.with_delay(0), microbatches=parts)
        strategy = ReferenceStrategy(settings, (), self.seed + seed, self.device, at_first=True, **hooks)
        found, eps = self._run(strategy), strategy.draws.eps
        return found, {LOSS: eps**0.75, GRADIENT: eps**0.5}  # sums lose digits when their terms cancel

    def _run(self, strategy: Strategy) -> Record:
        gc.collect()  # frees reference cycles of earlier trainings
        given = {"accelerator": "cpu", **_QUIET, **self.trainer}
        callbacks = given.pop("callbacks", None) or []
        module, callbacks, batches = copy.deepcopy((self.module, callbacks, self.batches))
        record = Record(callbacks)
        seed_everything(getattr(strategy, "seed", self.seed), workers=False, verbose=False)
        trainer = Trainer(strategy=strategy, max_steps=self.updates, callbacks=[record, *callbacks], **given)
        trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
        return record

    def _note_stages(self, strategy: DelayedGradientStrategy) -> None:
        session: Any = strategy.session
        module: Any = strategy.lightning_module
        self.settings, counts, prefix = session.resolved, session.partition.counts, prefix_of(module)
        stages = stages_of_parameters(cast(Any, network_in(module)), counts)
        self._stages = {prefix + name: stage for name, stage in stages.items()}
        pairs = [(e.stage.parameters.keys(), e.schedule.stage_rule.num_stale) for e in session.engine.stages]
        self._stale_counts = [(names, number) for names, number in pairs if number is not None]
        units = iter([unit.name for unit in session.stage.units])
        self.layers = [telling(list(itertools.islice(units, count))) for count in counts]

    def _placed(self, comparison: str, apart: Difference, hint: str = "") -> Difference:
        return replace(apart, comparison=comparison, stage=self._stages.get(apart.name.partition(" ")[0]), hint=hint)


def _possible_hooks(batch: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (definition as text, hook) for losses that are sums, or means over labels or masks."""
    yield "`loss_reduction = 'sum'`", {"loss_reduction": "sum"}
    entries = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else batch
    keys = [k for k, v in entries.items() if isinstance(v, Tensor)] if isinstance(entries, Mapping) else []
    for ignored, key, shift in itertools.product((-100, 0), keys, (0, 1)):  # language models shift labels
        at = (..., slice(shift, None))
        text = f"float((microbatch[{key!r}]{'[..., 1:]' if shift else ''} != {ignored}).sum())"
        weight = partial(lambda m, k, i, at: float((m[k][at] != i).sum()), k=key, i=ignored, at=at)
        yield f"`def microbatch_weight(self, microbatch): return {text}`", {"microbatch_weight": weight}


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress logs and warnings; restore the random states at the end."""
    states = random_states()
    try:
        with quiet(), mock.patch.dict(os.environ):  # seed_everything() stores the seed there
            yield
    finally:
        set_random_states(states)
