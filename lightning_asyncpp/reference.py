"""The reference: what a pipeline computes, in one process, written as plainly as possible.

A pipeline whose result differs from this one is wrong. How it computes is written here a second time: in which order,
on which weights, and how gradients are summed, clipped and applied. With the engine it shares the derivation of seeds
and the user's side: what a unit is (``pipeline_units``), what a piece of a batch is and what it weighs
(``split_batch``, ``number_of_samples``), and what layers say of themselves (``collecting``). These tell what is to be
computed, so no mistake in how a pipeline computes it can hide in them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.auxiliary import Collected, StatisticsLayer, collecting
from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.own_forward import cut_of
from lightning_asyncpp.core.cut.units import entering_units, pipeline_units
from lightning_asyncpp.core.microbatch import number_of_samples, split_batch
from lightning_asyncpp.core.randomness import generator_states, seed_generators, set_generator_states

Weights = dict[Tensor, Tensor]  # parameter or buffer -> its value
K = TypeVar("K")
Held = tuple[Sequence[nn.Parameter], int]  # parameters of a stage; how many microbatches it holds back


def train_reference(
    model: nn.Module,
    step: Callable[[Any], Tensor],
    mini_batches: Iterable[Sequence[Any]],
    optimizer: Optimizer,
    *,
    microbatches: int,
    delay: int = 1,
    max_norm: float | None = None,
    error_feedback: float | None = None,
    after_update: Callable[[], None] | None = None,
    weight: Callable[[Any], float] = number_of_samples,
    split: Callable[[Any, int], list[Any]] = split_batch,
    skip_nonfinite: bool = False,
    held: Sequence[Held] = (),
    exact_norm: bool = False,
    replicas: int = 1,
    synchronous_start: int = 0,
    weight_dtype: torch.dtype | None = None,
    seed: int = 0,
    first_microbatch: int = 0,
) -> list[float]:
    """Train ``model`` in place by the rule W_{t+1} = W_t - U(g_t), with g_t taken at W_{max(t - delay, 0)}.

    With a synchronous start of N mini-batches: at W_t for t < N, then at W_{max(t - delay, N)}. Of a stage in ``held``
    only the first h microbatches are taken there, the others at W_t. What layers add to the loss is added to it,
    and buffers that they change once per update are part of W.

    Args:
        model: an ``nn.Sequential`` or a module with ``pipeline_layers()``. Of a parameter that several of its units
            share the gradients of each are summed apart before they are added, the last unit's first.
        step: microbatch -> loss, a mean over the microbatch; it calls ``model`` once.
        mini_batches: each a list of batches that share one update: one batch, or several with gradient accumulation.
        optimizer: over the parameters of ``model``; the base optimizer if ``error_feedback`` is given.
        microbatches: pieces that every batch is cut into.
        delay: 1 for PipeDream-2BW, 0 for synchronous training.
        max_norm: clip the gradient's 2-norm to this.
        error_feedback: strength; W_{t+1} = W_t - (u_t + strength * (u_t - u_{t-1})), u_t the base optimizer's step.
            Of a stage in ``held``, strength * phi, with phi the share of the microbatches that it holds back.
        after_update: called after every update, for schedulers.
        weight: microbatch -> its weight in the mean loss.
        split: (batch, parts) -> its microbatches.
        skip_nonfinite: leave weights and optimizer alone where a gradient is not finite.
        held: parameters of a stage, and h. They are clipped by the norm of the whole gradient one mini-batch earlier
            (not at all before there is one), and not corrected where h is 0.
        replicas: of how many a mini-batch lists the batches, one after the other; each holds back by its own count.
        exact_norm: they are clipped by the norm of the whole gradient, like all others.
        synchronous_start: N; error feedback begins with update N, which is the first that is not corrected.
        weight_dtype: of the weights W that gradients are taken at, with the optimizer's parameters as masters Y beside
            them: W_t is Y_t rounded, and with error feedback W_{t+1} = Y_{t+1} - strength * u_t, where strength * u_0
            was added to Y once, after the first update. Gradients are summed in the dtype of the masters, with which
            the model ends.
        seed: the run's seed; replica 0's random numbers are drawn.
        first_microbatch: k of the first microbatch.

    Returns:
        The weighted mean loss of every mini-batch, without microbatches where it is NaN if others have a number.
    """
    run = Trajectory(model, delay, held, exact_norm, synchronous_start, weight_dtype)
    losses = []
    k = first_microbatch
    for batches in mini_batches:
        slots = [piece for batch in batches for piece in split(batch, microbatches)]
        places = [_place(i, microbatches, replicas) for i in range(len(slots))]
        go_to = functools.partial(run.go_to, places)
        gradient = gradient_of(model, run.masters, step, slots, go_to, weight, seed, k)
        losses.append(gradient.mean_loss())
        k += len(slots)
        load(run.newest | run.masters)
        if gradient.is_usable(skip_nonfinite):
            run.update(optimizer, gradient, max_norm, error_feedback, len(slots) // replicas)
        else:
            run.stay()
        if after_update is not None:
            after_update()
    return losses


@dataclass
class MeanGradient:
    """Sums over the microbatches k of a mini-batch, in order.

    Attributes:
        sums: parameter -> sum of w_k * gradient_k; parameters that were not used lack.
        sums_of_uses: the same apart for every unit that has a parameter, by a number.
        losses: (loss_k, w_k).
        weight: sum of w_k.
        counts: what layers counted.
    """

    sums: Weights = field(default_factory=dict)
    sums_of_uses: dict[int, Tensor] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    weight: float = 0.0
    counts: Collected = field(default_factory=Collected)

    def mean_loss(self) -> float:
        """Weighted mean of the losses that are numbers."""
        numbers = [(loss, w) for loss, w in self.losses if not math.isnan(loss)]
        return sum(w * loss for loss, w in numbers) / sum(w for _, w in numbers) if numbers else math.nan

    def is_usable(self, skip_nonfinite: bool) -> bool:
        """Return whether the mini-batch ends with an update."""
        finite = all(bool(torch.isfinite(g).all()) for g in self.sums.values())
        if not finite and not skip_nonfinite:
            raise FloatingPointError("a gradient is not finite")
        return finite and self.weight > 0

    def norm(self, parameters: Iterable[Tensor]) -> float:
        """2-norm of the mean gradient of some parameters."""
        used = [self.sums[p] for p in parameters if p in self.sums]
        squares = sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in used)
        return float(torch.tensor(math.sqrt(squares) / self.weight if used else 0.0, dtype=torch.float32))

    def mean(self, parameter: Tensor, norm: float, max_norm: float | None) -> Tensor | None:
        """The mean gradient of a parameter, clipped where ``norm`` is too large."""
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        return (self.sums[parameter] / self.weight) * clip if parameter in self.sums else None


class Trajectory:
    """W_{t-1} and W_t, and what the gradient of mini-batch t is taken at and clipped by.

    Args:
        model, delay, held, exact_norm, synchronous_start: as for :func:`train_reference`.
        dtype: its ``weight_dtype``.
    """

    def __init__(
        self,
        model: nn.Module,
        delay: int = 1,
        held: Sequence[Held] = (),
        exact_norm: bool = False,
        synchronous_start: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.delay, self.exact_norm, self.start, self.dtype = (
            model, delay, exact_norm, synchronous_start, dtype
        )  # fmt: skip
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.buffers = versioned_buffers(model)
        self.t = 0
        self.take()
        self.before = self.newest
        numbers: dict[Tensor, int] = {p: h for parameters, h in held for p in parameters}
        self.held = {x: h for x, h in _with_buffers(model, numbers).items() if x in self.newest}
        self.step_before: Weights = {}  # u_{t-1} of what has moved
        self.norm_before = 0.0

    def take(self, ahead: Weights | None = None) -> None:
        """Take what the model holds for W_t; its parameters are masters Y_t, which without a dtype are W_t."""
        self.masters = values_of(self.parameters)
        self.newest = _rounded(self.masters | (ahead or {}), self.dtype) | values_of(self.buffers)

    def go_to(self, places: Sequence[int], slot: int) -> None:
        """Let the model hold what a microbatch is taken at, by its number within mini-batch t."""
        is_delayed = self.delay > 0 and self.t > self.start
        newest = {tensor: self.newest[tensor] for tensor, h in self.held.items() if places[slot] >= h}
        load((self.before if is_delayed else self.newest) | newest)

    def stay(self) -> None:
        """W_{t+1} = W_t."""
        self.before = self.newest
        self.t += 1

    def staleness(self, parameter: Tensor, count: int) -> float:
        """Return the mean age phi of a gradient of ``count`` microbatches, in updates: the share that is held back."""
        return self.delay * min(self.held.get(parameter, count) / count, 1.0) if self.t >= self.start else 0.0

    def norm_for(self, parameter: Tensor, norm: float) -> float:
        """Return the norm by which a parameter's gradient is clipped, given the norm of the whole gradient."""
        steps_ahead = self.t >= self.start and parameter in self.held and not self.exact_norm
        return self.norm_before if steps_ahead else norm

    def update(
        self, optimizer: Optimizer, gradient: MeanGradient, max_norm: float | None, strength: float | None, count: int
    ) -> None:
        """Step the optimizer from W_t to W_{t+1}."""
        norm = gradient.norm(self.parameters)
        for p in self.parameters:
            p.grad = gradient.mean(p, self.norm_for(p, norm), max_norm)
        self.norm_before = norm
        moved = {p for p in self.parameters if p.grad is not None or p in self.step_before}
        optimizer.step()
        optimizer.zero_grad()
        ahead: Weights = {}
        if strength is not None and self.t >= self.start:
            step = {p: self.masters[p] - p.detach() for p in moved if self.held.get(p) != 0}  # u_t
            strengths = {p: strength * self.staleness(p, count) for p in step}
            ahead = (_feed_back if self.dtype is None else _look_ahead)(step, self.step_before, strengths)
            self.step_before = step
        update_buffers(self.model, gradient.counts)
        self.stay()
        self.take(ahead)


