"""Error Feedback for delayed gradients: each step is corrected by the error of the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.errors import check_choice
from lightning_asyncpp.optim.correction import DelayCorrection, Entries, Weights

BufferDtype = Literal["bfloat16", "float16", "float32", "float64"]

CPU_CHUNK_ELEMENTS = 2**17
"""Number of elements of a piece on a CPU: a piece fits the CPU's cache, so that memory is read once. Results do not
depend on this number, since the arithmetic is elementwise."""

CHUNK_ELEMENTS = 2**23
"""Number of elements of a piece on other devices: larger, since every piece costs a few kernel launches."""


class ErrorFeedback(DelayCorrection):
    """Wrapper of any optimizer, to compensate for gradients that are one update old.

    Source: "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline Parallel LLM Pretraining",
    arXiv 2606.30634. With weights W_t before update t, and the base optimizer's whole step u_t (before minus after)::

        W_{t+1} = W_t - (u_t + strength * (u_t - u_{t-1}))        no correction at a parameter's first update

    With the strategies' ``staleness="least"``, only a share phi of a gradient's microbatches is one update old. Then
    ``strength`` is multiplied by phi, which the strategy sets (:meth:`set_delay`; research/notes/theory.md, section 7).

    If a parameter has no gradient, the base does not move it: u_t = 0. The formula still applies, and undoes the
    extrapolation of the parameter's last step. A parameter that never had a gradient needs no buffer and never moves.

    With the strategies' ``weight_dtype="bf16"`` (:meth:`compute_weights`), the parameters are masters in fp32, which
    forwards do not use. The masters then hold Y, the base trajectory (docs/reference/optimizers.md, "Corrections"), to
    which s * u_0 is added once, after the first update. The weights W_{t+1} = Y_{t+1} - s * u_t exist only in bf16. The
    buffer holds Y_t during the step and u_t after it, so no further copy is needed. W then follows the formula only for
    a constant strength: if phi changes, so does the factor s of u_{t-1} in W_t. Decoupled weight decay acts on Y
    instead of W, a difference of the order of lr * weight_decay * u. That page's identity of W and Y does not hold for
    rounded steps, so with a ``buffer_dtype`` the masters hold W.

    Memory: one buffer per parameter, u_{t-1}, in the parameter's dtype or ``buffer_dtype``. :meth:`step` also needs the
    weights before the step: they are copied for the duration of the step, unless :meth:`weights_before` provides them.

    Args:
        params: parameters as the base optimizer takes them: tensors, (name, tensor) pairs or groups.
        base: function that makes the optimizer from ``params``: a class,
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or in a YAML file ``class_path`` and ``init_args``.
        strength: factor on the difference of the steps, at least 0; 1 is the published rule, 0 keeps the base step.
        buffer_dtype: dtype of the stored steps, such as "bfloat16"; None for the parameter's. The weights are
            corrected by the rounded steps that are stored, so rounding errors do not add up: they telescope.
    """

    keys = ("previous_step",)

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        strength: float = 1.0,
        buffer_dtype: BufferDtype | None = None,
    ) -> None:
        if buffer_dtype is not None:
            check_choice("buffer_dtype", buffer_dtype, BufferDtype)
        super().__init__(params, base)
        self.strength = strength
        self.buffer_dtype = buffer_dtype

    @property
    def _moves_the_base_trajectory(self) -> bool:
        """Whether the parameters hold Y, and W is only in the weights of forwards and backwards."""
        return self._compute is not None and not self.buffer_dtype

    def _weights_before(self, moving: list[Tensor], remembered: Entries) -> Weights:
        if not self._moves_the_base_trajectory:
            return super()._weights_before(moving, remembered)
        buffers = {p: remembered[p]["previous_step"] if p in remembered else torch.empty_like(p) for p in moving}
        return {p: buffer.copy_(p) for p, buffer in buffers.items()}

    def _correct(self, params: list[Tensor], before: Weights, remembered: Entries) -> None:
        for p in params:
            if p not in before and p not in remembered:
                continue
            known = remembered.get(p, {}).get("previous_step")
            correct = self._take_step if self._moves_the_base_trajectory else self._feed_back
            self.state[p]["previous_step"] = correct(p.detach(), before.get(p), known, self._strength(p))

    def _feed_back(self, weight: Tensor, before: Tensor | None, known: Tensor | None, strength: float) -> Tensor:
        """Correct a weight, and return its step, which is 0 without a gradient."""
        dtype = getattr(torch, self.buffer_dtype) if self.buffer_dtype else weight.dtype
        previous = torch.zeros_like(weight, dtype=dtype) if known is None else known
        feed_back(weight, before, previous, 0.0 if known is None else strength)
        return previous

    def _take_step(self, weight: Tensor, before: Tensor | None, known: Tensor | None, strength: float) -> Tensor:
        """Return the step of Y; at the first step, add strength * u_0 to Y."""
        if before is None:
            return torch.zeros_like(weight) if known is None else known.zero_()
        step = torch.sub(before, weight, out=before)
        if known is None:
            weight.add_(step, alpha=strength)
        return step

    def _write(self, weights: Weights) -> None:
        if not self._moves_the_base_trajectory:
            super()._write(weights)
            return
        for p, tensor in weights.items():
            step = self.state.get(p, {}).get("previous_step")
            if step is None:
                tensor.copy_(p)
            else:
                extrapolate(p.detach(), step, self._strength(p), tensor)

    def _strength(self, p: Tensor) -> float:
        """Return the strength, scaled by the share of the gradient that is delayed."""
        return self.strength * min(1.0, self.delay_of(p))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and restore ``buffer_dtype``: torch casts state to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if self.buffer_dtype and "previous_step" in state:
                state["previous_step"] = state["previous_step"].to(getattr(torch, self.buffer_dtype))


# -- the arithmetic on one tensor, in pieces, so that it needs no temporary of the tensor's size -----------------------


@torch.no_grad()
def feed_back(weight: Tensor, before: Tensor | None, previous: Tensor, strength: float) -> None:
    """Correct ``weight``, which the base optimizer has just stepped, and store the step.

        u = before - weight;  weight -= strength * (u - previous);  previous = u

    Args:
        weight: the weights after the base step; changed in place.
        before: the weights before the base step, of the same shape and dtype; None if they did not move (u = 0).
        previous: u of the previous update, in the dtype in which u is rounded; changed in place.
        strength: factor on the difference; 0 only stores the step.
    """
    scratch: Tensor | None = None
    for of_weight, of_previous, of_before in _pieces(weight, previous, weight if before is None else before):
        scratch = torch.empty_like(of_weight) if scratch is None else scratch  # the first piece is the largest
        step = torch.sub(of_before, of_weight, out=scratch.narrow(0, 0, of_weight.size(0)))
        _feed_back_piece(of_weight, step, of_previous, strength)


@torch.no_grad()
def extrapolate(weight: Tensor, step: Tensor, strength: float, out: Tensor) -> None:
    """Write ``weight - strength * step`` into ``out``, which may have another dtype; rounded once.

    Args:
        weight: tensor of any shape.
        step: tensor of the same shape and dtype.
        strength: factor on the step.
        out: tensor of the same shape that shares no memory with the other arguments.
    """
    for of_weight, of_step, of_out in _pieces(weight, step, out):
        of_out.copy_(torch.sub(of_weight, of_step, alpha=strength))


def _feed_back_piece(weight: Tensor, step: Tensor, previous: Tensor, strength: float) -> None:
    if step.dtype != previous.dtype:
        # The step is rounded once, so that the next update adds back exactly the bits that are subtracted now. The
        # difference of two rounded steps is taken in the weights' dtype, not in the buffer's.
        rounded = step.to(previous.dtype)
        if strength != 0:
            weight.sub_(torch.sub(rounded.to(weight.dtype), previous), alpha=strength)
        previous.copy_(rounded)
        return
    if strength != 0:
        torch.sub(step, previous, out=previous)  # the buffer holds the difference until the copy_() below
        weight.sub_(previous, alpha=strength)
    previous.copy_(step)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of tensors of one shape along the first dimension; they are views, whatever the strides."""
    if all(t.is_contiguous() for t in tensors):  # flattened, since even one row may be too large for a piece
        tensors = tuple(t.view(-1) for t in tensors)
    first = tensors[0]
    elements = CPU_CHUNK_ELEMENTS if first.device.type == "cpu" else CHUNK_ELEMENTS
    length = max(1, elements * first.size(0) // max(1, first.numel()))
    yield from zip(*(t.split(length) for t in tensors))
