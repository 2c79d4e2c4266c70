"""Fabric strategies: a hand-written training loop over pipeline stages, in processes of their own or in one."""

from lightning_asyncpp.fabric.strategy import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy

__all__ = ["AsyncPipelineStrategy", "DelayedGradientStrategy", "SyncPipelineStrategy"]
