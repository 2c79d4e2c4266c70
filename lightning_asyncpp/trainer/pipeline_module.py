"""Base class of LightningModules whose network is built stage by stage."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.microbatch import number_of_samples


class PipelineModule(L.LightningModule):
    """LightningModule whose ``self.model`` is built layer by layer; each stage builds only its own layers.

    A plain LightningModule works under the pipeline strategies too, as long as its ``training_step`` calls its network
    once. This class adds the construction on the meta device: implement :meth:`build_model`, and every rank allocates
    only its own stage. The initial weights depend on the run's seed and the layer, never on the number of stages. Under
    other strategies the whole model is built, with the same weights.

    Like any module it may define ``split_batch(self, batch, parts)``, and ``loss_reduction = "sum"`` for steps that
    return sums.

    Attributes:
        model: the network; ``None`` until :meth:`configure_model` ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None

    def build_model(self) -> nn.Module:
        """Return the network: an ``nn.Sequential`` or a module with ``pipeline_layers()``.

        It is called under ``torch.device("meta")``. Every submodule that owns parameters or buffers, or one of its
        parents, needs a ``reset_parameters()``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build_model()")

    def microbatch_weight(self, microbatch: Any) -> float:
        """Return the weight of a microbatch in the mini-batch's mean loss: by default its number of samples.

        Strategies of this package call it before the transfer to a GPU, if possible.
        """
        return float(number_of_samples(microbatch))

    def configure_model(self) -> None:
        """Build ``self.model`` on the meta device, and materialise it unless a pipeline strategy does so later."""
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = self.build_model()
        strategy = self.trainer.strategy if self._trainer is not None else None
        if not getattr(strategy, "materializes_stages", False):
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**63))
            materialize(pipeline_units(self.model), range(len(pipeline_units(self.model))), seed, torch.device("cpu"))
