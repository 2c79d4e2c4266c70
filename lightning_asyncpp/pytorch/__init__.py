"""The former name of :mod:`lightning_asyncpp.trainer`, which scripts may import from."""

from lightning_asyncpp.trainer import *  # noqa: F403
from lightning_asyncpp.trainer import __all__ as __all__
