"""The loss of a model that knows nothing but how often each token occurs: the first bar that a model must pass."""

from __future__ import annotations

import torch
from torch import Tensor


def unigram_loss(train_tokens: Tensor, val_tokens: Tensor, vocab_size: int) -> float:
    """Cross-entropy of the unigram model of ``train_tokens`` on ``val_tokens``.

    Args:
        train_tokens: token ids, integers of any shape; their frequencies, each count raised by one, are the model.
        val_tokens: token ids, integers of any shape.
        vocab_size: number of token ids.

    Returns:
        Nats per token.
    """
    for name, tokens in (("train_tokens", train_tokens), ("val_tokens", val_tokens)):
        if tokens.numel() == 0:
            raise ValueError(f"{name} is empty")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
            raise ValueError(
                f"{name} holds ids outside 0 ... {vocab_size - 1}; is vocab_size={vocab_size} the right one?"
            )
    train_counts = torch.bincount(train_tokens.flatten().long(), minlength=vocab_size).double()
    val_counts = torch.bincount(val_tokens.flatten().long(), minlength=vocab_size).double()
    log_probabilities = torch.log((train_counts + 1) / (train_counts.sum() + vocab_size))
    return float(-(val_counts * log_probabilities).sum() / val_counts.sum())
