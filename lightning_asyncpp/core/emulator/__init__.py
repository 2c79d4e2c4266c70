"""Gradient delay without a pipeline: what the `delayed_gradient` strategies do, on one device or under DDP."""
