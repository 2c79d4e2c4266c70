"""Hooks of modules and callbacks under a pipeline: when they come, what they may read, what they call."""
