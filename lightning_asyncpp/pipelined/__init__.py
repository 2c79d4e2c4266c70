"""Models of other libraries, cut by replaying their own forward around their blocks."""

from lightning_asyncpp.pipelined.adapt import pipelined

__all__ = ["pipelined"]
