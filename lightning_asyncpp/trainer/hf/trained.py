"""Which parameters of a model of `transformers` are trained: all, those that no pattern freezes, or adapters."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.optional_packages import optional_package

_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
_TASK_TYPES = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
}


def peft_package() -> Any:
    """Return the module ``peft``.

    Raises:
        ImportError: it is not installed; the message says how.
    """
    return optional_package("peft", "lora=...")


def lora_config(lora: Mapping[str, Any], task: str) -> Any:
    """The ``peft.LoraConfig`` of plain values.

    Args:
        lora: its fields; ``alpha`` and ``dropout`` are short for ``lora_alpha`` and ``lora_dropout``.
        task: name of the auto class.

    Raises:
        ConfigurationError: it has no such field, or refuses a value.
    """
    peft = peft_package()
    values = {_SHORT.get(name, name): value for name, value in lora.items()}
    try:
        return peft.LoraConfig(**{"task_type": _TASK_TYPES.get(task), **values})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"lora={dict(lora)!r}: {error}") from error


def with_adapters(model: nn.Module, lora: Mapping[str, Any], task: str) -> nn.Module:
    """Put adapters into a model; the rest of it is frozen.

    Raises:
        ConfigurationError: it has no such modules.
    """
    config = lora_config(lora, task)
    try:
        adapted: nn.Module = peft_package().get_peft_model(model, config)
    except ValueError as error:
        raise ConfigurationError(f"lora={dict(lora)!r}: {error}") from error
    return adapted


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names a pattern fits.

    Args:
        model: whose parameters they are.
        patterns: globs of names as in its files: ``"model.embed_tokens.*"``, ``"*.layers.[01].*"``.

    Raises:
        ConfigurationError: a pattern fits none, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    if useless := [pattern for pattern in patterns if not fnmatch.filter(parameters, pattern)]:
        raise ConfigurationError(
            f"freeze: no parameter fits {', '.join(map(repr, useless))};"
            f" the first are {', '.join(list(parameters)[:4])}"
        )
    for name, parameter in parameters.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigurationError(f"freeze={list(patterns)!r} leaves nothing to train")
