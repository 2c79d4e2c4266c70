"""One optimizer for a whole model: Muon or NorMuon for hidden matrices, AdamW for all other parameters.

Muon orthogonalises the update of a matrix that maps hidden features to hidden features. Embeddings and output heads are
matrices by shape only (their rows are independent vectors), so the choice needs names besides shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS, orthogonalize

DEFAULT_ADAMW_NAMES = (
    r"embed|(^|[._])emb([._]|$)"  # embedding, tok_embeddings, pos_emb
    r"|(^|\.)(wte|wpe|lm_head|head|unembed|classifier)(\.|$)|(^|\.)output(\.weight)?$"
    # in transformers: heads of classifiers and of BERT, the embedding of T5 and BART, T5's relative position biases
    r"|(^|\.)(score|decoder|shared)\.weight$|relative_attention_bias"
    r"|bias(es)?$|norm[^.]*(\.[^.]*)?$"  # stacked biases and norm scales of experts and heads are matrices by shape
)
"""Regular expression searched in dotted parameter names; AdamW updates the parameters that match."""

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which the fused step of AdamW is known to equal the plain one."""

RMS = 0.2
"""Root mean square of an update's entries with ``match_rms_adamw``, in units of the learning rate."""

DTYPES = ("bfloat16", "float32", "float64")
LR_ADJUSTMENTS = ("match_rms_adamw", "original")

BATCH_ELEMENTS = 2**25
"""Maximum number of elements in one joined product: enough to fill a GPU, and little memory (64 MiB in bfloat16)."""