@torch.no_grad()
def update_buffers(model: nn.Module, counts: Collected) -> None:
    """Let layers learn from what they counted in a mini-batch."""
    for layer in (layer for layer in model.modules() if isinstance(layer, StatisticsLayer)):
        buffers = {name: getattr(layer, name) for name in layer.versioned_buffers}
        nothing = torch.zeros(layer.num_statistics, dtype=torch.float64)
        layer.update_from_statistics(counts.statistics.get(layer, nothing).cpu())
        for name, buffer in buffers.items():  # a layer may have put another tensor in its place
            buffer.data = getattr(layer, name).detach().clone()
            setattr(layer, name, buffer)


def gradient_of(
    model: nn.Module,
    masters: Weights,
    step: Callable[[Any], Tensor],
    slots: Sequence[Any],
    go_to: Callable[[int], None],
    weight: Callable[[Any], float],
    seed: int,
    first: int,
    found: MeanGradient | None = None,
) -> MeanGradient:
    """Run microbatches, numbered from ``first``, forward and backward; gradients are summed in the masters' dtype.

    Before number i of them, ``go_to(i)`` puts the weights in place. They are added to what was ``found`` of the same
    mini-batch.
    """
    found = found or MeanGradient()
    with uses_apart(model) as further_uses:
        uses = [*((p, p) for p in masters), *further_uses]
        for k, microbatch in enumerate(slots, first):
            w = 0.0 if microbatch is None else float(weight(microbatch))
            if w:
                go_to(k - first)
                for parameter, leaf in further_uses:
                    leaf.data.copy_(parameter.data)
                with _derived_randomness(model, seed, k), collecting() as said:
                    loss = step(microbatch)
                ((loss + said.total_loss()) * w).backward()
                found.weight += w
                found.losses.append((loss.item(), w))
                for layer, counts in said.statistics.items():
                    found.counts.add(layer, counts)
                for use, (parameter, leaf) in enumerate(uses):
                    if leaf.grad is not None:
                        _add(found.sums_of_uses, use, leaf.grad.to(masters[parameter].dtype))
                    leaf.grad = None
    found.sums = {}
    for use, (parameter, _) in reversed([*enumerate(uses)]):
        if use in found.sums_of_uses:
            _add(found.sums, parameter, found.sums_of_uses[use])
    return found


