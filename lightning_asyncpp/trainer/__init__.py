"""Trainer strategies, their callbacks, and LightningModules for them."""

from lightning_asyncpp.trainer.callbacks.pipeline_monitor import PipelineMonitor
from lightning_asyncpp.trainer.callbacks.pipeline_trace import PipelineTrace
from lightning_asyncpp.trainer.callbacks.sample_text import SampleText
from lightning_asyncpp.trainer.callbacks.terminal import PipelineProgressBar
from lightning_asyncpp.trainer.gpt_module import GPTModule
from lightning_asyncpp.trainer.pipeline_module import PipelineModule
from lightning_asyncpp.trainer.strategy import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy

__all__ = [
    "AsyncPipelineStrategy",
    "DelayedGradientStrategy",
    "GPTModule",
    "PipelineModule",
    "PipelineMonitor",
    "PipelineProgressBar",
    "PipelineTrace",
    "SampleText",
    "SyncPipelineStrategy",
]
