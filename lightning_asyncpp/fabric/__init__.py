"""Fabric strategies: a hand-written training loop over pipeline stages, or with their gradient delay alone."""

from lightning_asyncpp.fabric.delayed_gradient import DelayedGradientStrategy
from lightning_asyncpp.fabric.strategy import AsyncPipelineStrategy, SyncPipelineStrategy

__all__ = ["AsyncPipelineStrategy", "DelayedGradientStrategy", "SyncPipelineStrategy"]
