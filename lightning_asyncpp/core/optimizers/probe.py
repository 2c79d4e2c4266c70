"""Whether an optimizer can work on a stage: found by steps of small copies of it, before training, not by its name.

A stage's optimizer holds the stage's parameters. So its step must treat every parameter by itself, as the same step
over the whole model would, draw no random numbers, and be content with one gradient.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_asyncpp.core.optimizers.small_copy import Kind, NotExaminedError, SmallCopy, has_memory, step_hooks
from lightning_asyncpp.core.randomness import random_states, set_random_states

_STEPS = 6
_SEED = 20_000
_TRUSTED = ("torch.optim.", f"{__name__.partition('.')[0]}.optim.")

SEVERAL = "several"
"""It wants gradients at several weights per step."""
GLOBAL = "global"
"""It computes over all of its parameters."""
RANDOM = "random"
"""It draws random numbers."""
LOSS = "loss"
"""It computes with the loss."""
TALKS = "talks"
"""It communicates with other processes."""

Edit = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        kind: of the finding; "" where there is none.
        unknown: why the optimizer could not be examined; "" if it could.
        calls_closure: whether a step evaluates its closure.
    """

    kind: str = ""
    unknown: str = ""
    calls_closure: bool = True


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is, all through, one of torch's or of this package's, which the suite examines, as it was made."""
    kind = type(optimizer)
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    step = vars(optimizer).get("step")
    changed = bool(step_hooks(optimizer)) or (step is not None and not hasattr(step, "_wrapped_by_lr_sched"))
    return f"{kind.__module__}.".startswith(_TRUSTED) and not changed and all(map(is_known, inner))


def examine(optimizer: Optimizer) -> Verdict:
    """Find out what a step does; the optimizer, the generators of random numbers and the weights stay as they are."""
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        return Verdict()
    with aside():
        try:
            return _examine(optimizer)
        except NotExaminedError as error:
            return Verdict(unknown=str(error))


def _examine(optimizer: Optimizer) -> Verdict:
    try:
        plain = _run(optimizer, _Trial(watched=True))
    except TalkingError:
        return Verdict(TALKS)
    except NotExaminedError:
        plain = _run(optimizer, _Trial(loss=1.0, watched=True))
        return Verdict(SEVERAL if plain.several else LOSS)
    if plain.several:
        return Verdict(SEVERAL)
    if plain.drew or not _same(plain, _run(optimizer, _Trial())):
        return Verdict(RANDOM)
    if _mixes(optimizer, plain):
        return Verdict(GLOBAL)
    if not _same(plain, _run(optimizer, _Trial(loss=7.0))):
        return Verdict(LOSS)
    hooked = any(has_memory(hook) for hook in step_hooks(optimizer, before=True))
    return Verdict(unknown="it has step hooks of somebody else's" if hooked else "", calls_closure=plain.calls > 0)


def _mixes(optimizer: Optimizer, plain: _Outcome) -> bool:
    """Whether the step of one half of the parameters depends on the other half."""
    half = _half(plain.kinds)
    other = set(range(len(plain.kinds))) - half
    for changed, factor in ((half, -100.0), (other, 0.01)):
        again = _run(optimizer, _Trial(changed=frozenset(changed), factor=factor))
        if not _same(plain, again, set(range(len(plain.kinds))) - changed):
            return True
    return any(_differs_without(optimizer, plain, removed) for removed in (half, other))


def _differs_without(optimizer: Optimizer, plain: _Outcome, removed: set[int]) -> bool:
    """Whether the step of some parameters is another one where the others are not there, beyond rounding."""
    try:
        alone = _run(optimizer, _Trial(removed=frozenset(removed)))
    except NotExaminedError:  # it cannot be cut down: what gradients told stands
        return False
    for index in set(range(len(plain.kinds))) - removed:
        steps = [[w[t + 1] - w[t] for t in range(_STEPS)] for w in (plain.weights[index], alone.weights[index])]
        apart = max(float((a - b).abs().max()) for a, b in zip(*steps))
        longest = max(float(step.abs().max()) for step in steps[0])
        if apart > 0.05 * longest:
            return True
    return False


def _half(kinds: list[Kind]) -> set[int]:
    """Every second one of each kind; those that are alone in their kind are dealt out in turns, too."""
    seen: dict[Kind, int] = {}
    half = set()
    for index, kind in enumerate(kinds):
        seen.setdefault(kind, len(seen) % 2)
        if seen[kind] % 2 == 0:
            half.add(index)
        seen[kind] += 1
    return half


@dataclass(frozen=True)
class _Trial:
    """What is done otherwise in a run of steps.

    Attributes:
        changed: numbers of the parameters that get other gradients.
        factor: how much longer these are.
        removed: numbers of the parameters that are not there.
        loss: what the closure returns; None: nothing, as in a pipeline.
        watched: refuse to talk to other processes.
    """

    changed: frozenset[int] = frozenset()
    factor: float = 1.0
    removed: frozenset[int] = frozenset()
    loss: float | None = None
    watched: bool = False


@dataclass
class _Outcome:
    """What came of it: weights by parameter and step, and what was seen."""

    kinds: list[Kind]
    weights: list[list[Tensor]]
    calls: int = 0
    several: bool = False
    drew: bool = False


def _run(optimizer: Optimizer, trial: _Trial) -> _Outcome:
    small = SmallCopy(optimizer)
    parameters = [p for p, _ in small.trained]
    small.remove([parameters[index] for index in trial.removed])
    outcome = _Outcome([kind for _, kind in small.trained], [[_values(p)] for p in parameters])
    _seed()
    before = _generators()
    try:
        small.let_train()
        for number in range(_STEPS):
            _set_gradients(parameters, trial, number)
            closure = _Closure(parameters, trial.loss)
            with _Alone() if trial.watched and number == 0 and dist.is_initialized() else nullcontext():
                _stepped(small.optimizer, closure)
            outcome.calls += closure.calls
            outcome.several |= closure.several
            for p, weights in zip(parameters, outcome.weights):
                weights.append(_values(p))
    except TalkingError:
        raise
    except Exception as error:
        raise NotExaminedError(f"its step fails with small parameters ({type(error).__name__}: {error})") from error
    outcome.drew = before != _generators()
    return outcome


def step(small: SmallCopy, number: int) -> None:
    """Take a plain step; ``number`` says which gradients.

    Raises:
        NotExaminedError: it fails.
    """
    parameters = [p for p, _ in small.trained]
    _set_gradients(parameters, _Trial(), number)
    try:
        _stepped(small.optimizer, _Closure(parameters, None))
    except Exception as error:
        raise NotExaminedError(f"its step fails with small parameters ({type(error).__name__}: {error})") from error


def grown_options(optimizer: Optimizer) -> set[str]:
    """Options that its groups do not have before the first step, but after some."""
    with aside():
        try:
            small = SmallCopy(optimizer)
            small.let_train()
            for number in range(_STEPS):
                step(small, number)
        except NotExaminedError:
            return set()
        pairs = zip(optimizer.param_groups, small.optimizer.param_groups)
        return {key for before, after in pairs for key in after.keys() - before.keys()}


def _stepped(optimizer: Any, closure: Callable[[], Tensor | None]) -> None:
    optimizer.step(closure)


def _set_gradients(parameters: list[Tensor], trial: _Trial, step: int) -> None:
    for index, p in enumerate(parameters):
        if index in trial.removed:
            continue
        # Nearly the same in every step: what estimates a distance or a step size sees progress.
        generator = torch.Generator().manual_seed(_SEED + index)
        direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        noise = torch.Generator().manual_seed(_SEED + 1000 * (step + 1) + index)
        gradient = direction + 0.3 * torch.randn(p.shape, generator=noise, dtype=torch.float64)
        if index in trial.changed:
            gradient = trial.factor * (gradient + direction.abs())
        p.grad = gradient.to(p.dtype).to(p.device)


class _Closure:
    """Gives back the gradients that are there, and notes whether others were wanted."""

    def __init__(self, parameters: list[Tensor], loss: float | None) -> None:
        self.parameters, self.loss, self.calls, self.several = parameters, loss, 0, False
        self.known = _state_of(parameters)

    def __call__(self) -> Tensor | None:
        self.calls += 1
        self.several |= self.calls > 1 or self.known != _state_of(self.parameters)
        return None if self.loss is None else torch.tensor(self.loss)


def _state_of(parameters: list[Tensor]) -> list[tuple[int, Any]]:
    return [(p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in parameters]


class TalkingError(Exception):
    """A step was about to communicate."""


class _Alone(TorchDispatchMode):
    """Lets no operation talk to other processes: not all of them may be in the same step of the same trial."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise TalkingError
        return func(*args, **(kwargs or {}))


def _same(first: _Outcome, second: _Outcome, indices: set[int] | None = None) -> bool:
    chosen = range(len(first.kinds)) if indices is None else indices
    return all(_equal(a, b) for index in chosen for a, b in zip(first.weights[index], second.weights[index]))


def _equal(first: Tensor, second: Tensor) -> bool:
    return bool(torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)))


def _values(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True)


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _generators() -> Any:
    state = random.getstate()
    numbers: Any = np.random.get_state()  # releases of numpy declare it differently
    tensors = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    return state, (numbers[1].tobytes(), *numbers[2:]), [t.numpy().tobytes() for t in tensors]


@contextmanager
def aside() -> Iterator[None]:
    """Without a trace: generators as they were, no warning, nothing compiled."""
    states, enabled = random_states(), torch.is_grad_enabled()
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            torch.set_grad_enabled(True)
            yield
    finally:
        torch.set_grad_enabled(enabled)
        set_random_states(states)
