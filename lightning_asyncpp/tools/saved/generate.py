"""``asyncpp generate``: text that a saved model writes, as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_asyncpp.data import Tokenizer
from lightning_asyncpp.data.tokenizer import prompt_tokens
from lightning_asyncpp.models import WeightsError
from lightning_asyncpp.models.cached_logits import CachedLogits
from lightning_asyncpp.models.sampling import Sampling, generate_tokens
from lightning_asyncpp.tools.saved.model_arguments import (
    DTYPES,
    add_execution,
    add_model,
    check_choice,
    check_device,
    find_tokenizer,
    read_model,
    reported,
)

_UNFINISHED = "\ufffd"  # what the decoder puts for a character whose bytes are not all there


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prompt and what follows it, token by token."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    check_choice(parser, arguments, "dtype")
    check_device(parser, arguments)
    try:
        temperature = 0.0 if arguments.greedy else arguments.temperature
        sampling = Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    with reported("generate"):
        saved = read_model(arguments)
        tokenizer = find_tokenizer(saved, arguments.tokenizer)
        if tokenizer is None:
            raise WeightsError(f"{saved.origin} holds no tokenizer; name it: --tokenizer byte, or a tokenizer.json")
        prompt = prompt_tokens(tokenizer, arguments.prompt)
        if len(prompt) > saved.config.context_length:
            raise WeightsError(
                f"--prompt has {len(prompt)} tokens, and the model sees context_length={saved.config.context_length};"
                " shorten it"
            )
        model = saved.build(arguments.device, DTYPES[arguments.dtype])
    tokens = generate_tokens(
        CachedLogits(model, arguments.device),
        prompt,
        saved.config.context_length,
        arguments.max_new_tokens,
        sampling,
        end=tokenizer.end_of_document,
        vocab_size=tokenizer.vocab_size,
    )
    print(arguments.prompt, end="", flush=True)
    with reported("generate"):
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


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        allow_abbrev=False,
        prog="asyncpp generate",
        description="Continue a prompt with a saved model, in one process. It ends where the model ends the document;"
        " what does not fit into its context slides out of it.",
    )
    add_model(parser)
    parser.add_argument(
        "--prompt", type=str, default="", help="text to continue (default: the beginning of a document)"
    )
    parser.add_argument("--max-new-tokens", type=PositiveInt, default=200, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=1.0, help="what logits are divided by; 0 is --greedy")
    parser.add_argument("--top-k", type=int | None, default=None, help="draw among so many of the most likely tokens")
    parser.add_argument(
        "--top-p", type=float | None, default=None, help="draw among those that together have this probability"
    )
    parser.add_argument("--greedy", action="store_true", help="take the most likely token every time")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="of the draws")
    add_execution(parser)
    return parser


if __name__ == "__main__":
    main()
