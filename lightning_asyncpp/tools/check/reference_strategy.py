"""Strategy with which a real Trainer trains a whole module as the reference does, microbatch by microbatch.

:mod:`lightning_asyncpp.reference` computes the gradient. The Trainer does the rest: it accumulates, clips, calls hooks,
and steps the schedulers and the optimizer (for all parameters at once).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.core.clipping import clip_by_norm
from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.network import called_by_steps, name_in_steps, network_in
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.microbatch import BatchOutput, UserHooks, loss_of, or_nan
from lightning_asyncpp.core.randomness import seeded
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.stage_optimizer import name_parameters
from lightning_asyncpp.reference import MeanGradient, Trajectory, gradient_of, load, update_buffers
from lightning_asyncpp.trainer.private import begins_accumulation

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ReferenceStrategy(SingleDeviceStrategy):
    """Strategy that trains a module as the reference does, with the settings of a pipeline.

    Args:
        settings: settings of the pipeline.
        stale_counts: for each stage, the names of its parameters, and its number of microbatches per update on older
            weights.
        seed: seed of the run.
        device: device of the training.
        at_first: whether to compute every gradient on the initial weights and independently of the number of
            microbatches: with the same random numbers for every sample, without auxiliary losses, and with BatchNorm in
            evaluation mode. With one microbatch, the batch is not split.
        zeros: (update, name) of parameters that had a gradient of 0 in the pipeline and get the same here. A pipeline
            sends zeros back for values that the loss does not use, so weight decay applies. Without a pipeline these
            parameters have no gradient, and no weight decay.
        **hooks: attributes of :class:`UserHooks` that replace the module's.
    """

    applies_statistics = materializes_stages = True

    def __init__(
        self, settings: ResolvedSettings, stale_counts: Sequence[tuple[Collection[str], int]], seed: int,
        device: torch.device, at_first: bool = False, zeros: Collection[tuple[int, str]] = (), **hooks: Any,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.settings, self.stale_counts, self.seed = settings, stale_counts, seed
        self.at_first, self.zeros = at_first, zeros
        self.hooks: Any = hooks
        self.done = self.place = 0  # microbatches so far, in the run and in the current update
        self.draws = SameDraws()
        self._gradient = MeanGradient()
        self._added = Collected()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module, settings = cast(L.LightningModule, self.lightning_module), self.settings
        self.network = cast(Any, network_in(module))
        problems_of_layers(self.network, module.example_input_array, name_in_steps(module), settings.num_stages)
        units = pipeline_units(self.network)  # problems_of_layers() has prepared the network
        materialize(units, range(len(units)), self.seed, torch.device("cpu"))
        super().setup(trainer)
        name_parameters(self.optimizers[0], {p: name for name, p in self.network.named_parameters()})
        self.hooks = replace(UserHooks.of(module), **self.hooks)
        stale_counts = [([self.network.get_parameter(name) for name in names], h) for names, h in self.stale_counts]
        exact_norm = settings.schedule(0).agrees_first
        self.run = Trajectory(self.network, settings.delay, stale_counts, exact_norm, settings.synchronous_start)
        for layer in module.modules() if self.at_first else ():
            if isinstance(layer, BATCH_NORMS):
                layer.eval()
        # In plain training the module's step may add auxiliary losses itself. Here this strategy's training_step() adds
        # them, so the module's must not see them.
        collection, called = collecting(), called_by_steps(self.network)
        called.register_forward_pre_hook(lambda *_: setattr(self, "_added", collection.__enter__()))
        called.register_forward_hook(lambda *_: collection.__exit__())
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        results, weights = [], []

        def step(microbatch: Any) -> Tensor:
            result = super(ReferenceStrategy, self).training_step(microbatch, *args, **kwargs)
            results.append(result)
            weights.append(float(self.hooks.microbatch_weight(microbatch)))
            loss = loss_of(result)
            loss = loss / weights[-1] if self.hooks.loss_reduction == "sum" else loss
            return loss + self._added.total_loss() if not self.at_first else loss

        self._add_gradient_of(batch, step)
        output = BatchOutput(results, weights)
        loss = or_nan(output.mean_loss(self.hooks.loss_reduction), self.root_device)
        return {**output.extras(), "loss": loss}

    def _add_gradient_of(self, batch: Any, step: Callable[[Any], Tensor]) -> None:
        """Add the gradient of a batch, each microbatch on the weights that the staleness rule assigns to it."""
        module, parts = cast(L.LightningModule, self.lightning_module), self.settings.microbatches
        if begins_accumulation(module.trainer):
            self._gradient, self.place = MeanGradient(), 0
        if not self.at_first:
            self.run.record_weights()  # hooks may have changed weights
        for parameter in self.run.parameters:
            parameter.grad = None  # the gradient of the previous update
        slots = [batch] if self.at_first and parts == 1 else self.hooks.split_batch(batch, parts)
        with self.draws if self.at_first else nullcontext():
            gradient_of(
                self.network, {p: p for p in self.run.parameters}, step, slots,
                partial(self.run.go_to, range(self.place, self.place + parts)), self.hooks.microbatch_weight,
                self.seed, self.done, self._gradient,
            )  # fmt: skip
        load(self.run.newest)
        sums, optimized = self._gradient.sums, {p for group in self.optimizers[0].param_groups for p in group["params"]}
        self._gradient.sums = {p: gradient for p, gradient in sums.items() if p in optimized}
        self.done, self.place = self.done + parts, self.place + parts
        for name, parameter in module.named_parameters():
            if (self.run.t, name) in self.zeros:
                self._gradient.sums.setdefault(parameter, torch.zeros_like(parameter))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = cast(L.LightningModule, self.lightning_module)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, mean in self._gradient.means(self.run.parameters).items():
            parameter.grad = mean
        if callable(set_delay := getattr(self.optimizers[0], "set_delay", None)):
            set_delay({p: self.run.staleness(p, self.place) for p in self.run.parameters})
        return self.precision_plugin.post_backward(closure_loss, module)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.run.norm_before = self._gradient.norm(self.run.parameters)
        update_buffers(self.network, self._gradient.counts)
        self.run.next_mini_batch()
        return result

    def drain(self) -> None:
        """Do nothing, since every update is applied at once."""

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the gradient as the user's hooks have left it."""
        norm = self._gradient.norm(self.run.parameters)  # rounded as in a pipeline
        grads = {p: p.grad for p in self.run.parameters if p.grad is not None}
        raw = self._gradient.means(self.run.parameters)
        if raw.keys() != grads.keys() or not all(torch.equal(raw[p], grads[p]) for p in grads):
            norm = math.sqrt(sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in grads.values()))
        for p, of_p in self.run.norms(self._gradient, norm).items():
            clip_by_norm([p], of_p, clip_val)


class SameDraws(TorchDispatchMode):
    """Mode in which every random tensor is filled with one fixed number, and dropout drops nothing."""

    eps = 0.0  # largest machine epsilon of the results' dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "native_dropout":
            return args[0] / (1.0 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        draws = torch.Tag.nondeterministic_seeded in func.tags and name != "randperm"
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device(kwargs.get("device") or "cpu"))
        with seeded(0, device) if draws else nullcontext():
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and draws and result.numel():
            result.fill_(1 if name.startswith("bernoulli") else result.flatten()[0])
        if isinstance(result, Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result
