"""The contract that the pipeline strategies expect of a LightningModule, spelled out as a base class."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.microbatch import number_of_samples, split_batch


class PipelineModule(L.LightningModule):
    """A LightningModule whose ``self.model`` is built layer by layer, each stage only its own layers.

    A plain LightningModule works under the pipeline strategies too, as long as its ``training_step`` calls
    ``self.model(...)`` once. This class adds the construction on the meta device: implement :meth:`build_model`, and
    every rank allocates its own stage alone, with initial weights that depend on the run's seed and the layer, never on
    the number of stages. Under any other strategy the same weights are built whole.

    Attributes:
        model: the network; ``None`` until :meth:`configure_model` ran.
        loss_reduction: ``"mean"`` if ``training_step`` returns the mean over the microbatch's weight (the default), or
            ``"sum"`` if it returns the sum.
    """

    loss_reduction: str = "mean"

    # The function itself, by which the strategies know that it draws no random numbers: it may be called again for the
    # batch on the host.
    split_batch = staticmethod(split_batch)
    """Cut a batch into ``parts`` microbatches along the first dimension; ``None`` stands for an empty slot."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None

    def build_model(self) -> nn.Module:
        """Return the network: an ``nn.Sequential`` or a module with ``pipeline_layers()``.

        It is called under ``torch.device("meta")``. Every submodule that owns parameters or buffers needs a
        ``reset_parameters()``, or one of its parents does.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build_model()")

    def microbatch_weight(self, microbatch: Any) -> float:
        """Weight of a microbatch in the mini-batch's mean loss: by default its number of samples.

        Strategies of this package call it with the microbatch on the host, as it was before it was moved to a GPU,
        where they know it.
        """
        return float(number_of_samples(microbatch))

    def configure_model(self) -> None:
        """Build ``self.model`` on the meta device; whole and materialised unless a pipeline strategy cuts it first."""
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = self.build_model()
        strategy = self.trainer.strategy if self._trainer is not None else None
        if not getattr(strategy, "materializes_stages", False):
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**63))
            materialize(pipeline_units(self.model), range(len(pipeline_units(self.model))), seed, torch.device("cpu"))
