"""Reference implementation: the computation of a pipeline, in one process, written as plainly as possible.

A pipeline whose result differs from this one is wrong. This module is independent of the engine in everything that a
pipeline decides: the order of microbatches, their weight versions, and how gradients are summed, clipped and applied.
It shares with the engine only what defines the task: the units of a model (its parts between two possible cuts,
``pipeline_units``), the microbatches of a batch and their weights (``split_batch``, ``number_of_samples``), what layers
record (``collecting``), and the derivation of seeds.
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
StaleCount = tuple[Sequence[nn.Parameter], int]
"""A stage's parameters, and its number h of microbatches on older weights."""


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
    stale_counts: Sequence[StaleCount] = (),
    exact_norm: bool = False,
    replicas: int = 1,
    synchronous_start: int = 0,
    weight_dtype: torch.dtype | None = None,
    seed: int = 0,
    first_microbatch: int = 0,
) -> list[float]:
    """Train ``model`` in place: W_{t+1} = W_t - U(g_t), with optimizer U and the gradient g_t at W_{max(t - delay, 0)}.

    W_t are the weights before update t. With a synchronous start of N mini-batches, the first N gradients are taken at
    W_t, later ones at W_{max(t - delay, N)}. On a stage that ``stale_counts`` lists, only the first h microbatches of a
    mini-batch run on the weights of this rule, and the later ones on W_t. Auxiliary losses of layers are added to the
    loss. Buffers that layers change once per update are part of W.

    Args:
        model: ``nn.Sequential``, or module with ``pipeline_layers()``. If several units share a parameter, the
            gradients of each unit are summed separately, then added, beginning with the last unit.
        step: microbatch -> loss, a mean over the microbatch; calls ``model`` once.
        mini_batches: for each update, a list of its batches: a single one, or several with gradient accumulation.
        optimizer: optimizer of the parameters of ``model``; the base optimizer if ``error_feedback`` is given.
        microbatches: number of microbatches of a batch.
        delay: 1 for PipeDream-2BW, 0 for synchronous training.
        max_norm: largest 2-norm of the gradient; a larger gradient is scaled down to it.
        error_feedback: strength in W_{t+1} = W_t - (u_t + strength * (u_t - u_{t-1})), where u_t is the base
            optimizer's step. On a stage in ``stale_counts``, the strength is multiplied by phi, the share of
            microbatches that run on the older weights.
        after_update: function called after every update, for schedulers.
        weight: microbatch -> its weight in the mean loss.
        split: (batch, number of microbatches) -> microbatches.
        skip_nonfinite: skip updates whose gradient is not finite, instead of raising.
        stale_counts: for each listed stage, its parameters and h; a shared parameter is listed on each of its stages.
            From mini-batch N on, the parameters that are on the same listed stages are a part of the gradient that is
            clipped by the larger one of its own norm and the norm of the previous mini-batch's whole gradient (0 in the
            first mini-batch). Error feedback does not correct listed stages with h = 0.
        replicas: number of replicas R. A mini-batch lists its batches in groups of R, one batch per replica. Every
            replica runs h microbatches on the older weights.
        exact_norm: clip the gradients of ``stale_counts``, too, by the norm of the current mini-batch's whole gradient.
        synchronous_start: number N of mini-batches without delay. Error feedback takes its first u at update N, and
            corrects from update N + 1 on.
        weight_dtype: dtype of the weights W. The optimizer's parameters are then masters Y, and W_t is Y_t rounded.
            With error feedback, W_{t+1} = Y_{t+1} - strength * u_t, and strength * u_0 is added to Y once, after the
            first update, so that W_1 = W_0 - u_0. Gradients are summed in the masters' dtype. At the end the model
            holds the masters.
        seed: seed of the run; random numbers are those of replica 0.
        first_microbatch: number k of the first microbatch.

    Returns:
        Weighted mean loss of each mini-batch, without losses that are NaN; NaN if all are.
    """
    run = Trajectory(model, delay, stale_counts, exact_norm, synchronous_start, weight_dtype)
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
            run.next_mini_batch()
        if after_update is not None:
            after_update()
    return losses


