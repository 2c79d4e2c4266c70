"""What a module and a Trainer ask for that a delayed gradient cannot do, each with the mend."""

from __future__ import annotations

import inspect

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_asyncpp.pipeline.batches.user_hooks import problems_of_reduction
from lightning_asyncpp.pipeline.emulator.gradient_delay import DelaySettings
from lightning_asyncpp.pytorch.refusals import backward_problems


def delayed_problems(settings: DelaySettings, module: LightningModule, trainer: L.Trainer) -> list[str]:
    """What the module and the Trainer ask for that a delayed gradient cannot do."""
    problems: list[str] = []
    if trainer.state.fn != TrainerFn.FITTING:
        return problems
    if not module.automatic_optimization:
        problems.append(
            "automatic_optimization=False: with manual optimization the module decides when to step and on which"
            " weights; use automatic optimization, or Fabric"
        )
    if settings.micro_batches is None:
        return problems
    problems += backward_problems(module)
    if trainer.precision in ("16-mixed", "16-true"):
        problems.append(
            f"precision={trainer.precision!r} is not supported with micro_batches, which computes as a pipeline does;"
            " use bf16-mixed, or leave micro_batches out"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        problems.append("training_step(dataloader_iter) cannot be given micro-batches: take a batch")
    return problems + problems_of_reduction(getattr(module, "loss_reduction", "mean"))
