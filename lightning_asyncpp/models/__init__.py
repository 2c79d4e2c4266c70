"""Language models that a pipeline can be cut from."""

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.gpt import GPT

__all__ = ["GPT", "GPTConfig"]
