"""A tokenizer in the form that ``AutoTokenizer`` of `transformers` loads."""

from __future__ import annotations

import json

from lightning_asyncpp.data.byte_tokenizer_json import END, byte_tokenizer_json
from lightning_asyncpp.data.tokenizer import BPETokenizer, Tokenizer


def hf_tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """Name -> content of the files of a tokenizer.

    Args:
        tokenizer: what to write.
        context_length: longest sequence that the model takes, in tokens.
    """
    end = tokenizer.end_of_document
    if isinstance(tokenizer, BPETokenizer):
        definition, end_token = tokenizer.tokenizer_json, None if end is None else tokenizer.backend.id_to_token(end)
    else:
        definition, end_token = byte_tokenizer_json(), END
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **({} if end_token is None else {"eos_token": end_token}),
    }
    return {"tokenizer.json": definition, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
