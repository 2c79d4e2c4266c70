"""Cuts of models without ``pipeline_layers()``, whose own forward runs on every stage."""

from lightning_asyncpp.adapt.pipelined import pipelined, problems_of_layers

__all__ = ["pipelined", "problems_of_layers"]
