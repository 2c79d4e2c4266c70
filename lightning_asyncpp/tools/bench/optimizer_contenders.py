"""What ``asyncpp bench optimizer`` compares: optimizers, and the stage of a GPT that they update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.optional_packages import optional_package
from lightning_asyncpp.tools.bench.names import FLOAT32, LIBRARY, OURS, TORCH, TORCH_FUSED

EXACT = (OURS, TORCH, TORCH_FUSED, LIBRARY)
"""Whose results must be equal to rounding."""
ROUNDING = 0.02
"""Two bfloat16 iterations whose sums are taken in another order differ by about this share of the step; it is their own
distance from an iteration in float32, too."""

MUON_LR, ADAMW_LR, DECAY, BETAS, EPS = 3e-3, 1e-3, 0.1, (0.9, 0.95), 1e-8
_OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {},
    FLOAT32: {"newton_schulz_dtype": "float32"},
}


@dataclass(frozen=True)
class StageShape:
    """What the stage consists of.

    Attributes:
        layers: transformer blocks.
        width: of the residual stream.
        heads, kv_heads: of the attention.
        mlp: inner width of the feed-forward layers.
        vocab: rows of an embedding on this stage; 0 for a stage in the middle.
        context: tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    context: int

    def config(self) -> GPTConfig:
        """The model that the stage is cut from.

        Raises:
            ValueError: the sizes do not fit together.
        """
        return GPTConfig(
            vocab_size=max(1, self.vocab), context_length=self.context, num_layers=self.layers, dim=self.width,
            num_heads=self.heads, num_kv_heads=self.kv_heads, mlp_dim=self.mlp,
        )  # fmt: skip

    def build(self, device: torch.device) -> nn.Sequential:
        """The same weights whenever it is called."""
        torch.manual_seed(0)
        embedding, *blocks, _ = GPT(self.config()).pipeline_layers()
        units = {f"block{i}": block for i, block in enumerate(blocks)}
        stage = nn.Sequential()
        for name, unit in {**({"embedding": embedding} if self.vocab else {}), **units}.items():
            stage.add_module(name, unit)
        return stage.to(device)


def make_gradients(stage: nn.Module) -> list[Tensor]:
    """Gradients of low rank and noise, as those of training are: singular values that fall over some decades."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for p in stage.parameters():
        gradient = 1e-3 * torch.randn(p.shape, generator=generator)
        if p.ndim == 2:
            left, right = (torch.randn(size, 16, generator=generator) for size in p.shape)
            gradient += left * torch.logspace(0, -2, 16) @ right.T
        gradients.append(gradient.to(p.device))
    return gradients


def set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Give every parameter a gradient of its own: some optimizers write into them."""
    for p, gradient in zip(parameters, gradients):
        if p.grad is None:
            p.grad = gradient.clone()
        else:
            p.grad.copy_(gradient)


class TrainingWork:
    """Forward and backward of one sequence through the stage, as a pipeline runs them.

    Args:
        shape: of the stage.
        stage: whose gradients it fills.
        bfloat16: whether products are taken in bfloat16, under autocast.
    """

    def __init__(self, shape: StageShape, stage: nn.Sequential, bfloat16: bool) -> None:
        self.stage, self.bfloat16 = stage, bfloat16
        self.device = next(stage.parameters()).device
        size = (1, shape.context) if shape.vocab else (1, shape.context, shape.width)
        self.input = torch.zeros(size, dtype=torch.int64) if shape.vocab else torch.randn(size, requires_grad=True)
        self.input = self.input.to(self.device).detach().requires_grad_(not shape.vocab)
        self.output_gradient = torch.randn(1, shape.context, shape.width, device=self.device)

    def run(self) -> None:
        """Once, gradients added to those that are there."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext():
            output = self.stage(self.input)
        output.backward(self.output_gradient.to(output.dtype))


class MissingError(RuntimeError):
    """A package that a system needs is not installed; the message says how to get it."""


class Contender:
    """One optimizer over weights of its own.

    Args:
        system: which.
        stage: whose parameters it steps.

    Raises:
        MissingError: the system needs a package that is not installed.
    """

    def __init__(self, system: str, stage: nn.Module) -> None:
        self.system = system
        self.parameters = list(stage.parameters())
        self._optimizers = _make(system, stage)

    def step(self) -> None:
        """One update."""
        for optimizer in self._optimizers:
            optimizer.step()


def ours(stage: nn.Module, **options: Any) -> MuonAdamW:
    """The package's optimizer, set up as all the others."""
    return MuonAdamW(
        stage.named_parameters(), lr=MUON_LR, adamw_lr=ADAMW_LR, weight_decay=DECAY, adamw_betas=BETAS, adamw_eps=EPS,
        **options,
    )  # fmt: skip


def _make(system: str, stage: nn.Module) -> Sequence[Optimizer]:
    if system in _OPTIONS:
        return [ours(stage, **_OPTIONS[system])]
    matrices, others = (group["params"] for group in ours(stage).param_groups)
    if system == LIBRARY:
        return [_library(matrices, others)]
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    fused = True if system == TORCH_FUSED else None
    return [muon, torch.optim.AdamW(others, lr=ADAMW_LR, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=fused)]


def _library(matrices: list[Tensor], others: list[Tensor]) -> Optimizer:
    try:
        library = optional_package("pytorch_optimizer", LIBRARY)
    except ImportError as error:
        raise MissingError(str(error)) from None
    groups = [
        {"params": matrices, "use_muon": True, "lr": MUON_LR, "weight_decay": DECAY, "use_adjusted_lr": True},
        {"params": others, "use_muon": False, "lr": ADAMW_LR, "weight_decay": DECAY, "betas": BETAS, "eps": EPS},
    ]
    optimizer: Optimizer = library.Muon(groups)
    return optimizer


class FeedbackAlone:
    """Error Feedback around an optimizer that does nothing: what it adds to an update.

    Args:
        stage: whose parameters it corrects; their weights before the step are lent to it, as strategies do.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.parameters = list(stage.parameters())
        make: Callable[..., Optimizer] = partial(_Nothing, defaults={})
        self._feedback = ErrorFeedback(self.parameters, make)
        self._before: dict[Tensor, Tensor] = {p: p.detach().clone() for p in self.parameters}

    def step(self) -> None:
        """One update."""
        with self._feedback.weights_before(self._before):
            self._feedback.step()


class _Nothing(Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the weights as they are."""
