"""Fabric strategies for a hand-written training loop over pipeline stages."""

from lightning_asyncpp.fabric.strategy import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy

__all__ = ["AsyncPipelineStrategy", "DelayedGradientStrategy", "SyncPipelineStrategy"]
