"""A GPT whose gradients are as old as in a pipeline, computed from whole batches on a single device.

``delayed_gradient`` runs every microbatch of every stage by itself, which costs far more than the arithmetic of a small
model. Here a stage runs twice: the first samples of a batch on the weights before the newest update, the others on the
newest weights. Which samples these are is what the package's schedule says; the results differ by rounding only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp import DelayedGradientStrategy, GPTModule
from lightning_asyncpp.core.clipping import clip_by_norm, gradient_norm, norms_of
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.ties import find_ties
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.microbatch import split_batch
from lightning_asyncpp.core.schedule import StalenessRule

Wire = Literal["fp32", "bf16", "fp8", "int8"]
Layers = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DelayedStage:
    """A stage on both weight versions.

    Attributes:
        newest: the stage's layers, on the weights W_t.
        older: the same layers, on W_{t-1}.
        parameters: of ``newest``.
        rule: says which microbatches run on which version.
    """

    newest: Layers
    older: Layers
    parameters: list[Tensor]
    rule: StalenessRule

    def run(self, x: Tensor, mini_batch: int, microbatches: int) -> Tensor:
        """Run the samples ``x`` (batch, ...) of a whole mini-batch."""
        sizes = [0 if piece is None else len(piece) for piece in split_batch(x.detach(), microbatches)]
        num_stale = sum(size for i, size in enumerate(sizes) if self.rule.version(mini_batch, i) < mini_batch)
        parts = [self.older(x[:num_stale])] if num_stale else []
        return torch.cat([*parts, self.newest(x[num_stale:])]) if num_stale < len(x) else parts[0]


class DelayedGPT:
    """The stages of a GPT and of its copy, which holds the weights before the newest update.

    Args:
        model: the GPT, which holds the newest weights.
        pipeline: arguments of ``DelayedGradientStrategy``.
        wire: what activations and their gradients are rounded to between stages; see :func:`rounded`.

    Attributes:
        stages: the stages, in order.
        parts: the parameters by the set of stages that have them.
    """

    def __init__(self, model: nn.Module, pipeline: Mapping[str, Any], wire: Wire = "fp32") -> None:
        strategy = DelayedGradientStrategy(**pipeline)
        self.settings = strategy.session.settings.resolved(strategy.stages_in_process or 1)
        self.wire = wire
        self.versions = model, copy.deepcopy(model)
        counts = choose_partition(model, 0, self.settings.num_stages, self.settings.partition).counts
        units = pipeline_units(model)
        linked = {stage: tie.stages[0] for tie in find_ties(units, counts) for stage in tie.stages}
        self.stages: list[DelayedStage] = []
        for stage, count in enumerate(counts):
            begin = sum(counts[:stage])
            newest, older = (
                nn.Sequential(*(unit.module for unit in pipeline_units(version)[begin : begin + count]))
                for version in self.versions
            )
            rule = self.settings.schedule(stage, linked.get(stage)).stage_rule
            self.stages.append(DelayedStage(newest, older, list(newest.parameters()), rule))
        owned = [set(stage.parameters) for stage in self.stages]
        parts: dict[tuple[int, ...], list[Tensor]] = {}
        for p in model.parameters():
            parts.setdefault(tuple(stage for stage, own in enumerate(owned) if p in own), []).append(p)
        self.parts = [*parts.values()]

    def __call__(self, x: Tensor, mini_batch: int) -> Tensor:
        """Return the model's output for the samples ``x`` (batch, ...) of a whole mini-batch."""
        for stage in self.stages:
            x = rounded(x, self.wire) if stage is not self.stages[0] else x
            x = stage.run(x, mini_batch, self.settings.microbatches)
        return x

    def delays(self, mini_batch: int) -> dict[Tensor, float]:
        """Return the age of each parameter's gradient, in updates; of a shared parameter, that on its first stage."""
        found: dict[Tensor, float] = {}
        for stage in self.stages:
            staleness = stage.rule.staleness_of(mini_batch, self.settings.microbatches)
            found = dict.fromkeys(stage.parameters, staleness) | found
        return found

    def steps_ahead(self, mini_batch: int) -> bool:
        """Return whether stages clip this mini-batch's gradient before they know its whole norm."""
        return self.settings.schedule(0).steps_ahead(mini_batch)

    @torch.no_grad()
    def before_update(self) -> None:
        """Add the gradients at the older weights to the others, and keep the newest weights as the older ones."""
        for new, old in zip(*(version.parameters() for version in self.versions)):
            if old.grad is not None:
                new.grad = old.grad if new.grad is None else new.grad.add_(old.grad)
                old.grad = None
            old.copy_(new)


