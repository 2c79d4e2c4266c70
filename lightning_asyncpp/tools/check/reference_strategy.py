"""The rule of the reference under a real Trainer: a whole module, microbatch by microbatch, with Lightning's own step.

:mod:`lightning_asyncpp.reference` computes the gradient. The Trainer does the rest: it clips, calls hooks, steps the
whole optimizer at once, and steps schedulers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp import reference
from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.core.batches.micro_batch import BatchOutput, loss_of, or_nan
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.units import Unit, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.stage_optimizer import name_parameters
from lightning_asyncpp.core.updates.clipping import clip_by_norm


class ReferenceStrategy(SingleDeviceStrategy):
    """Trains a module as the reference does, with the settings of a pipeline, and ``counts`` layers on its stages.

    ``at_first`` takes every gradient at the first weights, without the losses that layers add: a balance of experts is
    one of each microbatch. One microbatch is then the whole batch, and runs the model's own forward. ``zeros`` are
    (update, name) of parameters with a gradient of 0 in the pipeline: it sends zeros back for what the loss does not
    need of another stage, where a single process has no gradient, and thus no weight decay.
    """

    applies_statistics = materializes_stages = True

    def __init__(
        self, settings: ResolvedSettings, counts: Sequence[int], seed: int, device: torch.device,
        at_first: bool = False, zeros: Collection[tuple[int, str]] = (),
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.settings, self.counts, self.seed, self.at_first, self.zeros = settings, counts, seed, at_first, zeros
        self.update = 0
        self._gradient = reference.MeanGradient()
        self._before: reference.Weights = {}
        self._newest: reference.Weights = {}
        self._norm_before = 0.0
        self._added = Collected()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module: Any = self.lightning_module
        self.network = cast(Any, network_in(module))
        problems_of_layers(
            self.network, module.example_input_array, name_in_steps(module), self.settings.num_stages
        )  # finds them
        units = pipeline_units(self.network)
        materialize(units, range(len(units)), self.seed, torch.device("cpu"))
        super().setup(trainer)
        name_parameters(self.optimizers[0], {p: name for name, p in self.network.named_parameters()})
        self.hooks = UserHooks.of(module, forward_context=self.precision_plugin.forward_context)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.schedules = self._schedules(units)
        self._collect_losses()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _collect_losses(self) -> None:
        """Keep the losses that layers add from the step, which may add them itself in a plain training."""
        collection = collecting()

        def begin(*_: Any) -> None:
            self._added = collection.__enter__()

        self.network.register_forward_pre_hook(begin)
        self.network.register_forward_hook(lambda *_: collection.__exit__())

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
            loss = loss / weights[-1] if self.hooks.loss_reduction == "sum" else loss
            return loss + self._added.total_loss() if not self.at_first else loss

        self._gradient = self._gradient_of(batch, step)
        output = BatchOutput(results, weights)
        loss = or_nan(output.mean_loss(self.hooks.loss_reduction), self.root_device)
        return {**output.beside_loss(), "loss": loss}

    def _gradient_of(self, batch: Any, step: Callable[[Any], Tensor]) -> reference.MeanGradient:
        """Return the gradient of a batch, of which every microbatch runs on the weights that the rule gives it."""
        parts = self.settings.micro_batches
        is_whole = self.at_first and parts == 1
        slots = [batch] if is_whole else self.hooks.split_batch(batch, parts)
        if not (self.at_first and self._newest):
            self._newest = reference.values_of(self.schedules if self.at_first or self.settings.delay else ())
        for parameter in self.parameters:
            parameter.grad = None  # of the update before
        gradient = reference.gradient_of(
            self.network, {p: p for p in self.parameters}, step, slots, self._go_to, self.hooks.micro_batch_weight,
            self.seed, self.update * parts,
        )  # fmt: skip
        reference.load(self._newest)
        for name, parameter in cast(Any, self.lightning_module).named_parameters():
            if (self.update, name) in self.zeros:
                gradient.sums.setdefault(parameter, torch.zeros_like(parameter))
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
            rules = {p: self.schedules[p].stage_rule for p in self.parameters}
            parts = self.settings.micro_batches
            set_delay({p: 0.0 if r.in_start(self.update) else r.staleness(parts) for p, r in rules.items()})
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._norm_before = self._gradient.norm(self.parameters)
        reference.update_buffers(self.network, self._gradient.counts)
        self._before = self._newest
        self.update += 1
        return result

    def drain(self) -> None:
        """Do nothing: every update is applied at once."""

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the gradient as hooks left it; where a stage steps before that is known, by the last."""
        norm = self._gradient.norm(self.parameters)  # which rounds as a pipeline does
        raw = [g for p in self.parameters if (g := self._gradient.mean(p, 0.0, None)) is not None]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(raw) != len(grads) or not all(map(torch.equal, raw, grads)):
            norm = math.sqrt(sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in grads))
        for p in self.parameters:
            clip_by_norm([p], self._norm_before if self.schedules[p].steps_ahead(self.update) else norm, clip_val)
