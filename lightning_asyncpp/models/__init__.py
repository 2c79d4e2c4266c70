"""Language models that a pipeline can cut, and their saved weights."""

from lightning_asyncpp.models.config import GPTConfig, MoEConfig
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.saved import SavedGPT, WeightsError, open_saved, start_from

__all__ = ["GPT", "GPTConfig", "MoEConfig", "SavedGPT", "WeightsError", "open_saved", "start_from"]