@dataclass
class MeanGradient:
    """Sums over the microbatches k of a mini-batch, with weights w_k in the mean loss, in the order of k.

    Attributes:
        sums: parameter -> sum of w_k * gradient_k; unused parameters are absent.
        sums_of_uses: index of a use (a parameter within one unit) -> the same sum, over this use only.
        losses: (loss_k, w_k).
        weight: sum of w_k.
        counts: statistics of layers.
    """

    sums: Weights = field(default_factory=dict)
    sums_of_uses: dict[int, Tensor] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    weight: float = 0.0
    counts: Collected = field(default_factory=Collected)

    def mean_loss(self) -> float:
        """Return the weighted mean of the losses that are not NaN."""
        numbers = [(loss, w) for loss, w in self.losses if not math.isnan(loss)]
        return sum(w * loss for loss, w in numbers) / sum(w for _, w in numbers) if numbers else math.nan

    def is_usable(self, skip_nonfinite: bool) -> bool:
        """Return whether an update follows the mini-batch; raise if a gradient is not finite and may not be skipped."""
        finite = all(bool(torch.isfinite(g).all()) for g in self.sums.values())
        if not finite and not skip_nonfinite:
            raise FloatingPointError("a gradient is not finite")
        return finite and self.weight > 0

    def norm(self, parameters: Iterable[Tensor]) -> float:
        """Return the 2-norm of the mean gradient of some parameters."""
        used = [self.sums[p] for p in parameters if p in self.sums]
        squares = sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in used)
        return float(torch.tensor(math.sqrt(squares) / self.weight if used else 0.0, dtype=torch.float32))

    def means(self, parameters: Iterable[Tensor]) -> Weights:
        """Return the mean gradients of those parameters that have one."""
        return {p: self.sums[p] / self.weight for p in parameters if p in self.sums}


