"""Sampling of tokens from the logits of a model in one process or in a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.saved import WeightsError

NextLogits = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling; wrong values raise a ValueError."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token (greedy)."""
    top_k: int | None = None
    """Number of most likely tokens to draw from; ``None`` for all."""
    top_p: float | None = None
    """Total probability of the most likely tokens to draw from (nucleus sampling, arXiv 1904.09751); ``None`` for
    all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature={self.temperature!r}: must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k={self.top_k!r}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p!r}: must be above 0 and at most 1")
        if problems:
            raise ValueError("no token can be drawn:\n" + "\n".join(f"  - {problem}" for problem in problems))


def generate_tokens(
    next_logits: NextLogits,
    prompt: Sequence[int],
    context_length: int,
    max_new_tokens: int,
    sampling: Sampling,
    end: int | None = None,
    vocab_size: int | None = None,
    agree: Callable[[int], int] = int,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, each as soon as it is drawn.

    The model sees at most the last ``context_length`` tokens, with positions counted from the first of them.

    Args:
        next_logits: function from tokens, (1, time) int64, to the logits of the next token, (1, vocab); it returns
            ``None`` if another process has them.
        prompt: token ids, at least one.
        context_length: maximum number of tokens that the model sees.
        max_new_tokens: maximum number of tokens to yield.
        sampling: settings of the draws.
        end: token after which generation ends; it is yielded, too. ``None`` for no such token.
        vocab_size: number of ids that may be drawn; ``None`` for all of the model's.
        agree: function that returns, in every process, the token of the process that has the logits, such as a
            strategy's ``broadcast``. Its argument is this process's token, or -1 in a process without logits.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = next_logits(torch.tensor([tokens[-context_length:]]))
        token = agree(-1 if logits is None else draw(logits[0, :vocab_size], sampling, generator))
        yield token
        if token == end:
            return
        tokens.append(token)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: (vocab,), on any device; the draw is made in fp64 on the host.
        sampling: settings of the draw.
        generator: generator on the host.

    Raises:
        WeightsError: the highest logit is NaN or infinite.
    """
    if not math.isfinite(highest := float(logits.max())):
        raise WeightsError(
            f"the highest logit is {highest}, and no token can be drawn: the weights are damaged, or the training has"
            " diverged; take an earlier checkpoint"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.detach().double().cpu() - highest) / sampling.temperature
    values, ids = torch.sort(scaled, descending=True, stable=True)
    values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = values.softmax(0)
    if sampling.top_p is not None:
        before = probabilities.cumsum(0) - probabilities  # sum over all more likely tokens
        probabilities = probabilities * (before < sampling.top_p)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def logits_of(model: GPT, device: torch.device | str = "cpu") -> NextLogits:
    """Return a function for :func:`generate_tokens` that runs a forward of the whole sequence for every token.

    Args:
        model: model in evaluation mode, in this process.
        device: device of the model.
    """

    @torch.no_grad()
    def next_logits(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens.to(device))[:, -1]
        return logits

    return next_logits
