"""Models of other libraries, cut by replaying their own forward around their blocks."""

from lightning_asyncpp.adapt.own_forward import problems_of_layers
from lightning_asyncpp.adapt.pipelined import drawing_alike, is_adapted, pipelined, problems_of_adapting

__all__ = ["drawing_alike", "is_adapted", "pipelined", "problems_of_adapting", "problems_of_layers"]
