"""What all corrections for delayed gradients share: they wrap any optimizer and change what its step does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.checks import check_base, check_lent
from lightning_asyncpp.optim.optimizer_around import OptimizerAround

Weights = Mapping[Tensor, Tensor]


@dataclass
class Memory:
    """What changes while training. One object, so that it is the same one through Lightning's optimizer wrappers,
    which inherit our methods and forward attribute reads, but keep attribute writes to themselves.

    Attributes:
        delay: of all gradients in updates, or parameter -> delay.
        buffers: name of a kind of buffer -> parameter -> tensor.
        steps: updates so far.
        lent: weights before the step that somebody else keeps.
        compute: where the weights go that gradients are taken at, if the parameters are masters beside them.
        horizons: how far ahead the weights are that a prediction wrote, in steps.
        announced: whether it was said that there is nothing to correct.
    """

    delay: float | dict[Tensor, float] = 1
    buffers: dict[str, dict[Tensor, Tensor]] = field(default_factory=dict)
    steps: int = 0
    lent: Weights | None = None
    compute: Weights | None = None
    horizons: dict[Tensor, float] = field(default_factory=dict)
    announced: bool = False

    def reset(self) -> None:
        """Forget the past."""
        self.steps = 0
        self.horizons = {}
        for tensors in self.buffers.values():
            tensors.clear()


class DelayCorrection(OptimizerAround):
    """Base class of the corrections: wraps an optimizer whose gradients are some updates old.

    Names of parameters are passed through to the base. Corrections may wrap corrections.

    A strategy says how old the gradients are (:meth:`set_delay`); where they are fresh there is nothing to correct and
    the base step is left as it is, unless the correction is told otherwise (``WeightPrediction(ahead=...)``).

    A subclass overrides :meth:`_before_step`, :meth:`_after_step` or both, names its buffers in ``buffer_names``, its
    attributes in ``option_names`` and its entry of the state dict in ``state_name``.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``: a class, ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or in a
            YAML file ``class_path`` and ``init_args``.

    Raises:
        TypeError: ``base`` is not a callable that returns an optimizer.
        ValueError: ``base`` holds the same correction.
    """

    state_name: ClassVar[str]
    buffer_names: ClassVar[tuple[str, ...]]
    option_names: ClassVar[tuple[str, ...]]
    removed: ClassVar[dict[str, Any]] = {}
    """Arguments that what was saved before may name, with the values that say what is so without them."""
    needs_weights_before: ClassVar[bool] = True
    """Whether :meth:`_after_step` looks at the weights before the step."""
    takes_fractions: ClassVar[bool] = True
    """Whether a gradient may be taken at two versions of the weights."""

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer]) -> None:
        check_base(base)
        optimizer = base(params)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`base` must return a torch Optimizer, but it returned {type(optimizer).__name__}")
        self._check_nesting(optimizer)
        super().__init__(optimizer)
        self._memory = Memory(buffers={name: {} for name in self.buffer_names})

    def _check_nesting(self, optimizer: Optimizer) -> None:
        while isinstance(optimizer, DelayCorrection):
            if optimizer.state_name == self.state_name:
                raise ValueError(f"{type(self).__name__} inside {type(self).__name__}: use one, with more strength")
            optimizer = optimizer.base

    # -- what a subclass does -------------------------------------------------------------------------------------

    def _before_step(self, moving: list[Tensor], before: Weights) -> None:
        """Change gradients, before the base steps; ``moving`` are the delayed parameters that have one."""

    def _after_step(self, moving: list[Tensor], before: Weights) -> None:
        """Change weights, after the base stepped; ``before`` holds those of ``moving`` before it."""

    def _skip(self) -> None:
        """Take note of an update that is left out: the base does not step, the weights stay as they are."""

    # -- what a strategy says -------------------------------------------------------------------------------------

    def set_delay(self, delay: float | Mapping[Tensor, float]) -> None:
        """Say how many updates old the gradients are: all alike (1 is the default), or each parameter's.

        A fraction below 1 says that this share of the micro-batches was taken at the weights before the update.

        Raises:
            ValueError: a delay is neither a whole number of at least 0 nor such a fraction, which not all can use.
        """
        delays = list(delay.values()) if isinstance(delay, Mapping) else [delay]
        wrong = [d for d in delays if not (isinstance(d, int) and d >= 0) and not 0 < d < 1]
        if wrong:
            raise ValueError(
                f"a gradient cannot be {wrong[0]!r} updates old: delay must be a whole number, 0 or more, or a fraction"
                " below 1"
            )
        if not all(isinstance(d, int) for d in delays) and (problems := self.problems_of_fractions()):
            raise ValueError("; ".join(problems))
        memory = self._memory
        if not any(delays) and not self._acts_on_fresh:
            memory.reset()
        memory.delay = dict(delay) if isinstance(delay, Mapping) else delay
        if isinstance(self.base, DelayCorrection):
            self.base.set_delay(delay)

    def problems_of_fractions(self) -> list[str]:
        """Why gradients of which a part was taken at older weights than the rest cannot be corrected, with the mend."""
        inner = self.base.problems_of_fractions() if isinstance(self.base, DelayCorrection) else []
        if self.takes_fractions:
            return inner
        own = (
            f"{type(self).__name__} needs gradients that are taken at one version of the weights; with the least"
            " staleness some micro-batches run on another: use staleness='uniform', or another correction"
        )
        return [own, *inner]

    def skip_update(self) -> None:
        """Say that an update is left out: its gradient was not finite, and the weights stay as they are."""
        if self._acts:
            with torch.no_grad():
                self._skip()
        if isinstance(self.base, DelayCorrection):
            self.base.skip_update()

    def begin_anew(self) -> None:
        """Say that the past is not known: the next update is like the first."""
        self._memory.reset()
        if isinstance(self.base, DelayCorrection):
            self.base.begin_anew()

    @property
    def delay(self) -> float:
        """How many updates old the oldest gradients are."""
        delay = self._memory.delay
        return max(delay.values(), default=0) if isinstance(delay, Mapping) else delay

    def delay_of(self, parameter: Tensor) -> float:
        """How many updates old the gradients of ``parameter`` are."""
        delay = self._memory.delay
        return delay.get(parameter, 0) if isinstance(delay, Mapping) else delay

    @property
    def _acts_on_fresh(self) -> bool:
        """Whether steps from fresh gradients are changed, too."""
        return False

    @property
    def _compares_weights(self) -> bool:
        """Whether :meth:`_after_step` looks at the weights before this step."""
        return self.needs_weights_before

    @property
    def _acts(self) -> bool:
        return self.delay > 0 or self._acts_on_fresh

    @contextmanager
    def weights_before(self, weights: Weights) -> Iterator[None]:
        """Lend the weights as they are before the step: ``with ef.weights_before({p: copy, ...}): ef.step()``.

        Args:
            weights: for every delayed parameter with a gradient a tensor of its shape, dtype and value, in memory of
                its own. They are only read.
        """
        with ExitStack() as stack:
            if isinstance(self.base, DelayCorrection):
                stack.enter_context(self.base.weights_before(weights))
            self._memory.lent = weights
            try:
                yield
            finally:
                self._memory.lent = None

    @contextmanager
    def compute_weights(self, weights: Weights) -> Iterator[None]:
        """Step masters: ``with ef.compute_weights({p: tensor, ...}): ef.step()`` writes what gradients are taken at.

        Args:
            weights: for every parameter a tensor of its shape, in the dtype of forwards and backwards.
        """
        self._memory.compute = weights
        try:
            yield
            with torch.no_grad():
                self._write(weights)
        finally:
            self._memory.compute = None

    def _write(self, weights: Weights) -> None:
        """Write the weights that gradients are taken at from the masters: by default these, rounded."""
        for parameter, tensor in weights.items():
            tensor.copy_(parameter)

    # -- an optimizer ---------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the base optimizer and correct; ``closure`` is evaluated once, before the weights move."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._acts:
            self._announce()
            self.base.step()
            return loss
        moving = [p for p in self._parameters() if p.grad is not None and (self.delay_of(p) or self._acts_on_fresh)]
        before = self._weights_before_step(moving) if self._compares_weights else {}
        with torch.no_grad():
            self._before_step(moving, before)
        self.base.step()
        with torch.no_grad():
            self._after_step(moving, before)
        self._memory.steps += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state dict and under ``state_name`` the buffers by parameter index."""
        index = {p: i for i, p in enumerate(self._parameters())}
        own: dict[str, Any] = {"steps": self._memory.steps}
        if self._memory.horizons:
            own["horizons"] = {index[p]: horizon for p, horizon in self._memory.horizons.items()}
        for name, tensors in self._memory.buffers.items():
            own[name] = {index[p]: tensor for p, tensor in tensors.items()}
        return {**self.base.state_dict(), self.state_name: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; where nothing is corrected the buffers are not kept."""
        if self.state_name not in state_dict:
            raise ValueError(
                f"this optimizer state has no entry {self.state_name!r}: it was saved without {type(self).__name__}. To"
                " go on from it with a fresh correction, load it into the wrapped optimizer: `.base.load_state_dict"
                "(state)`"
            )
        saved = state_dict[self.state_name]
        kept = self.buffer_names if self._acts else ()
        buffers = {name: self._read_buffers(name, saved[name]) for name in kept}
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != self.state_name})
        self._memory.reset()
        if self._acts:
            self._memory.steps = int(saved["steps"])
            parameters = self._parameters()
            self._memory.horizons = {parameters[index]: h for index, h in saved.get("horizons", {}).items()}
            for name, tensors in buffers.items():
                self._memory.buffers[name].update(tensors)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("base", "_memory", *self.option_names)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "defaults": state["base"].defaults})
        self._adopt(state["base"])

    # -- helpers --------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Say once that nothing is corrected: now, because whoever told the delay may have told another one since."""
        if not self._memory.announced:
            rank_zero_info(
                f"{type(self).__name__} on this rank: gradients are fresh, so there is nothing to correct, and"
                f" {type(self.base).__name__} steps as it would alone; ranks whose gradients are delayed correct theirs"
            )
            self._memory.announced = True

    def _weights_before_step(self, moving: list[Tensor]) -> Weights:
        lent = self._memory.lent
        if lent is None:
            return {p: p.detach().clone() for p in moving}
        for p in moving:
            if self.delay_of(p):  # there is an older version of these alone
                check_lent(p, lent.get(p))
        return {p: lent[p] if self.delay_of(p) else p.detach().clone() for p in moving}

    def _buffer(self, name: str, p: Tensor) -> Tensor:
        """The buffer of ``p``, made of zeros where there is none yet."""
        tensors = self._memory.buffers[name]
        if p not in tensors:
            tensors[p] = torch.zeros(self._buffer_shape(name, p), dtype=self._buffer_dtype(p), device=p.device)
        return tensors[p]

    def _buffer_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        """Shape of the buffer ``name`` of ``p``."""
        return tuple(p.shape)

    def _fits(self, name: str, p: Tensor, saved: Tensor) -> bool:
        """Whether a saved buffer ``name`` can be that of ``p``."""
        return tuple(saved.shape) == self._buffer_shape(name, p)

    def _buffer_dtype(self, p: Tensor) -> torch.dtype:
        """In which a buffer of ``p`` is kept."""
        return p.dtype

    def _read_buffers(self, name: str, saved: Mapping[int, Tensor]) -> dict[Tensor, Tensor]:
        params = self._parameters()
        tensors = {}
        for index, value in saved.items():
            if index >= len(params) or not self._fits(name, params[index], value):
                raise ValueError(
                    f"the saved {name} {index} has shape {tuple(value.shape)}, which is no parameter of this optimizer"
                    " at that place: the state belongs to another model or another stage"
                )
            p = params[index]
            # A copy: the buffer is written in place, and what was loaded is not ours.
            tensors[p] = torch.empty(value.shape, dtype=self._buffer_dtype(p), device=p.device).copy_(value)
        return tensors
