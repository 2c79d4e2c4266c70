"""The rule of the reference under a real Trainer: a whole module, microbatch by microbatch, with Lightning's own step.

:mod:`lightning_asyncpp.reference` computes the gradient. The Trainer does the rest: it clips, calls hooks, steps the
whole optimizer at once, and steps schedulers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp import reference
from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.batches.batch_output import BatchOutput, or_nan
from lightning_asyncpp.core.batches.user_hooks import UserHooks, loss_of
from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.units import Unit, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.updates.clipping import clip_by_norm


class ReferenceStrategy(SingleDeviceStrategy):
    """Trains a module as the reference does.

    Args:
        settings: of the pipeline that it is compared with.
        counts: number of layers of each of its stages.
        seed: of the run.
        device: where it trains.
    """

    applies_statistics = materializes_stages = True

    def __init__(self, settings: ResolvedSettings, counts: Sequence[int], seed: int, device: torch.device) -> None:
        super().__init__(device)
        self.settings, self.counts, self.seed = settings, counts, seed
        self.update = 0
        self._gradient = reference.MeanGradient()
        self._before: reference.Weights = {}
        self._newest: reference.Weights = {}
        self._norm_before = 0.0

    @property
    def network(self) -> nn.Module:
        """What the pipeline cuts."""
        network = network_in(self.lightning_module)
        assert network is not None
        return network

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module: Any = self.lightning_module
        problems_of_layers(self.network, module.example_input_array, name_in_steps(module))  # finds them
        units = pipeline_units(self.network)
        materialize(units, range(len(units)), self.seed, torch.device("cpu"))
        super().setup(trainer)
        self.hooks = UserHooks.of(module, forward_context=self.precision_plugin.forward_context)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.schedules = self._schedules(units)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _schedules(self, units: Sequence[Unit]) -> dict[Tensor, Schedule]:
        """What has versions -> the schedule of its stage."""
        whole, following = WholeModel.of(units, self.counts, self.network)[0], iter(units)
        found: dict[Tensor, Schedule] = {}
        for stage, count in enumerate(self.counts):
            schedule = whole.schedule(self.settings, stage)
            for unit in itertools.islice(following, count):
                trained = [p for p in unit.module.parameters() if p.requires_grad]
                found = dict.fromkeys([*trained, *reference.versioned_buffers(unit.module)], schedule) | found
        return found

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        results, weights = [], []

        def step(micro_batch: Any) -> Tensor:
            result = super(ReferenceStrategy, self).training_step(micro_batch, *args, **kwargs)
            results.append(result)
            weights.append(float(self.hooks.micro_batch_weight(micro_batch)))
            loss = loss_of(result)
            return loss / weights[-1] if self.hooks.loss_reduction == "sum" else loss

        self._gradient = self.gradient_of(batch, step)
        output = BatchOutput(results, weights)
        loss = or_nan(output.mean_loss(self.hooks.loss_reduction), self.root_device)
        return {**output.beside_loss(), "loss": loss}

    def gradient_of(self, batch: Any, step: Callable[[Any], Tensor]) -> reference.MeanGradient:
        """Return the gradient of a batch, of which every microbatch runs on the weights that the rule gives it."""
        parts = self.settings.micro_batches
        self._newest = reference.values_of(self.schedules if self.settings.delay else ())
        for parameter in self.parameters:
            parameter.grad = None  # of the update before
        gradient = reference.gradient_of(
            self.network, {p: p for p in self.parameters}, step, self.hooks.split_batch(batch, parts), self._go_to,
            self.hooks.micro_batch_weight, self.seed, self.update * parts,
        )  # fmt: skip
        reference.load(self._newest)
        return gradient

    def _go_to(self, place: int) -> None:
        for x, newest in self._newest.items():
            is_old = self.schedules[x].stage_rule.version(self.update, place) < self.update
            reference.load({x: self._before[x] if is_old else newest})

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter in self.parameters:
            parameter.grad = self._gradient.mean(parameter, 0.0, None)
        return self.precision_plugin.post_backward(closure_loss, module)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay({p: self._staleness(p) for p in self.parameters})
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._norm_before = self._gradient.norm(self.parameters)
        reference.update_buffers(self.network, self._gradient.counts)
        self._before = self._newest
        self.update += 1
        return result

    def _staleness(self, parameter: Tensor) -> float:
        rule = self.schedules[parameter].stage_rule
        return 0.0 if rule.in_start(self.update) else rule.staleness(self.settings.micro_batches)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the gradient as hooks left it; where a stage steps before it is known, by the last one.

        The norm of a gradient that no hook changed is the reference's, which rounds as a pipeline does.
        """
        raw = {p: self._gradient.mean(p, 0.0, None) for p in self.parameters}
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._gradient.norm(self.parameters)
        if not all(p.grad is g or (p.grad is not None and g is not None and g.equal(p.grad)) for p, g in raw.items()):
            norm = math.sqrt(sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in grads))
        for p in self.parameters:
            clip_by_norm([p], self._norm_before if self.schedules[p].steps_ahead(self.update) else norm, clip_val)

    @override
    def teardown(self) -> None:
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()


class PlainStrategy(ReferenceStrategy):
    """Takes every gradient at the first weights, of a whole batch or of its microbatches, to compare the two.

    Losses that layers add are left out: a balance of experts is one of each microbatch.
    """

    _first: reference.Weights | None = None

    @override
    def gradient_of(self, batch: Any, step: Callable[[Any], Tensor]) -> reference.MeanGradient:
        parts = self.settings.micro_batches
        self._first = self._first or reference.values_of(self.parameters)
        reference.load(self._first)
        gradient = reference.MeanGradient()
        for piece in [batch] if parts == 1 else self.hooks.split_batch(batch, parts):
            if piece is None or not (weight := float(self.hooks.micro_batch_weight(piece))):
                continue
            with collecting():
                loss = step(piece)
            for p, g in zip(self.parameters, torch.autograd.grad(loss * weight, self.parameters, allow_unused=True)):
                if g is not None:
                    gradient.sums[p] = gradient.sums[p] + g if p in gradient.sums else g
            gradient.weight += weight
        return gradient