class Stack(NamedTuple):
    """Views of a weight, its gradient and its state, each of shape (matrices, rows, columns); a row is a neuron.

    Attributes:
        weight: the weight.
        grad: its gradient.
        momentum: its momentum.
        second_moment: (matrices, rows, 1), the mean square of each neuron; None for Muon.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second_moment: Tensor | None = None


class MuonAdamW(Optimizer):
    """Muon for hidden weight matrices and AdamW for embeddings, the output head, norms, biases and vectors.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``torch.optim.Muon``): the momentum of each
    matrix is orthogonalised by a few Newton-Schulz iterations, so that a step is equally large in all directions. A
    matrix is updated as by ``torch.optim.Muon``, a 3-D weight (experts, out, in) as one matrix (out, in) per expert,
    and all other parameters exactly as by ``torch.optim.AdamW``. Parameters whose gradient is None do not change.

    The algorithm is chosen parameter by parameter, even within a group: docs/reference/optimizers.md has the rule. A
    3-D weight is taken for one of experts unless its name has ``conv``: give other convolutions ``use_muon=False``.

    Names come from ``module.named_parameters()``, or from :meth:`name_parameters`, which strategies call before the
    first step.

    Options are read from the groups at each step, except ``use_muon`` and ``adamw_names``: the algorithm is chosen
    once. AdamW's learning rate is ``lr`` times ``adamw_lr_ratio``, the initial ``adamw_lr / lr``, so schedulers change
    both rates. A group that sets ``lr`` or ``weight_decay`` sets it for both algorithms, unless it sets ``adamw_lr`` or
    ``adamw_weight_decay`` as well.

    Memory: one buffer per Muon parameter and two per AdamW parameter, in the parameter's dtype, and temporaries for
    about 2**25 elements at a time. On CPUs without bfloat16 units choose ``newton_schulz_dtype="float32"``: bfloat16
    products are some 30 times slower there.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size of Muon; with ``match_rms_adamw`` it is on AdamW's scale.
        adamw_lr: step size of AdamW; None for ``lr``.
        momentum: decay rate of Muon's gradient average, in [0, 1).
        nesterov: whether to look one momentum step ahead.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None for ``weight_decay``.
        adamw_betas: decay rates of AdamW's averages of the gradient and of its square.
        adamw_eps: constant added to AdamW's denominator.
        newton_schulz_steps: number of iterations per matrix.
        coefficients: coefficients of the quintic iteration.
        adjust_lr: scale of a matrix's learning rate, as ``adjust_lr_fn`` of ``torch.optim.Muon``: "match_rms_adamw" for
            lr * 0.2 * sqrt(max(fan_out, fan_in)), "original" for lr * sqrt(max(1, fan_out / fan_in)).
        newton_schulz_dtype: "bfloat16" (as torch), "float32" or "float64", or the torch dtype.
        adamw_names: regular expression searched in parameter names; AdamW updates the parameters that match.
        batched: whether to join matrices of equal shape into one product. None joins them on GPUs, except with
            deterministic algorithms (``torch.use_deterministic_algorithms``), since the bits of a matrix's update could
            depend on which matrices share its batch.

    Raises:
        ValueError: an option cannot be used.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        newton_schulz_steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        newton_schulz_dtype: str | torch.dtype = "bfloat16",
        adamw_names: str = DEFAULT_ADAMW_NAMES,
        batched: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "adamw_lr": adamw_lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adamw_weight_decay": adamw_weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "newton_schulz_steps": newton_schulz_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            # A string is readable in checkpoints and logs.
            "newton_schulz_dtype": str(newton_schulz_dtype).removeprefix("torch."),
            "adamw_names": adamw_names,
            "batched": batched,
            "use_muon": None,
        }
        # Keys are ids, since references would keep alive parameters that were removed from the groups.
        self._uses_muon: dict[int, bool] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and choose the algorithm of each parameter, unless it depends on a name that is missing."""
        for key in ("lr", "weight_decay"):
            if key in param_group:
                param_group.setdefault(f"adamw_{key}", None)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, known in (("adjust_lr", LR_ADJUSTMENTS), ("newton_schulz_dtype", DTYPES)):
            if group[name] not in known:
                raise ValueError(f"{type(self).__name__}: {name}={group[name]!r} must be one of {', '.join(known)}")
        adamw_lr = group.pop("adamw_lr")
        if adamw_lr is not None and not group["lr"]:
            raise ValueError(f"lr={group['lr']}: must be above 0, as adamw_lr={adamw_lr} is kept as a multiple of it")
        group.setdefault("adamw_lr_ratio", 1.0 if adamw_lr is None else adamw_lr / group["lr"])
        self._choose_all(group)

    def name_parameters(self, names: Mapping[Tensor, str]) -> None:
        """Choose the algorithm of parameters by their names, unless it is chosen already.

        Call it before the first step if the optimizer was made without names.

        Args:
            names: name of each parameter in the module: ``{p: name for name, p in module.named_parameters()}``.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p in names and id(p) not in self._uses_muon:
                    self._choose(p, names[p], group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state.

        A copied or unpickled optimizer has new parameter objects, so it chooses their algorithms anew, by the names in
        its groups.
        """
        super().__setstate__(state)
        if "_uses_muon" not in self.__dict__:
            self._uses_muon = {}
            for group in self.param_groups:
                self._choose_all(group)

    def _choose_all(self, group: dict[str, Any]) -> None:
        names = group.get("param_names", [None] * len(group["params"]))
        for p, name in zip(group["params"], names, strict=True):
            self._uses_muon.pop(id(p), None)
            self._choose(p, name, group)

    def _choose(self, p: Tensor, name: str | None, group: dict[str, Any]) -> None:
        if not is_matrix(p.shape):
            self._uses_muon[id(p)] = False
        elif group["use_muon"] is not None:
            self._uses_muon[id(p)] = group["use_muon"]
        elif name is not None:
            is_convolution = p.ndim == 3 and "conv" in name
            self._uses_muon[id(p)] = not is_convolution and re.search(group["adamw_names"], name) is None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; return the result of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in moving if self._is_muons(p)]
            self._step_matrices(matrices, group)
            others = [p for p in moving if not self._is_muons(p)]
            step_adamw(others, self.state, group["lr"] * group["adamw_lr_ratio"], group)
        return loss

    def _is_muons(self, p: Tensor) -> bool:
        if id(p) not in self._uses_muon:
            raise ValueError(
                f"{type(self).__name__} cannot tell whether a parameter of shape {tuple(p.shape)} is a hidden matrix or"
                " an embedding or head, because it has no name. Make the optimizer from module.named_parameters(), or "
                "call name_parameters() before the first step."
            )
        return self._uses_muon[id(p)]

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if "beta2" in group and "second_moment_buffer" not in state:
                state["second_moment_buffer"] = torch.zeros_like(p.detach().narrow(-1, 0, 1))
        stacks = [stack for p in params for stack in _stacks(p, self.state[p])]
        for batch in _batches(stacks, group["batched"]):
            self._step_batch(batch, group)

    def _step_batch(self, batch: list[Stack], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        momenta = []
        for stack in batch:
            stack.momentum.lerp_(stack.grad, 1 - momentum)
            momenta.append(stack.grad.lerp(stack.momentum, momentum) if group["nesterov"] else stack.momentum)
        steps = orthogonalize(
            momenta,
            steps=group["newton_schulz_steps"],
            coefficients=tuple(group["coefficients"]),
            dtype=getattr(torch, group["newton_schulz_dtype"]),
        ).split([stack.weight.size(0) for stack in batch])
        for stack, step in zip(batch, steps):
            directions, factor = self._scale(step, stack, group)
            stack.weight.mul_(1 - lr * group["weight_decay"])
            stack.weight.add_(directions, alpha=-lr * factor)

    def _scale(self, directions: Tensor, stack: Stack, group: dict[str, Any]) -> tuple[Tensor, float]:
        """Return the directions of a step (matrices, rows, columns), and the factor on its learning rate."""
        return directions, lr_scale(group["adjust_lr"], *stack.weight.shape[-2:])


class NorMuonAdamW(MuonAdamW):
    """NorMuon, a Muon in which all neurons take steps of equal size, for hidden matrices, and AdamW for the rest.

    NorMuon (Li et al. 2025, arXiv 2510.05491, Algorithm 1): orthogonalised updates move some neurons much more than
    others. So each row of the orthogonalised momentum O is divided by the root of a running mean of its squares, and
    the matrix is rescaled to the size of Muon's update::

        M = momentum * M + (1 - momentum) * G
        O = NewtonSchulz(M)                                   with nesterov: of (1 - momentum) * G + momentum * M
        v = beta2 * v + (1 - beta2) * mean_over_row(O * O)    one number per neuron
        N = O / (sqrt(v) + eps)
        W = W - lr * weight_decay * W - lr * 0.2 * sqrt(rows * columns) / |N|_F * N

    A bias correction of v would cancel in the last line. The rest is as in
    :class:`~lightning_asyncpp.optim.MuonAdamW`. The paper's listing has no Nesterov momentum, the authors' code does.
    With ``adjust_lr="original"`` the update keeps the norm of O and is scaled by sqrt(max(1, fan_out / fan_in)), as in
    the authors' code.

    Memory: that of MuonAdamW and one number per neuron.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size of NorMuon; with ``match_rms_adamw`` it is on AdamW's scale.
        beta2: decay rate of the average of each neuron's squares, in [0, 1).
        eps: constant added to the root of that average.
        **options: options of MuonAdamW.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, beta2: float = 0.95, eps: float = 1e-10, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, **options)
        self.defaults.update(beta2=beta2, eps=eps)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    def _scale(self, directions: Tensor, stack: Stack, group: dict[str, Any]) -> tuple[Tensor, float]:
        """Normalise the neurons of ``directions``, and rescale each matrix to Muon's size."""
        assert stack.second_moment is not None
        eps, sides = group["eps"], (-2, -1)
        fan_out, fan_in = directions.shape[-2:]
        directions = directions.to(stack.weight.dtype)
        mean_square = directions.square().mean(dim=-1, keepdim=True)
        stack.second_moment.lerp_(mean_square, 1 - group["beta2"])
        scaled = directions / stack.second_moment.sqrt().add_(eps)
        # Clamp, since the norm is 0 if all gradients so far were 0.
        norm = torch.linalg.vector_norm(scaled, dim=sides, keepdim=True).clamp_(min=eps)
        if group["adjust_lr"] == "original":
            before = torch.linalg.vector_norm(directions, dim=sides, keepdim=True)
            return scaled.mul_(before / norm), lr_scale("original", fan_out, fan_in)
        return scaled.mul_(RMS * math.sqrt(fan_out * fan_in) / norm), 1.0


