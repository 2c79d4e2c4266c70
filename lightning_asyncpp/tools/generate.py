"""``asyncpp generate``: text that a saved model writes, as it comes, with the tokenizer that it was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_asyncpp.data import Tokenizer, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import end_of_text_in, load_tokenizer, prompt_tokens
from lightning_asyncpp.models import SavedGPT, WeightsError, open_saved
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from lightning_asyncpp.tools.parsers import DTYPE_NAMES, generate_parser

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
_UNFINISHED = "\ufffd"  # what the decoder puts for a character whose bytes are not all there


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prompt and what follows it, token by token."""
    arguments = generate_parser().parse_args(argv)
    temperature = 0.0 if arguments.greedy else arguments.temperature
    sampling = Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    saved = open_saved(arguments.model)
    tokenizer = find_tokenizer(saved, arguments.tokenizer)
    if tokenizer is None:
        raise WeightsError(f"{saved.origin} holds no tokenizer; name it: --tokenizer byte, or a tokenizer.json")
    prompt = prompt_tokens(tokenizer, arguments.prompt)
    if len(prompt) > saved.config.context_length:
        raise WeightsError(
            f"--prompt has {len(prompt)} tokens, and the model sees context_length={saved.config.context_length};"
            " shorten it"
        )
    tokens = generate_tokens(
        logits_of(saved.build(arguments.device, DTYPES[arguments.dtype]), arguments.device),
        prompt,
        saved.config.context_length,
        arguments.max_new_tokens,
        sampling,
        end=tokenizer.end_of_document,
        vocab_size=tokenizer.vocab_size,
    )
    print(arguments.prompt, end="", flush=True)
    for text in stream(tokenizer, tokens, prompt):
        print(text, end="", flush=True)
    print()


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


def stream(tokenizer: Tokenizer, tokens: Iterator[int], prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens in pieces, each as soon as its characters are complete.

    Args:
        tokenizer: whose tokens they are.
        tokens: what to show.
        prompt: what they follow, which is not shown; some tokenizers leave the first space of a text out.
    """
    known = list(prompt)
    shown = _text(tokenizer, known)
    for token in tokens:
        if token == tokenizer.end_of_document:
            continue
        known.append(token)
        text = _text(tokenizer, known)
        if not text.endswith(_UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield _text(tokenizer, known)[len(shown) :]


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(torch.tensor(tokens, dtype=torch.int64))
