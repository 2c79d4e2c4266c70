"""The reference: what a pipeline computes, in one process, written as plainly as possible.

It shares no code with the engine but the derivation of seeds. A pipeline whose result differs from this one is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.micro_batch import number_of_samples, split_batch
from lightning_asyncpp.pipeline.randomness import derive
from lightning_asyncpp.pipeline.units import pipeline_units

Weights = list[Tensor]


def train_reference(
    model: nn.Module,
    step: Callable[[Any], Tensor],
    mini_batches: Iterable[Sequence[Any]],
    optimizer: Optimizer,
    *,
    micro_batches: int,
    delay: int = 1,
    max_norm: float | None = None,
    error_feedback: float | None = None,
    after_update: Callable[[], None] | None = None,
    weight: Callable[[Any], float] = number_of_samples,
    skip_nonfinite: bool = False,
    fresh: Collection[nn.Parameter] = (),
    synchronous_start: int = 0,
    seed: int = 0,
    first_micro_batch: int = 0,
) -> list[float]:
    """Train ``model`` in place by the rule W_{t+1} = W_t - U(g_t), with g_t taken at W_{max(t - delay, 0)}.

    With a synchronous start of N mini-batches: at W_t for t < N, then at W_{max(t - delay, N)}.

    Args:
        model: an ``nn.Sequential`` or a module with ``pipeline_layers()``.
        step: micro-batch -> loss, a mean over the micro-batch; it calls ``model`` once.
        mini_batches: each a list of batches that share one update: one batch, or several with gradient accumulation.
        optimizer: over the parameters of ``model``; the base optimizer if ``error_feedback`` is given.
        micro_batches: pieces that every batch is cut into.
        delay: 1 for PipeDream-2BW, 0 for synchronous training.
        max_norm: clip the gradient's 2-norm to this.
        error_feedback: strength; W_{t+1} = W_t - (u_t + strength * (u_t - u_{t-1})), u_t the base optimizer's step.
        after_update: called after every update, for schedulers.
        weight: micro-batch -> its weight in the mean loss.
        skip_nonfinite: leave weights and optimizer alone where a gradient is not finite.
        fresh: parameters of a last stage without delay: their gradients are taken at W_t, and clipped by the norm of
            the whole gradient one mini-batch earlier (the first time, by the norm of their own); no error feedback.
        synchronous_start: N; error feedback begins with update N, which is the first that is not corrected.
        seed: the run's seed; replica 0's random numbers are drawn.
        first_micro_batch: k of the first micro-batch.

    Returns:
        The weighted mean loss of every mini-batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    versions = [_copy(parameters)]  # W_0, W_1, ...
    previous_step: Weights | None = None  # u_{t-1}
    losses = []
    k = first_micro_batch
    is_fresh = [any(p is q for q in fresh) for p in parameters]
    norm: float | None = None  # of the whole gradient, one mini-batch ago
    for t, batches in enumerate(mini_batches):
        is_async = t >= synchronous_start
        stale = versions[max(t - delay, synchronous_start) if is_async else t]
        _load(parameters, [new if is_new else old for is_new, new, old in zip(is_fresh, versions[t], stale)])
        slots = [piece for batch in batches for piece in split_batch(batch, micro_batches)]
        gradient, total, loss = _gradient(model, parameters, step, slots, weight, seed, k)
        losses.append(loss / total if total else math.nan)
        k += len(slots)
        _load(parameters, versions[t])
        if _usable(gradient, total, skip_nonfinite):
            own = [g if is_new else None for is_new, g in zip(is_fresh, gradient)]
            before = _norm(own, total) if norm is None else norm
            norm = _norm(gradient, total)
            norms = [before if is_new and is_async else norm for is_new in is_fresh]
            _set_gradient(parameters, gradient, total, norms, max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if error_feedback is not None and is_async:
                previous_step = _feed_back(parameters, versions[t], previous_step, error_feedback, is_fresh)
        versions.append(_copy(parameters))
        if after_update is not None:
            after_update()
    return losses


def _gradient(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    step: Callable[[Any], Tensor],
    slots: Sequence[Any],
    weight: Callable[[Any], float],
    seed: int,
    first: int,
) -> tuple[list[Tensor | None], float, float]:
    """Sum of w_k * gradient_k and of w_k * loss_k over the micro-batches in order, and the sum of w_k."""
    total, loss_sum = 0.0, 0.0
    for parameter in parameters:
        parameter.grad = None
    for k, micro_batch in enumerate(slots, first):
        w = 0.0 if micro_batch is None else float(weight(micro_batch))
        if w:
            with _derived_randomness(model, seed, k):
                loss = step(micro_batch)
            (loss * w).backward()  # adds to .grad
            total, loss_sum = total + w, loss_sum + w * loss.item()
    gradient = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradient, total, loss_sum


@contextmanager
def _derived_randomness(model: nn.Module, seed: int, k: int) -> Iterator[None]:
    """Seed the step from k, every unit from (unit, k), and go on with the step's own generator after the model."""
    state: list[Tensor] = []
    hooks = [model.register_forward_pre_hook(lambda *_: state.append(torch.get_rng_state()))]
    for index, unit in enumerate(pipeline_units(model)):
        unit_seed = derive(seed, "layer", index, 0, k)
        hooks.append(unit.module.register_forward_pre_hook(lambda *_, s=unit_seed: torch.manual_seed(s) and None))
    hooks.append(model.register_forward_hook(lambda *_: torch.set_rng_state(state.pop())))
    outside = torch.get_rng_state()
    torch.manual_seed(derive(seed, "train", 0, k))
    try:
        yield
    finally:
        torch.set_rng_state(outside)
        for hook in hooks:
            hook.remove()


def _usable(gradient: Sequence[Tensor | None], total: float, skip_nonfinite: bool) -> bool:
    finite = all(g is None or bool(torch.isfinite(g).all()) for g in gradient)
    if not finite and not skip_nonfinite:
        raise FloatingPointError("a gradient is not finite")
    return finite and total > 0


def _norm(gradient: Sequence[Tensor | None], total: float) -> float:
    squares = sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in gradient if g is not None)
    return float(torch.tensor(math.sqrt(squares) / total, dtype=torch.float32))


def _set_gradient(
    parameters: Sequence[nn.Parameter],
    gradient: Sequence[Tensor | None],
    total: float,
    norms: Sequence[float],
    max_norm: float | None,
) -> None:
    for parameter, g, norm in zip(parameters, gradient, norms):
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        parameter.grad = None if g is None else (g / total) * clip


def _feed_back(
    parameters: Sequence[nn.Parameter],
    before: Weights,
    previous: Weights | None,
    strength: float,
    is_fresh: Sequence[bool],
) -> Weights:
    """Correct the step just taken where it was delayed; returns it as it was (u_t)."""
    taken = [b - p.detach() for b, p in zip(before, parameters)]
    if previous is not None:
        with torch.no_grad():
            for parameter, now, then, is_new in zip(parameters, taken, previous, is_fresh):
                if not is_new:
                    parameter.sub_((now - then) * strength)
    return taken


def _copy(parameters: Sequence[nn.Parameter]) -> Weights:
    return [p.detach().clone() for p in parameters]


def _load(parameters: Sequence[nn.Parameter], weights: Weights) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, weights):
            parameter.copy_(value)