def lr_scale(adjust_lr: str, fan_out: int, fan_in: int) -> float:
    """Return the factor on a matrix's learning rate, as ``adjust_lr_fn`` of torch.optim.Muon."""
    if adjust_lr == "original":
        return math.sqrt(max(1, fan_out / fan_in))
    return RMS * math.sqrt(max(fan_out, fan_in))


def _stacks(p: Tensor, state: dict[str, Any]) -> Iterator[Stack]:
    """Cut a weight into stacks of bounded size; the cut depends only on this weight's shape."""
    tensors = [p.detach(), p.grad, state["momentum_buffer"], state.get("second_moment_buffer")]
    views = [t if t.ndim == 3 else t.unsqueeze(0) for t in tensors if t is not None]
    matrices = max(1, BATCH_ELEMENTS // math.prod(p.shape[-2:]))
    yield from (Stack(*pieces) for pieces in zip(*(view.split(matrices) for view in views)))


def _batches(stacks: list[Stack], batched: bool | None) -> Iterator[list[Stack]]:
    """Join stacks whose matrices have the same shape and device, up to ``BATCH_ELEMENTS`` per batch."""
    batches: dict[Any, list[Stack]] = {}
    elements: dict[Any, int] = {}
    for stack in stacks:
        key, size = (stack.weight.shape[-2:], stack.weight.device), stack.weight.numel()
        full = elements.get(key, 0) + size > BATCH_ELEMENTS
        if key in batches and (full or not _may_batch(stack.weight.device, batched)):
            yield batches.pop(key)
            elements[key] = 0
        batches.setdefault(key, []).append(stack)
        elements[key] = elements.get(key, 0) + size
    yield from batches.values()


def _may_batch(device: torch.device, batched: bool | None) -> bool:
    if batched is not None:
        return batched
    # On a CPU a batched product is no faster. On a GPU the library may choose another kernel for another batch size, so
    # deterministic results must not depend on which matrices share a stage.
    return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether ``shape`` is (rows, columns) or (experts, rows, columns), with several rows and columns."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def step_adamw(params: list[Tensor], state: dict[Tensor, dict[str, Any]], lr: float, group: dict[str, Any]) -> None:
    """Step parameters as ``torch.optim.AdamW`` does, fused where possible.

    Args:
        params: parameters to update in place; each has a gradient.
        state: state of each parameter, with the entries of ``torch.optim.AdamW``; made at the first gradient.
        lr: learning rate of AdamW.
        group: options ``adamw_betas``, ``adamw_eps``, and ``adamw_weight_decay``; if the last is None, ``weight_decay``
            is used.
    """
    fused: list[Tensor] = []
    plain: list[Tensor] = []
    for p in params:
        entries = state[p]
        if "exp_avg" not in entries:
            entries["step"] = torch.zeros((), dtype=torch.float32)
            entries["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            entries["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        (fused if _can_be_fused(p, entries) else plain).append(p)
    for p in fused:  # the kernel reads the count on the parameter's device
        state[p]["step"] = state[p]["step"].to(p.device)
    decay = group["adamw_weight_decay"]
    for some, by_kernel in ((fused, True), (plain, None)):
        adamw(
            some,
            [p.grad for p in some if p.grad is not None],
            [state[p]["exp_avg"] for p in some],
            [state[p]["exp_avg_sq"] for p in some],
            [],
            [state[p]["step"] for p in some],
            fused=by_kernel,
            amsgrad=False,
            beta1=group["adamw_betas"][0],
            beta2=group["adamw_betas"][1],
            lr=lr,
            weight_decay=group["weight_decay"] if decay is None else decay,
            eps=group["adamw_eps"],
            maximize=False,
        )


def _can_be_fused(p: Tensor, entries: dict[str, Any]) -> bool:
    """Return whether the fused kernel equals the plain step up to rounding.

    The kernel passes over memory once, instead of a dozen times. On CPUs the kernel ignores strides: if a gradient has
    other strides than its parameter, the kernel silently pairs the wrong elements (torch 2.15).
    """
    tensors = (p, p.grad, entries["exp_avg"], entries["exp_avg_sq"])
    return (
        p.is_floating_point()
        and p.device.type in FUSED_DEVICES
        and all(t.is_contiguous() for t in tensors if t is not None)
    )
