"""Asynchronous pipeline parallelism (PipeDream-2BW) for PyTorch Lightning and Fabric.

Importing this package registers the strategy names ``"async_pipeline"``, ``"sync_pipeline"`` and ``"delayed_gradient"``
for ``Trainer`` and for ``Fabric``; Fabric's classes are in :mod:`lightning_asyncpp.fabric`.
"""

from typing import TYPE_CHECKING, Any

from lightning_asyncpp.fabric.delayed_gradient import register as register_delayed_gradient_for_fabric
from lightning_asyncpp.fabric.strategy import register as register_for_fabric
from lightning_asyncpp.pipeline.cut.units import apply_layers
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pytorch import (
    AsyncPipelineStrategy,
    DelayedGradientStrategy,
    GPTModule,
    PipelineModule,
    PipelineMonitor,
    PipelineTrace,
    SampleText,
    SyncPipelineStrategy,
    TokensPerSecond,
)
from lightning_asyncpp.pytorch.delayed_gradient import register as register_delayed_gradient
from lightning_asyncpp.pytorch.module_first import after_own_update
from lightning_asyncpp.pytorch.strategy import register

if TYPE_CHECKING:
    from lightning_asyncpp.tools.check import check_model
else:

    def __getattr__(name: str) -> Any:
        """A tool, for scripts; none is imported before it is used."""
        if name == "check_model":
            from lightning_asyncpp.tools.check import check_model

            return check_model
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
register_delayed_gradient()
register_for_fabric()
register_delayed_gradient_for_fabric()

__all__ = [
    "AsyncPipelineStrategy",
    "ConfigurationError",
    "DelayedGradientStrategy",
    "GPTModule",
    "PipelineModule",
    "PipelineMonitor",
    "PipelineTrace",
    "SampleText",
    "SyncPipelineStrategy",
    "TokensPerSecond",
    "after_own_update",
    "apply_layers",
    "check_model",
]
