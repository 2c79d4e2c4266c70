"""Models of this package as folders of `transformers`, and back; nothing here imports it."""

from lightning_asyncpp.models.hf.reading import read_hf
from lightning_asyncpp.models.hf.writing import write_hf

__all__ = ["read_hf", "write_hf"]
