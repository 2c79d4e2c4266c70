"""Asynchronous pipeline parallelism (PipeDream-2BW) for PyTorch Lightning and Fabric.

Importing this package registers ``Trainer(strategy="async_pipeline")`` and ``"sync_pipeline"``.
"""

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pytorch import (
    AsyncPipelineStrategy,
    GPTModule,
    PipelineModule,
    SyncPipelineStrategy,
    TokensPerSecond,
)
from lightning_asyncpp.pytorch.strategy import register

register()

__all__ = [
    "AsyncPipelineStrategy",
    "ConfigurationError",
    "GPTModule",
    "PipelineModule",
    "SyncPipelineStrategy",
    "TokensPerSecond",
]
