from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.unigram import unigram_loss


def test_known_distribution() -> None:
    # Counts 2, 1, 0 become (3, 2, 1) / 6.
    loss = unigram_loss(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2, 2]), vocab_size=3)
    assert loss == pytest.approx(-(math.log(3 / 6) + math.log(2 / 6) + 2 * math.log(1 / 6)) / 4)


def test_approaches_the_entropy() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    generator = torch.Generator().manual_seed(0)
    train, validation = (torch.multinomial(probabilities, 100_000, True, generator=generator) for _ in range(2))
    assert unigram_loss(train, validation, 4) == pytest.approx(1.75 * math.log(2), abs=0.01)


def test_unsigned_and_shaped_tokens() -> None:
    tokens = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8)
    assert unigram_loss(tokens, tokens, 2) == pytest.approx(math.log(2))


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="val_tokens holds ids outside 0"):
        unigram_loss(torch.tensor([0]), torch.tensor([3]), 3)
    with pytest.raises(ValueError, match="train_tokens is empty"):
        unigram_loss(torch.tensor([], dtype=torch.int64), torch.tensor([0]), 3)
