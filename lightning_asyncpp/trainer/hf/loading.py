"""Reading a model of `transformers` from a folder or the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_asyncpp.data.tokenizer import fetch, is_hub_name
from lightning_asyncpp.errors import ConfigurationError, DataError
from lightning_asyncpp.optional_packages import optional_package

Task = Literal[
    "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification"
]
"""The class of `transformers` that chooses the model's own."""
Dtype = Literal["float32", "bfloat16"]
TASKS, DTYPES = get_args(Task), get_args(Dtype)
CLASSIFICATION = "AutoModelForSequenceClassification"
CONFIG = "config.json"
_HEAD = re.compile(r"(score|classifier)\.")


def transformers_package() -> Any:
    """Return the module ``transformers``.

    Raises:
        ImportError: it is not installed; the message says how.
    """
    return optional_package("transformers", "HFModule")


def read_config(model_id: str, overrides: Mapping[str, Any]) -> Any:
    """Read the config of a model, with other values in the places of some of its own.

    Args:
        model_id: a folder with a config.json, or the name of a repository of the hub.
        overrides: field -> value.

    Raises:
        ConfigurationError: there is no such model, or no such field; or the config asks for what a pipeline cannot do.
    """
    check_reachable(model_id)
    try:
        config, unknown = transformers_package().AutoConfig.from_pretrained(
            model_id, return_unused_kwargs=True, **overrides
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"model_id={model_id!r}: {_first_line(error)}") from error
    if unknown:
        raise ConfigurationError(
            f"config_overrides: {type(config).__name__} has no {', '.join(sorted(unknown))}; its fields are in {CONFIG}"
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigurationError(
            f"model_id={model_id!r}: its config has output_router_logits=True, for a loss of its routers that"
            " a pipeline does not collect; train without it, config_overrides={'output_router_logits': False}"
        )
    return config


def check_reachable(model_id: str) -> None:
    """Say in one line what keeps a model from being read, before anything tries again and again to fetch it.

    Raises:
        ConfigurationError: it is no folder with a config.json, and the hub does not have it or cannot be reached.
    """
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ConfigurationError(f"model_id={model_id!r}: the folder has no {CONFIG}; give one of save_pretrained")
        return
    if not is_hub_name(model_id):
        raise ConfigurationError(
            f"model_id={model_id!r}: there is no such folder, and the hub has no such names; give a folder of"
            " save_pretrained, or a name such as 'HuggingFaceTB/SmolLM2-360M'"
        )
    try:
        fetch(model_id, CONFIG)
    except DataError as error:
        raise ConfigurationError(str(error)) from error


def load_model(
    config: Any, model_id: str, task: str, pretrained: bool, dtype: str, attn_implementation: str | None
) -> nn.Module:
    """Build the model in this process's memory, with the weights of its folder or from scratch.

    Args:
        config: of :func:`read_config`.
        model_id: where the weights are.
        task: name of the auto class.
        pretrained: whether to read them; otherwise they are drawn from torch's generator.
        dtype: of the weights.
        attn_implementation: of `transformers`: "sdpa", "eager", ...; ``None`` for its default.

    Raises:
        ConfigurationError: `transformers` has no such model, or the folder lacks weights of it.
    """
    auto = getattr(transformers_package(), task)
    how: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    reads = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # all that is wrong is named below
    if attn_implementation is not None:
        how["attn_implementation"] = attn_implementation
    try:
        if not pretrained:
            model: nn.Module = auto.from_config(config, **how)
            return model
        model, told = auto.from_pretrained(model_id, config=config, **reads, **how)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigurationError(f"model_id={model_id!r}: {_first_line(error)}") from error
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in told["mismatched_keys"]]
    missing = sorted({*told["missing_keys"], *mismatched})
    if task == CLASSIFICATION:  # its head is new where the folder is a language model's, or has other labels
        missing = [name for name in missing if name in mismatched and not _HEAD.match(name)]
    if missing:
        raise ConfigurationError(
            f"model_id={model_id!r} has no weights, or some of other shapes, for {', '.join(map(str, missing[:4]))}"
            f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''} of {type(model).__name__}: they would be"
            " random; name another task, or pretrained=False to train all from scratch"
        )
    return model


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))