class _At(nn.Module):
    """Stand-in for the model while a mini-batch runs, without parameters of its own."""

    def __init__(self, delayed: DelayedGPT, mini_batch: int) -> None:
        super().__init__()
        self._call = delayed, mini_batch

    def forward(self, x: Tensor) -> Tensor:
        delayed, mini_batch = self._call
        return delayed(x, mini_batch)


class _Rounded(torch.autograd.Function):
    """Rounding in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return _round(x, wire)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _round(gradients[0], ctx.wire), None


def rounded(x: Tensor, wire: Wire) -> Tensor:
    """Round activations ``x`` (..., dim), and in the backward their gradient, as if they were sent in fewer bits.

    ``fp8`` (e4m3) and ``int8`` have a scale for each vector of length dim: its largest absolute value.
    """
    result: Tensor = x if wire == "fp32" else _Rounded.apply(x, wire)
    return result


def _round(x: Tensor, wire: Wire) -> Tensor:
    if wire == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    largest = 448.0 if wire == "fp8" else 127.0
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    scaled = x / scale
    return (scaled.to(torch.float8_e4m3fn).to(x.dtype) if wire == "fp8" else scaled.round()) * scale


class DelayedGPTModule(GPTModule):
    """``GPTModule`` for Lightning's own strategy on a single device, with gradients as old as in a pipeline.

    For dense models without dropout, without gradient accumulation, and clipped by norm or not at all.

    Args:
        pipeline: arguments of ``DelayedGradientStrategy``; and ``end``: from this update on no gradient is old, as in
            a training that is resumed under ``sync_pipeline``.
        wire: what activations and their gradients are rounded to between stages: ``fp32`` (not at all), ``bf16``,
            ``fp8`` or ``int8``.
        norm: norm that gradients are clipped by: as in a pipeline with this ``schedule``; always that of the
            ``previous`` gradient; or always the ``larger`` one of it and of the stage's own part of this gradient.
        kwargs: arguments of ``GPTModule``.
    """

    def __init__(
        self,
        pipeline: dict[str, Any] | None = None,
        wire: Wire = "fp32",
        norm: Literal["schedule", "previous", "larger"] = "schedule",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.config.moe is not None:
            raise ValueError("config.moe: experts are counted per microbatch, so they need strategy='delayed_gradient'")
        self.pipeline, self.wire, self.norm = dict(pipeline or {}), wire, norm
        self.end = self.pipeline.pop("end", math.inf)
        self._norm_before = 0.0
        self._delayed: list[DelayedGPT] = []  # in a list, so that the copy is no part of the module

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Cut the model and copy it, at the start and where the delay ends."""
        update = self.trainer.global_step
        if update not in (0, self.end):
            return
        assert self.model is not None
        pipeline = self.pipeline if update < self.end else {"delay": 0}
        self._delayed = [DelayedGPT(self.model, pipeline, self.wire)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return and log the mean loss of ``batch`` (batch, time + 1), in nats per target."""
        (delayed,), model, update = self._delayed, self.model, self.trainer.global_step
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        if hasattr(optimizer, "set_delay"):
            optimizer.set_delay(delayed.delays(update))
        try:
            self.model = _At(delayed, update)
            return super().training_step(batch, batch_idx)
        finally:
            self.model = model

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Complete the gradients, and keep the weights before the update."""
        self._delayed[0].before_update()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer | LightningOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of this gradient, or as ``norm`` says."""
        (delayed,), update = self._delayed, self.trainer.global_step
        whole = _norm_of(self.parameters())
        is_ahead = delayed.steps_ahead(update) or (self.norm != "schedule" and update > 0)
        if gradient_clip_val:
            for part in delayed.parts:
                own = _norm_of(part) if self.norm != "previous" else 0.0
                clip_by_norm(part, max(self._norm_before, own) if is_ahead else whole, gradient_clip_val)
        self._norm_before = whole


def _norm_of(parameters: Iterable[Tensor]) -> float:
    norms = norms_of([p.grad for p in parameters if p.grad is not None])
    return float(gradient_norm(sum(norm.square() for norm in norms), 1.0))