def _place(slot: int, microbatches: int, replicas: int) -> int:
    """Number of a microbatch among those of its replica."""
    batch, within = divmod(slot, microbatches)
    return batch // replicas * microbatches + within


def _add(sums: dict[K, Tensor], key: K, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


@contextmanager
def uses_apart(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Give a unit that shares a trainable parameter with one before it a copy of its own; yields (parameter, copy).

    A module that is part of several units has in each what is that unit's own, and one outside of them what is the
    last unit's that has run or runs.
    """
    units = pipeline_units(model)
    inside = {module for unit in units for module in unit.module.modules()}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    copies: list[tuple[Tensor, Tensor]] = []
    now: dict[Tensor, nn.Parameter] = {}
    turns: list[list[tuple[nn.Module, str, nn.Parameter]]] = []
    for unit in units:
        for parameter in unit.module.parameters():
            if parameter in now and parameter.requires_grad:
                now[parameter] = nn.Parameter(parameter.detach().clone())
                copies.append((parameter, now[parameter]))
            else:
                now[parameter] = parameter
        own = set(unit.module.modules())
        means_it = own.__contains__ if cut_of(model) is None else (lambda _: True)
        turns.append([(m, name, now.get(p, p)) for m, name, p in places if means_it(m) or m not in inside])

    def take_turn(number: int) -> None:
        for module, name, parameter in turns[number]:
            setattr(module, name, parameter)

    if not copies:
        yield copies
        return
    try:
        with entering_units(model, take_turn):
            yield copies
    finally:
        for module, name, original in places:
            setattr(module, name, original)


@contextmanager
def _derived_randomness(model: nn.Module, seed: int, k: int) -> Iterator[None]:
    """Seed the step from k, every unit from (unit, k), and go on with the step's own generator after the model."""
    state: list[tuple[Tensor, Tensor | None]] = []
    device, called = next(model.parameters()).device, called_by_steps(model)
    before = called.register_forward_pre_hook(lambda *_: state.append(generator_states(device)))
    after = called.register_forward_hook(lambda *_: set_generator_states(state.pop(), device))
    outside = generator_states(device)
    seed_generators(seed, device, "train", 0, k)
    try:
        with entering_units(model, lambda number: seed_generators(seed, device, "layer", number, 0, k)):
            yield
    finally:
        set_generator_states(outside, device)
        before.remove()
        after.remove()


@torch.no_grad()
def _feed_back(step: Weights, before: Weights, strengths: dict[Tensor, float]) -> Weights:
    """Correct the steps just taken; at the first of a parameter there is nothing to compare with."""
    for p in step.keys() & before.keys():
        p.sub_(step[p] - before[p], alpha=strengths[p])
    return {}


@torch.no_grad()
def _look_ahead(step: Weights, before: Weights, strengths: dict[Tensor, float]) -> Weights:
    """The same with masters Y in the parameters: W_{t+1} = Y_{t+1} - strength * u_t, after Y_1 += strength * u_0."""
    for p in step.keys() - before.keys():
        p.add_(step[p], alpha=strengths[p])
    return {p: torch.sub(p.detach(), u, alpha=strengths[p]) for p, u in step.items()}


def _with_buffers(model: nn.Module, held: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """Parameters, and the buffers that the units which hold some of them change, each with its h."""
    found = dict(held)
    for unit in pipeline_units(model):
        numbers = [held[p] for p in unit.module.parameters() if p in held]
        if numbers:
            found |= dict.fromkeys(versioned_buffers(unit.module), numbers[0])
    return found


def versioned_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that layers change once per update: they are part of W."""
    layers = [layer for layer in model.modules() if isinstance(layer, StatisticsLayer)]
    return [getattr(layer, name) for layer in layers for name in layer.versioned_buffers]


def values_of(tensors: Iterable[Tensor]) -> Weights:
    """Copies of tensors."""
    return {tensor: tensor.detach().clone() for tensor in tensors}


def load(values: Weights) -> None:
    """Give tensors these values."""
    for tensor, value in values.items():
        tensor.data = value.clone()


def _rounded(values: Weights, dtype: torch.dtype | None) -> Weights:
    return values if dtype is None else {tensor: value.to(dtype) for tensor, value in values.items()}
