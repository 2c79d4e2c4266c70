"""Tokens are drawn with the defined probabilities, and greedy ones are those that transformers generates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.models.sampling import Sampling, draw, generate_tokens, logits_of
from tests.helpers.models import CASES, exported

PROMPT = [3, 14, 15, 92, 65, 35]
LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.0, 2.5, float("-inf")])


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=2.0, seed=1), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 4]),
        (Sampling(top_p=0.7), [1, 4]),  # probabilities 0.47 and 0.29
        (Sampling(top_k=3, top_p=0.9, temperature=0.5), [1, 4]),
        (Sampling(temperature=0), [1]),
    ],
)
def test_shares_of_tokens(sampling: Sampling, allowed: list[int]) -> None:
    logits = LOGITS / (sampling.temperature or 1)
    kept = torch.full_like(logits, float("-inf"))
    kept[allowed] = logits[allowed]
    generator = torch.Generator().manual_seed(sampling.seed)
    drawn = torch.tensor([draw(LOGITS, sampling, generator) for _ in range(2500)])
    found = torch.bincount(drawn, minlength=len(LOGITS)) / 2500
    assert set(drawn.tolist()) <= set(allowed)
    torch.testing.assert_close(found, kept.softmax(0), atol=0.04, rtol=0)


def test_the_window_slides_and_the_end_ends() -> None:
    seen: list[list[int]] = []

    def count(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens[:, -1] + 1, 20).float()

    tokens = generate_tokens(count, [1, 2], 3, 50, Sampling(0), end=7)
    assert list(tokens) == [3, 4, 5, 6, 7]
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    # Ids beyond the vocabulary are not drawn.
    assert list(generate_tokens(count, [1, 2], 3, 3, Sampling(0), vocab_size=4)) == [3, 0, 1]


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
@torch.no_grad()
def test_greedy_is_what_transformers_generates(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = CASES[name][1]
    model = exported(config, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with caplog.at_level(logging.ERROR):
        output = theirs.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40)
    expected = output[0].tolist()
    found = generate_tokens(logits_of(model), PROMPT, config.context_length, 40, Sampling(0))
    assert [*PROMPT, *found] == expected
    assert len(set(expected)) > 10
