"""Drawing the next token, again and again, from whatever computes its logits: one process or a pipeline."""

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
    """How a token is drawn from its probabilities; a wrong value is reported when this is built."""

    temperature: float = 1.0
    """What logits are divided by; 0 takes the most likely token (greedy)."""
    top_k: int | None = None
    """Draw among so many of the most likely tokens; ``None`` for all."""
    top_p: float | None = None
    """Draw among the most likely tokens that together have this probability (nucleus sampling, arXiv 1904.09751);
    ``None`` for all."""
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
            raise ValueError("no token can be drawn so:\n" + "\n".join(f"  - {problem}" for problem in problems))


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
    """Yield the tokens that follow a prompt, each as soon as it is known.

    What does not fit into the context slides out of it: the model then sees the last ``context_length`` tokens, at
    positions that count from the first of them.

    Args:
        next_logits: (1, time) int64 -> logits of the token that follows, (1, vocab); ``None`` where another process has
            them.
        prompt: token ids, at least one.
        context_length: most tokens that the model sees.
        max_new_tokens: most tokens to yield.
        sampling: how each is drawn.
        end: token after which nothing follows; it is yielded. ``None`` to go on.
        vocab_size: ids from here on are never drawn; ``None`` for all that the model has.
        agree: token of this process -> that of the process that drew it, on all of them, such as a strategy's
            ``broadcast``. Processes without logits hand in -1.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("the prompt has no token; begin with the token that ends a document")
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
        sampling: how.
        generator: on the host.

    Raises:
        WeightsError: no logit is the highest: they are NaN or infinite.
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
        before = probabilities.cumsum(0) - probabilities  # of all more likely tokens
        probabilities = probabilities * (before < sampling.top_p)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def logits_of(model: GPT, device: torch.device | str = "cpu") -> NextLogits:
    """A model in one process as :func:`generate_tokens` wants it; every token costs a forward of the whole sequence.

    Args:
        model: in evaluation mode.
        device: where it is.
    """

    @torch.no_grad()
    def next_logits(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens.to(device))[:, -1]
        return logits

    return next_logits
