"""Error Feedback under delay: correct each step by what the previous one turned out to lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.feedback_update import feed_back

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class _Feedback:
    """What changes while training. One object, so that it is the same one through Lightning's optimizer wrappers,
    which inherit our methods and forward attribute reads, but keep attribute writes to themselves."""

    delay: int = 1
    started: bool = False
    previous: dict[Tensor, Tensor] = field(default_factory=dict)
    lent: Mapping[Tensor, Tensor] | None = None
    announced: bool = False

    def reset(self) -> None:
        self.started = False
        self.previous.clear()


class ErrorFeedback(Optimizer):
    """Wrap any optimizer so that it makes up for gradients that are one update old.

    Source: "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM Pretraining",
    arXiv 2606.30634. With u_t the whole step of the base optimizer at update t (weights before minus after)::

        W_{t+1} = W_t - (u_t + strength * (u_t - u_{t-1}))        no correction at the first update

    In words: the step at t-1 was computed from a stale gradient; one update later the step that it should have been is
    known, and the difference is fed back. It has nothing to do with the "error feedback" of the dion optimizers,
    which returns what a low-rank compression of the gradient lost.

    An identity to know: with Y_0 = W_0 and Y_{t+1} = Y_t - u_t, strength 1 gives W_{t+1} = Y_{t+1} - u_t + u_0, so EF
    is weight prediction: gradients are taken at the base trajectory, extrapolated by its last step.

    ``param_groups``, ``state`` and ``defaults`` are the base optimizer's own, so schedulers, monitors and whoever sets
    ``group["lr"]`` act on it. Names of parameters are passed through to the base.

    A parameter without a gradient is not moved by the base: u_t = 0, and the formula holds as for all others, so its
    last step's extrapolation is taken back. One that never had a gradient costs nothing and never moves.

    Memory: one buffer per parameter, u_{t-1}, in the parameter's dtype or ``buffer_dtype``. In :meth:`step` the weights
    before the step are needed too; lend them with :meth:`weights_before` where they are alive anyway, otherwise
    they are copied for the length of the step.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``: a class, ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or in a
            YAML file ``class_path`` and ``init_args``.
        strength: factor on the difference of the steps, at least 0; 1 is the published rule, 0 keeps the base step.
        buffer_dtype: of the stored steps; None: the parameter's, else "bfloat16" or "float32". The same rounded value
            is subtracted that was stored, so rounding errors do not add up: over a run they telescope.

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        strength: float = 1.0,
        buffer_dtype: str | None = None,
    ) -> None:
        _check_arguments(base, strength, buffer_dtype)
        optimizer = base(params)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`base` must return a torch Optimizer, but it returned {type(optimizer).__name__}")
        super().__init__([torch.zeros(())], {})  # a stand-in: groups, state and defaults are the base's
        self.strength = strength
        self.buffer_dtype = buffer_dtype
        self._feedback = _Feedback()
        self._adopt(optimizer)

    def set_delay(self, delay: int) -> None:
        """Say how many updates old the gradients are: 1 (the default), or 0, where the base step is left as it is."""
        if delay not in (0, 1):
            raise ValueError(
                f"ErrorFeedback corrects gradients that are 1 update old, and with delay 0 passes the base step "
                f"through; got {delay}. For longer delays use the base optimizer alone."
            )
        feedback = self._feedback
        if delay == 0:
            feedback.reset()
            if not feedback.announced:
                rank_zero_info(
                    "ErrorFeedback: gradients are not delayed, so nothing is fed back: the base steps alone."
                )
                feedback.announced = True
        feedback.delay = delay

    @property
    def delay(self) -> int:
        """How many updates old the gradients are."""
        return self._feedback.delay

    @contextmanager
    def weights_before(self, weights: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Lend the weights as they are before the step: ``with ef.weights_before({p: copy, ...}): ef.step()``.

        Args:
            weights: for every parameter with a gradient a tensor of its shape, dtype and value, in memory of its own.
                They are only read.
        """
        self._feedback.lent = weights
        try:
            yield
        finally:
            self._feedback.lent = None

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
        if self._feedback.delay == 0:
            self.base.step()
            return loss
        moving = [p for p in self._parameters() if p.grad is not None]
        before = self._weights_before_step(moving)
        self.base.step()
        self._correct(before)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, in the base optimizer's way."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer."""
        if hasattr(self, "base"):
            self.base.add_param_group(param_group)
        else:  # called by torch while this object is being made
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state dict and under ``error_feedback`` the previous steps by parameter index."""
        index = {p: i for i, p in enumerate(self._parameters())}
        previous = {index[p]: step for p, step in self._feedback.previous.items()}
        return {
            **self.base.state_dict(),
            "error_feedback": {"started": self._feedback.started, "previous": previous},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; with delay 0 the previous steps are not kept."""
        if "error_feedback" not in state_dict:
            raise ValueError(
                "this optimizer state has no entry 'error_feedback': it was saved without ErrorFeedback. To go on from "
                "it with a fresh correction, load it into the wrapped optimizer: `.base.load_state_dict(state)`"
            )
        saved = state_dict["error_feedback"]
        previous = self._read_previous(saved["previous"])
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != "error_feedback"})
        self._feedback.reset()
        if self._feedback.delay > 0:
            self._feedback.started = bool(saved["started"])
            self._feedback.previous.update(previous)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("base", "strength", "buffer_dtype", "_feedback")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "defaults": state["base"].defaults})
        self._adopt(state["base"])

    def _adopt(self, optimizer: Optimizer) -> None:
        self.base = optimizer
        self.defaults = optimizer.defaults
        self._share_groups(optimizer)
        # Loading gives the base new groups and a new state, whoever does it.
        optimizer.register_load_state_dict_post_hook(self._share_groups)

    def _share_groups(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _weights_before_step(self, moving: list[Tensor]) -> Mapping[Tensor, Tensor]:
        lent = self._feedback.lent
        if lent is None:
            return {p: p.detach().clone() for p in moving}
        for p in moving:
            _check_lent(p, lent.get(p))
        return {p: lent[p] for p in moving}

    @torch.no_grad()
    def _correct(self, before: Mapping[Tensor, Tensor]) -> None:
        feedback = self._feedback
        for p in self._parameters():
            if p not in before and p not in feedback.previous:
                continue
            previous = feedback.previous.get(p)
            if previous is None:  # no step so far is a step of 0
                dtype = _DTYPES[self.buffer_dtype] if self.buffer_dtype else p.dtype
                previous = feedback.previous[p] = torch.zeros_like(p, dtype=dtype)
            feed_back(p.detach(), before.get(p), previous, self.strength if feedback.started else 0.0)
        feedback.started = True

    def _read_previous(self, saved: Mapping[int, Tensor]) -> dict[Tensor, Tensor]:
        params = self._parameters()
        previous = {}
        for index, step in saved.items():
            if index >= len(params) or step.shape != params[index].shape:
                raise ValueError(
                    f"the saved previous step {index} has shape {tuple(step.shape)}, which is no parameter of this "
                    "optimizer at that place: the state belongs to another model or another stage"
                )
            p = params[index]
            dtype = _DTYPES[self.buffer_dtype] if self.buffer_dtype else p.dtype
            # A copy: the buffer is written in place, and what was loaded is not ours.
            previous[p] = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(step)
        return previous


def _check_arguments(base: object, strength: float, buffer_dtype: str | None) -> None:
    if not callable(base):
        raise TypeError(
            f"`base` must be a callable that makes an optimizer from parameters, got {type(base).__name__}: pass the "
            "class or functools.partial(torch.optim.AdamW, lr=1e-3) instead of an optimizer that is already made"
        )
    problems = []
    if not strength >= 0:
        problems.append(f"strength must be at least 0, got {strength!r}")
    if buffer_dtype not in (None, *_DTYPES):
        problems.append(f"buffer_dtype must be None or one of {', '.join(_DTYPES)}, got {buffer_dtype!r}")
    if problems:
        raise ValueError("ErrorFeedback cannot be set up:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _check_lent(p: Tensor, lent: Tensor | None) -> None:
    if lent is None:
        raise ValueError(f"weights_before() lacks a parameter of shape {tuple(p.shape)} that has a gradient")
    if lent.shape != p.shape or lent.dtype != p.dtype or lent.device != p.device:
        raise ValueError(
            f"the lent weights are {tuple(lent.shape)} {lent.dtype} on {lent.device}, their parameter is "
            f"{tuple(p.shape)} {p.dtype} on {p.device}"
        )
    if p.numel() and lent.data_ptr() == p.data_ptr():
        raise ValueError("the lent weights are the parameter itself: lend a copy that the step leaves as it is")
