"""The optimizers that ``asyncpp bench optimizer`` compares, all with the same split into Muon's part and AdamW's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.tools.bench.names import FLOAT32, GRAM, LIBRARY, OURS, TORCH, TORCH_FUSED

EXACT = (OURS, TORCH, TORCH_FUSED, LIBRARY)
"""Whose results must be equal to rounding."""

MUON_LR, ADAMW_LR, DECAY, BETAS, EPS = 3e-3, 1e-3, 0.1, (0.9, 0.95), 1e-8
_OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {},
    GRAM: {"newton_schulz_form": "gram"},
    FLOAT32: {"newton_schulz_dtype": "float32"},
}


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
        library = importlib.import_module("pytorch_optimizer")
    except ImportError:
        raise MissingError("pytorch_optimizer is not installed: `pip install pytorch_optimizer`") from None
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
