"""Whether a module's ``configure_optimizers`` gives a stage's parameters what it would give them in the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.cut.stage import Stage
from lightning_asyncpp.pipeline.cut.ties import names_on
from lightning_asyncpp.pipeline.optimizers.by_position import (
    asked_again,
    may_go_by_position,
    options_of,
    position_problems,
)


def grouping_problems(optimizers: Sequence[Optimizer], module: LightningModule, stage: Stage) -> list[str]:
    """What is wrong with the groups of a stage that trains for the first time: they go by the position of parameters.

    Args:
        optimizers: as configure_optimizers made them.
        module: with the stage in it.
        stage: as it was cut.
    """
    layers = stage.layers_elsewhere
    trained = [parameter for parameter in stage.parameters.values() if parameter.requires_grad]
    if not layers or not optimizers or not may_go_by_position(optimizers, trained):
        return []
    # What stages share has another name in the whole; their copies are compared with each other.
    shared = {stage.parameters[name] for name in names_on(stage.index, stage.whole.ties)}
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p not in shared}
    try:
        again = asked_again(module, stage.model, layers, module.configure_optimizers)
    except Exception as error:
        warnings.warn(
            "configure_optimizers makes several groups of parameters, or leaves some out. Whether it gives this stage's"
            f" what it would give them in the whole model was not looked at, for it raised {type(error).__name__}:"
            f" {error}",
            stacklevel=2,
        )
        return []
    return position_problems(options_of(optimizers, names), options_of(again, names))
