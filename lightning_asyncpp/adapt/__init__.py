"""Cuts of models without ``pipeline_layers()``: every stage runs the model's own forward."""

from lightning_asyncpp.adapt.pipelined import pipelined, problems_of_layers

__all__ = ["pipelined", "problems_of_layers"]
