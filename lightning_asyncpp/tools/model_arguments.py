"""The tokenizer and the dtype that the arguments of the commands on saved models name."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_asyncpp.data import Tokenizer, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import end_of_text_in, load_tokenizer
from lightning_asyncpp.models import SavedGPT, WeightsError
from lightning_asyncpp.tools.parsers import DTYPE_NAMES

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


def find_tokenizer(saved: SavedGPT, given: str | None) -> Tokenizer | None:
    """The tokenizer that a model was trained with, as far as anybody says so.

    Args:
        saved: the model.
        given: what the user says, in place of what it was saved with.

    Raises:
        WeightsError: its vocabulary is not the model's; with both sizes.
    """
    if given is not None:
        tokenizer = load_tokenizer(given)
    elif saved.tokenizer is not None:
        tokenizer = tokenizer_of_definition(saved.tokenizer, end_of_text_in(Path(saved.origin)))
    else:
        return None
    # A model may have rows that pad its matrices, but only who trained it can know that.
    needed, has = tokenizer.vocab_size, saved.config.vocab_size
    if needed > has or (saved.tokenizer is None and needed != has):
        raise WeightsError(
            f"the tokenizer has {needed} token ids, and {saved.origin} has vocab_size={has}: it was trained on other"
            " tokens"
        )
    return tokenizer
