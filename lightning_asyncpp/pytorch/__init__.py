"""Trainer strategies, and the base classes of modules made for them."""

from lightning_asyncpp.pytorch.delayed_gradient import DelayedGradientStrategy
from lightning_asyncpp.pytorch.gpt_module import GPTModule
from lightning_asyncpp.pytorch.pipeline_module import PipelineModule
from lightning_asyncpp.pytorch.pipeline_monitor import PipelineMonitor
from lightning_asyncpp.pytorch.pipeline_trace import PipelineTrace
from lightning_asyncpp.pytorch.sample_text import SampleText
from lightning_asyncpp.pytorch.strategy import AsyncPipelineStrategy, SyncPipelineStrategy
from lightning_asyncpp.pytorch.tokens_per_second import TokensPerSecond

__all__ = [
    "AsyncPipelineStrategy",
    "DelayedGradientStrategy",
    "GPTModule",
    "PipelineModule",
    "PipelineMonitor",
    "PipelineTrace",
    "SampleText",
    "SyncPipelineStrategy",
    "TokensPerSecond",
]
