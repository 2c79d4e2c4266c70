"""Language models that a pipeline can be cut from, and their saved weights."""

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.errors import WeightsError
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.moe_config import MoEConfig
from lightning_asyncpp.models.opening import open_saved
from lightning_asyncpp.models.saved import SavedGPT
from lightning_asyncpp.models.start import start_from

__all__ = ["GPT", "GPTConfig", "MoEConfig", "SavedGPT", "WeightsError", "open_saved", "start_from"]
