"""The model and the tokenizer that the arguments of the commands on saved models name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from jsonargparse import get_loader

from lightning_asyncpp.data import Tokenizer, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import end_of_text_in, load_tokenizer
from lightning_asyncpp.models import GPTConfig, SavedGPT, WeightsError, open_saved
from lightning_asyncpp.models.opening import config_of_values
from lightning_asyncpp.tools.parsers import DTYPE_NAMES

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


def read_model(arguments: Namespace) -> SavedGPT:
    """Open the model that the arguments name.

    Raises:
        WeightsError: there is none.
    """
    return open_saved(arguments.model, None if arguments.config is None else read_config(Path(arguments.config)))


def read_config(path: Path) -> GPTConfig:
    """Read a GPT's config from a file with its fields, or from a recipe that has them under ``model``.

    Raises:
        WeightsError: it holds none.
    """
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))  # as `asyncpp fit` reads it: 1e-5 is a number
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WeightsError(f"--config {path} is neither YAML nor JSON: {error}") from error
    for key in ("model", "init_args", "config"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise WeightsError(f"--config {path} holds no fields of a GPTConfig")
    return config_of_values(content, str(path))


def find_tokenizer(saved: SavedGPT, given: str | None) -> Tokenizer | None:
    """The tokenizer that a model was trained with, as far as anybody says so.

    Args:
        saved: the model; what it was saved with counts.
        given: what the user says.

    Raises:
        WeightsError: the two differ, or the vocabulary is not the model's; with both sizes.
    """
    end = end_of_text_in(Path(saved.origin))
    recorded = None if saved.tokenizer is None else tokenizer_of_definition(saved.tokenizer, end)
    if given is None:
        tokenizer = recorded
    else:
        tokenizer = load_tokenizer(given)
        if recorded is not None and recorded.fingerprint != tokenizer.fingerprint:
            raise WeightsError(
                f"{saved.origin} was trained with another tokenizer ({recorded.fingerprint}, {recorded.vocab_size}"
                f" token ids) than --tokenizer {given} ({tokenizer.fingerprint}, {tokenizer.vocab_size} token ids);"
                " leave --tokenizer out"
            )
    if tokenizer is not None:
        # A model may have rows that pad its matrices, but only who trained it can know that.
        check_vocabulary(saved, tokenizer.vocab_size, exactly=recorded is None, what="the tokenizer")
    return tokenizer


def check_vocabulary(saved: SavedGPT, vocab_size: int, exactly: bool, what: str) -> None:
    """Compare a vocabulary with the model's.

    Args:
        saved: the model.
        vocab_size: number of token ids.
        exactly: whether the model may not have more.
        what: has this vocabulary.

    Raises:
        WeightsError: they differ; with both numbers.
    """
    model = saved.config.vocab_size
    if vocab_size > model or (exactly and vocab_size != model):
        raise WeightsError(
            f"{what} has {vocab_size} token ids, and {saved.origin} has vocab_size={model}: it was trained on other"
            " tokens"
        )
