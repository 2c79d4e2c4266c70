"""Asynchronous pipeline parallelism (PipeDream-2BW) for PyTorch Lightning and Fabric.

Importing this package registers the strategy names ``"async_pipeline"``, ``"sync_pipeline"`` and ``"delayed_gradient"``
for ``Trainer`` and for ``Fabric``, and for notebooks ``"async_pipeline_notebook"`` and ``"sync_pipeline_notebook"``.
Fabric's classes are in :mod:`lightning_asyncpp.fabric`.
"""

import lightning_asyncpp.light_start  # noqa: I001 - before anything that imports torch

from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_asyncpp.fabric as _fabric
import lightning_asyncpp.optim  # noqa: F401 - so that command lines find the optimizers by class name
from lightning_asyncpp.adapt import pipelined
from lightning_asyncpp.core.cut.units import apply_layers
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import register as _register
from lightning_asyncpp.trainer import (
    AsyncPipelineStrategy,
    DelayedGradientStrategy,
    GPTModule,
    PipelineModule,
    PipelineMonitor,
    PipelineProgressBar,
    PipelineTrace,
    SampleText,
    SyncPipelineStrategy,
)
from lightning_asyncpp.trainer.batch_ends import after_own_update
from lightning_asyncpp.trainer.hf_module import HFModule
from lightning_asyncpp.version import __version__

if TYPE_CHECKING:
    from lightning_asyncpp.tools.check import check_model
else:

    def __getattr__(name: str) -> Any:
        """Import a name that few programs need, on its first use."""
        if name == "check_model":
            from lightning_asyncpp.tools.check import check_model

            return check_model
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register(
    StrategyRegistry,
    async_pipeline=AsyncPipelineStrategy,
    sync_pipeline=SyncPipelineStrategy,
    delayed_gradient=DelayedGradientStrategy,
)
_register(
    STRATEGY_REGISTRY,
    async_pipeline=_fabric.AsyncPipelineStrategy,
    sync_pipeline=_fabric.SyncPipelineStrategy,
    delayed_gradient=_fabric.DelayedGradientStrategy,
)

__all__ = [
    "AsyncPipelineStrategy",
    "ConfigurationError",
    "DelayedGradientStrategy",
    "GPTModule",
    "HFModule",
    "PipelineModule",
    "PipelineMonitor",
    "PipelineProgressBar",
    "PipelineTrace",
    "SampleText",
    "SyncPipelineStrategy",
    "__version__",
    "after_own_update",
    "apply_layers",
    "check_model",
    "pipelined",
]