class Trajectory:
    """Weight versions W_{t-1} and W_t, and the choice between them for each microbatch of mini-batch t.

    Args:
        model, delay, stale_counts, exact_norm, synchronous_start: see :func:`train_reference`.
        dtype: ``weight_dtype`` of :func:`train_reference`.
    """

    def __init__(
        self,
        model: nn.Module,
        delay: int = 1,
        stale_counts: Sequence[StaleCount] = (),
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
        self.record_weights()
        self.before = self.newest
        numbers: dict[Tensor, int] = {p: h for parameters, h in stale_counts for p in parameters}
        owned = [set(parameters) for parameters, _ in stale_counts]
        self.stages = {p: tuple(stage for stage, own in enumerate(owned) if p in own) for p in numbers}
        self.num_stale = {x: h for x, h in _with_buffers(model, numbers).items() if x in self.newest}
        self.step_before: Weights = {}  # u_{t-1} of parameters that have been updated
        self.norm_before = 0.0

    def record_weights(self, ahead: Weights | None = None) -> None:
        """Copy W_t from the model; with ``dtype``, W_t is rounded from ``ahead`` where given, else from masters Y_t."""
        self.masters = values_of(self.parameters)
        self.newest = _rounded(self.masters | (ahead or {}), self.dtype) | values_of(self.buffers)

    def go_to(self, places: Sequence[int], slot: int) -> None:
        """Load the weights for a microbatch into the model.

        Args:
            places: slot -> number of the microbatch within its replica's mini-batch t.
            slot: slot of the microbatch: its index among the microbatches of all replicas.
        """
        is_delayed = self.delay > 0 and self.t > self.start
        newest = {tensor: self.newest[tensor] for tensor, h in self.num_stale.items() if places[slot] >= h}
        load((self.before if is_delayed else self.newest) | newest)

    def next_mini_batch(self) -> None:
        """Go on to t + 1; without ``record_weights`` W_{t+1} = W_t."""
        self.before = self.newest
        self.t += 1

    def staleness(self, parameter: Tensor, count: int) -> float:
        """Return phi, a gradient's mean age in updates: the share of its ``count`` microbatches on older weights."""
        return self.delay * min(self.num_stale.get(parameter, count) / count, 1.0) if self.t >= self.start else 0.0

    def norms(self, gradient: MeanGradient, norm: float) -> dict[Tensor, float]:
        """Return the norm by which each parameter's gradient is clipped: ``norm``, that of all gradients, if known.

        If a stage steps before it knows this norm, the larger one of the previous mini-batch's norm and that of the
        gradients of all parameters on the same stages.
        """
        if self.t < self.start or self.exact_norm:
            return dict.fromkeys(self.parameters, norm)
        parts: dict[tuple[int, ...], list[Tensor]] = {}
        for p in self.parameters:
            parts.setdefault(self.stages.get(p, ()), []).append(p)
        of_parts = {stages: max(self.norm_before, gradient.norm(part)) for stages, part in parts.items()} | {(): norm}
        return {p: of_parts[self.stages.get(p, ())] for p in self.parameters}

    def update(
        self, optimizer: Optimizer, gradient: MeanGradient, max_norm: float | None, strength: float | None, count: int
    ) -> None:
        """Step the optimizer from W_t to W_{t+1}."""
        norm = gradient.norm(self.parameters)
        norms = self.norms(gradient, norm)
        for p, mean in gradient.means(self.parameters).items():
            p.grad = mean if max_norm is None else mean * min(1.0, max_norm / (norms[p] + 1e-6))
        self.norm_before = norm
        moved = {p for p in self.parameters if p.grad is not None or p in self.step_before}
        optimizer.step()
        optimizer.zero_grad()
        ahead: Weights = {}
        if strength is not None and self.t >= self.start:
            step = {p: self.masters[p] - p.detach() for p in moved if self.num_stale.get(p) != 0}  # u_t
            strengths = {p: strength * self.staleness(p, count) for p in step}
            ahead = (_feed_back if self.dtype is None else _look_ahead)(step, self.step_before, strengths)
            self.step_before = step
        update_buffers(self.model, gradient.counts)
        self.next_mini_batch()
        self.record_weights(ahead)


@torch.no_grad()
def update_buffers(model: nn.Module, counts: Collected) -> None:
    """Call the layers' ``update_from_statistics`` with the counts of a mini-batch."""
    for layer in (layer for layer in model.modules() if isinstance(layer, StatisticsLayer)):
        buffers = {name: getattr(layer, name) for name in layer.versioned_buffers}
        nothing = torch.zeros(layer.num_statistics, dtype=torch.float64)
        layer.update_from_statistics(counts.statistics.get(layer, nothing).cpu())
        for name, buffer in buffers.items():  # a layer may have assigned another tensor
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
    """Run microbatches forward and backward, and sum their gradients in the masters' dtype.

    The microbatches are numbered from ``first``. Before microbatch i of ``slots``, ``go_to(i)`` loads its weights.
    ``found`` holds the sums over earlier microbatches of the same mini-batch, if any.
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
                with _derived_randomness(model, seed, k), collecting() as collected:
                    loss = step(microbatch)
                ((loss + collected.total_loss()) * w).backward()
                found.weight += w
                found.losses.append((loss.item(), w))
                for layer, counts in collected.statistics.items():
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
    """Return the number of a microbatch within its replica's mini-batch."""
    batch, within = divmod(slot, microbatches)
    return batch // replicas * microbatches + within


def _add(sums: dict[K, Tensor], key: K, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


@contextmanager
def uses_apart(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Copy a trainable parameter for every unit that shares it, except the first; yield pairs (parameter, copy).

    When a unit begins, that unit's copies replace the parameters in its modules and in the modules outside of all
    units; in all modules if the model's own forward runs.
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
    """Seed the step from k and each unit from (unit, k).

    After the model's forward, the generators get back the states that they had before the forward.
    """
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
    """Correct the steps just taken. A parameter's first step has no predecessor, and stays as it is."""
    for p in step.keys() & before.keys():
        p.sub_(step[p] - before[p], alpha=strengths[p])
    return {}


@torch.no_grad()
def _look_ahead(step: Weights, before: Weights, strengths: dict[Tensor, float]) -> Weights:
    """Return W_{t+1} = Y_{t+1} - strength * u_t; the parameters hold the masters Y.

    Before that, at a parameter's first step, add strength * u_0 to Y_1.
    """
    for p in step.keys() - before.keys():
        p.add_(step[p], alpha=strengths[p])
    return {p: torch.sub(p.detach(), u, alpha=strengths[p]) for p, u in step.items()}


def _with_buffers(model: nn.Module, stale_counts: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """Return ``stale_counts`` extended by the versioned buffers of its parameters' units, each with its unit's h."""
    found = dict(stale_counts)
    for unit in pipeline_units(model):
        numbers = [stale_counts[p] for p in unit.module.parameters() if p in stale_counts]
        if numbers:
            found |= dict.fromkeys(versioned_buffers(unit.module), numbers[0])
    return found


def versioned_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that layers change once per update, which are part of W."""
    layers = [layer for layer in model.modules() if isinstance(layer, StatisticsLayer)]
    return [getattr(layer, name) for layer in layers for name in layer.versioned_buffers]


def values_of(tensors: Iterable[Tensor]) -> Weights:
    """Return tensor -> copy of its value."""
    return {tensor: tensor.detach().clone() for tensor in tensors}


def load(values: Weights) -> None:
    """Set each tensor's data to a copy of its value, which may have another dtype."""
    for tensor, value in values.items():
        tensor.data = value.clone()


def _rounded(values: Weights, dtype: torch.dtype | None) -> Weights:
    return values if dtype is None else {tensor: value.to(dtype) for tensor, value in values.items()}
