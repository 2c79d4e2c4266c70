"""A GPT as a LightningModule, with next-token loss, auxiliary losses of experts, optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch.nn.functional as F
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.core.cut.whole_model import update_from_counts
from lightning_asyncpp.errors import check_choice
from lightning_asyncpp.models import GPT, GPTConfig, start_from
from lightning_asyncpp.models.gpt import ActivationCheckpointing
from lightning_asyncpp.models.saved import check_start
from lightning_asyncpp.trainer.pipeline_module import PipelineModule

IGNORED = -100
Decay = Literal["cosine", "wsd", "constant"]
_COOL_DOWN = 0.2
"""Share of the updates after the warmup in which the learning rate of ``decay="wsd"`` falls."""


def default_optimizer(parameters: Any) -> Optimizer:
    """Return Muon for the matrices of the blocks and AdamW for the rest."""
    from lightning_asyncpp.optim import MuonAdamW

    return MuonAdamW(parameters)


class GPTModule(PipelineModule):
    """LightningModule that pretrains a :class:`~lightning_asyncpp.models.GPT` on tokens, (batch, time + 1) int64.

    Tokens of -100 are padding: they are read as token 0 and do not count as targets.

    With a mixture of experts, auxiliary losses are added to the loss that is differentiated, but not to
    ``train_loss``. The routers' biases change once per update, and their statistics are logged
    (docs/guides/moe.md): by the strategies of this package or, under other strategies, by this module.

    Args:
        config: config of the model, or a mapping of its fields.
        optimizer: function that makes the optimizer from the whole model's named parameters; ``None``: ``MuonAdamW``
            with its defaults.
        warmup_steps: number of updates over which the learning rate rises linearly to the value set in the optimizer.
        decay: learning rate after the warmup. ``"cosine"`` falls along a cosine, ``"wsd"`` (warmup, stable, decay;
            arXiv 2404.06395) is constant and falls linearly in the last fifth of the updates after the warmup,
            ``"constant"`` does not fall.
        min_lr_ratio: learning rate at the end of the decay, as a share of the highest one.
        total_steps: number of updates after which the decay ends; ``None``: those of the run (``max_steps``, or
            ``max_epochs`` times the updates of an epoch).
        activation_checkpointing: activations that the blocks keep for the backward: ``"none"`` keeps all of them,
            ``"block"`` the inputs of the blocks, ``"selective"`` the results of matrix products and of attention. The
            rest is recomputed.
        compile_blocks: compile each block with ``torch.compile``; a mapping holds its arguments.
        initial_weights: weights with which training starts, in a folder of Hugging Face `transformers` (config.json and
            safetensors) or a checkpoint of this package; ``None``: random ones. Every stage reads only its own tensors,
            in fp32. ``config`` must describe the same model; ``context_length``, ``init_std`` and fields that only
            training uses, such as ``dropout``, may differ.
    """

    def __init__(
        self,
        config: GPTConfig,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,  # Lightning's OptimizerCallable
        warmup_steps: int = 0,
        decay: Decay = "cosine",
        min_lr_ratio: float = 0.1,
        total_steps: int | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool | dict[str, Any] = False,
        initial_weights: str | None = None,
    ) -> None:
        super().__init__()
        check_choice("decay", decay, Decay)
        self.config = GPTConfig(**config) if isinstance(config, Mapping) else config  # checkpoints hold a mapping
        self.optimizer = optimizer or default_optimizer
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.min_lr_ratio = min_lr_ratio
        self.total_steps = total_steps
        self.activation_checkpointing = activation_checkpointing
        self.compile_blocks = compile_blocks
        self.initial_weights = initial_weights
        self._counted = Collected()
        if initial_weights is not None:
            check_start(self.config, initial_weights)
        # A checkpoint has only plain values, so that reading it does not unpickle code: the optimizer is left out.
        # So are arguments for how the model is computed and where its weights come from.
        self.save_hyperparameters(ignore=["optimizer", "activation_checkpointing", "compile_blocks", "initial_weights"])
        self.hparams["config"] = asdict(self.config)

    def build_model(self) -> nn.Module:
        """Return the GPT."""
        model = GPT(self.config, self.activation_checkpointing, self.compile_blocks)
        if self.initial_weights is not None:
            start_from(model, self.initial_weights)
        return model

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a forward and its backward per token, for ``PipelineMonitor``."""
        return self.config.flops_per_token()

    def microbatch_weight(self, microbatch: Tensor) -> float:
        """Return the number of targets that count in ``microbatch`` (batch, time + 1)."""
        return float((microbatch[:, 1:] != IGNORED).sum())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log the mean loss of ``batch`` (batch, time + 1), in nats per target; return it plus the auxiliary losses."""
        with collecting() as collected:
            loss = self._mean_loss(batch)
            if self._counts_itself:
                for layer, counts in collected.take_statistics().items():
                    self._counted.add(layer, counts)
        self.log("train_loss", loss, prog_bar=True)
        return loss + collected.total_loss()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer, then update the routers' biases from the newest statistics, unless the strategy does."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._counts_itself:
            counted, self._counted = self._counted, Collected()
            assert self.model is not None
            self.log_dict(update_from_counts(self.model, counted))

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log and return the mean loss of ``batch`` (batch, time + 1), in nats per target."""
        loss = self._mean_loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log and return the mean loss of ``batch`` (batch, time + 1), in nats per target."""
        loss = self._mean_loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of each sequence of ``batch`` (batch, time + 1): (batch,) fp32, in nats per target."""
        losses, counts = self._losses(batch)
        return losses.sum(dim=1) / counts.clamp_min(1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer over the whole model's named parameters, and the learning-rate schedule."""
        assert self.model is not None
        return scheduled(self.optimizer(self.model.named_parameters()), self)

    @property
    def _counts_itself(self) -> bool:
        """Whether this module updates the routers itself, because the Trainer's strategy does not.

        False without a Trainer: then nothing calls :meth:`optimizer_step`, and whoever calls the steps must
        collect the statistics.
        """
        if self.config.moe is None or self._trainer is None:
            return False
        return not getattr(self.trainer.strategy, "applies_statistics", False)

    def _mean_loss(self, batch: Tensor) -> Tensor:
        losses, counts = self._losses(batch)
        # Without any target the mean is 0, since the NaN of 0 / 0 would reach the gradient.
        return losses.sum() / counts.sum().clamp_min(1)

    def _losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each target, (batch, time) fp32, and the number of targets of each sequence, (batch,)."""
        assert self.model is not None
        inputs, targets = batch[:, :-1], batch[:, 1:]  # (batch, time) each
        logits = self.model(inputs.clamp_min(0))  # (batch, time, vocab_size)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view(targets.shape), (targets != IGNORED).sum(dim=1)


def scheduled(optimizer: Optimizer, module: Any) -> OptimizerLRScheduler:
    """Return an optimizer and the learning-rate schedule that the module's arguments define, in Lightning's form."""
    scheduler = LambdaLR(optimizer, learning_rate_factor(module))
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "learning_rate"},
    }


def learning_rate_factor(module: Any) -> Callable[[int], float]:
    """Return a function: number of an update, counted from 0 -> factor of the optimizer's learning rate.

    Args:
        module: module with ``warmup_steps``, ``decay``, ``min_lr_ratio`` and ``total_steps``. If ``total_steps`` is
            None, the decay ends with the run of the module's Trainer.

    Raises:
        ValueError: the decay has no end.
    """
    warmup, decay, least, total = module.warmup_steps, module.decay, module.min_lr_ratio, module.total_steps
    if total is None and decay != "constant":
        total = module.trainer.estimated_stepping_batches
        if not math.isfinite(total) or total <= 0:
            raise ValueError(f"decay={decay!r} needs an end: set total_steps, or max_steps of the Trainer")

    def factor(step: int) -> float:
        if step < warmup:
            return float((step + 1) / warmup)
        if decay == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        falls = {"wsd": min(1.0, (1 - progress) / _COOL_DOWN), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return float(least + (1 - least) * falls[decay])

    return factor
