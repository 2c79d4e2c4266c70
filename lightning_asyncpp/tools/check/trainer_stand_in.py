"""What configure_optimizers asks of its Trainer, where there is none: how long the training is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

_STEPS = 1000


class TrainerStandIn:
    """Has the numbers that learning rates are planned by; asked for anything else, it says that it has not got it.

    Which parameters an optimizer has, and in which groups, does not depend on them.
    """

    estimated_stepping_batches = max_steps = num_training_batches = _STEPS
    max_epochs = num_nodes = num_devices = world_size = accumulate_grad_batches = 1
    current_epoch = global_step = global_rank = local_rank = 0
    is_global_zero = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name}: a check has no Trainer, only its numbers of steps, epochs and devices"
        )


_STAND_IN = TrainerStandIn()


def give_trainer(module: LightningModule) -> None:
    """Attach the stand-in to a copy of the user's module that has no Trainer."""
    try:
        module.trainer  # noqa: B018  # raises where there is none
    except RuntimeError:
        module.trainer = _STAND_IN  # type: ignore[assignment]
