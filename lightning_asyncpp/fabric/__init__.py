"""Fabric strategies for a hand-written training loop over pipeline stages, in one process per stage or in one."""

from lightning_asyncpp.fabric.strategy import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy

__all__ = ["AsyncPipelineStrategy", "DelayedGradientStrategy", "SyncPipelineStrategy"]
