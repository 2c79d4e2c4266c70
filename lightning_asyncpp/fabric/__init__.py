"""Fabric strategies: a hand-written training loop over pipeline stages."""

from lightning_asyncpp.fabric.strategy import AsyncPipelineStrategy, SyncPipelineStrategy

__all__ = ["AsyncPipelineStrategy", "SyncPipelineStrategy"]
