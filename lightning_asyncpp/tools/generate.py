"""``asyncpp generate``: text that a saved model writes, as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_asyncpp.data import Tokenizer
from lightning_asyncpp.data.tokenizer import prompt_tokens
from lightning_asyncpp.models import WeightsError, open_saved
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from lightning_asyncpp.tools.model_arguments import DTYPES, find_tokenizer
from lightning_asyncpp.tools.parsers import generate_parser

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
