"""Does a model's own loss shift its labels by one? That of causal language models of `transformers` does."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_CAUSAL = "ForCausalLM"  # of the loss function in transformers that shifts; GPT2LMHeadModel and others have it, too


def model_that_shifts(network: nn.Module | None) -> str | None:
    """Name of the model of `transformers` whose own loss shifts its labels, which may be inside adapters of `peft`.

    Names of classes do not tell: BartForCausalLM and XLNetLMHeadModel take labels as they are. What tells is a forward
    that calls ``self.loss_function``, and that this is the one of causal models.

    Args:
        network: what the step calls.

    Returns:
        Its class's name; None where it does not shift, or nobody knows.
    """
    model = _without_adapters(network)
    if model is None or not (hasattr(model, "config") and hasattr(model, "main_input_name")):
        return None
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return None
    loss = getattr(model, "loss_function", None)
    return type(model).__name__ if _CAUSAL in getattr(loss, "__name__", "") else None


def _without_adapters(network: nn.Module | None) -> nn.Module | None:
    """The model inside a ``PeftModel``."""
    inner: Any = getattr(network, "get_base_model", None)
    found = inner() if callable(inner) and hasattr(network, "peft_config") else network
    return found if isinstance(found, nn.Module) else None
