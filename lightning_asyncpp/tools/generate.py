"""``asyncpp generate``: continue a prompt with a saved model and its tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_asyncpp.data import Tokenizer, tokenizer_of_definition
from lightning_asyncpp.data.tokenizer import end_of_text_in, load_tokenizer, prompt_tokens
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models import SavedGPT, WeightsError, open_saved
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from lightning_asyncpp.tools.parsers import DTYPE_NAMES, generate_parser

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
_UNFINISHED = "\ufffd"  # the decoder's character for incomplete bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prompt and its continuation, token by token."""
    arguments = generate_parser().parse_args(argv)
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError):  # an unknown name, or no such device in this machine or torch
        raise ConfigurationError(f"--device {arguments.device}: torch has no such device here; use cpu") from None
    temperature = 0.0 if arguments.greedy else arguments.temperature
    sampling = Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    saved = open_saved(arguments.model)
    tokenizer = find_tokenizer(saved, arguments.tokenizer)
    if tokenizer is None:
        raise WeightsError(f"{saved.origin} has no tokenizer; name one with --tokenizer: byte, or a tokenizer.json")
    prompt = prompt_tokens(tokenizer, arguments.prompt)
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
    """Return the tokenizer of a model; None if it is unknown.

    Args:
        saved: the model.
        given: tokenizer named by the user, in place of the saved one.

    Raises:
        WeightsError: the tokenizer's vocabulary does not fit the model.
    """
    if given is not None:
        tokenizer = load_tokenizer(given)
    elif saved.tokenizer is not None:
        tokenizer = tokenizer_of_definition(saved.tokenizer, end_of_text_in(Path(saved.origin)))
    else:
        return None
    # A model may have more ids (padding) than the tokenizer, but only if a tokenizer was saved with the model.
    needed, has = tokenizer.vocab_size, saved.config.vocab_size
    if needed > has or (saved.tokenizer is None and needed != has):
        raise WeightsError(
            f"the tokenizer has {needed} tokens, but {saved.origin} has vocab_size={has}; with"
            " --tokenizer, name the tokenizer that the model was trained with"
        )
    return tokenizer


def stream(tokenizer: Tokenizer, tokens: Iterator[int], prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens in pieces, each as soon as its characters are complete.

    Args:
        tokenizer: tokenizer of the tokens.
        tokens: tokens to show.
        prompt: tokens before ``tokens``; not shown, but needed, since some tokenizers drop the first space of a text.
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
