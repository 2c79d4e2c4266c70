"""Models that do not say where they can be cut: their own forward runs again around their blocks."""

from lightning_asyncpp.adapt.own_forward import problems_of_layers
from lightning_asyncpp.adapt.pipelined import drawing_alike, is_adapted, pipelined, problems_of_adapting

__all__ = ["drawing_alike", "is_adapted", "pipelined", "problems_of_adapting", "problems_of_layers"]
