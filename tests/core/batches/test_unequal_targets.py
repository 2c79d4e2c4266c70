"""Micro-batches with unequal numbers of targets are told of, and nothing else is."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import PipelineModule
from lightning_asyncpp.core.batches.micro_batch import split_batch
from lightning_asyncpp.core.batches.shifted_labels import model_that_shifts
from lightning_asyncpp.core.batches.unequal_targets import UnequalTargets
from lightning_asyncpp.core.batches.user_hooks import UserHooks

Pair = namedtuple("Pair", ["ids", "targets"])


@dataclass
class Batch:
    """As a data module's own class of batches."""

    ids: Tensor
    label: Tensor


class Weighing:
    """Says how much its micro-batches count."""

    def micro_batch_weight(self, micro_batch: Any) -> float:
        return float((micro_batch["labels"] != -100).sum())


class Summing:
    """Returns sums."""

    loss_reduction = "sum"


class FromBase(PipelineModule):
    """Weighs as its base does, which counts samples."""


def labels(*counts: int, length: int = 6, prompt: int = 1) -> Tensor:
    """(samples, length): ``prompt`` entries that do not count, then as many that do as is said, then padding."""
    rows = torch.full((len(counts), length), -100)
    for row, count in zip(rows, counts):
        row[prompt : prompt + count] = torch.arange(count)
    return rows


def told(
    batch: Any, parts: int = 2, module: object | None = None, batches: int = 1, network: nn.Module | None = None
) -> list[str]:
    unequal = UnequalTargets(UserHooks.of(module or object()), network=network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(batches):
            unequal.look(split_batch(batch, parts))
    return [str(warning.message) for warning in caught]


UNEQUAL = labels(1, 2, 4, 5)


def test_it_names_the_key_the_numbers_and_the_lines() -> None:
    (text,) = told({"ids": torch.ones(4, 6), "labels": UNEQUAL}, batches=3)
    assert "micro_batch['labels'], entries that are not -100: 3, 9)" in text
    assert "    def micro_batch_weight(self, micro_batch):\n" in text
    assert "        return float((micro_batch['labels'] != -100).sum())\n" in text


def pasted(text: str, batch: Any) -> list[float]:
    """What the functions that a text has to paste return."""
    weights = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    def "):
            lines = [line.removeprefix("    ") for line in paragraph.splitlines() if line.startswith("    ")]
            names: dict[str, Any] = {}
            exec("\n".join(lines), names)
            weights.append(names["micro_batch_weight"](None, batch))
    return weights


ROWS_WITHOUT_PROMPTS = labels(1, 2, 4, 5, prompt=0)


def test_where_nobody_knows_whether_the_loss_shifts_both_are_there() -> None:
    batch = {"labels": ROWS_WITHOUT_PROMPTS}
    (text,) = told(batch, network=nn.Linear(1, 1))
    assert pasted(text, batch) == [12.0, 8.0]
    assert "(a) The loss takes the labels as they are:\n\n    def " in text
    assert "the first one of a row never counts:\n\n    def " in text


def test_labels_of_whole_samples_are_not_shifted() -> None:
    batch = {"labels": torch.tensor([1, -100, 0, 1])}
    (text,) = told(batch)
    assert pasted(text, batch) == [3.0]


def causal(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11, "d_model": 8}
    if name == "GPT2LMHeadModel":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11))
    if name == "BartForCausalLM":  # takes its labels as they are, whatever its name
        return transformers.BartForCausalLM(transformers.BartConfig(
            d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, vocab_size=11, pad_token_id=1
        ))  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8))


@pytest.mark.parametrize(
    ("name", "weights"), [("LlamaForCausalLM", [8.0]), ("GPT2LMHeadModel", [8.0]), ("BartForCausalLM", [12.0, 8.0])]
)
def test_models_of_transformers_that_shift(name: str, weights: list[float]) -> None:
    batch = {"labels": ROWS_WITHOUT_PROMPTS}
    (text,) = told(batch, network=causal(name))
    assert pasted(text, batch) == weights
    assert (f"{name} shifts the labels by one in its own loss" in text) == (len(weights) == 1)


def test_a_model_with_adapters_shifts_as_it_does_without() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(causal("LlamaForCausalLM"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    batch = {"labels": ROWS_WITHOUT_PROMPTS}
    assert pasted(told(batch, network=adapted)[0], batch) == [8.0]


def test_a_subclass_that_computes_its_own_loss_is_not_known() -> None:
    class OwnLoss(type(causal("LlamaForCausalLM"))):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return self.model(input_ids)

    assert model_that_shifts(OwnLoss(causal("LlamaForCausalLM").config)) is None


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"decoder_Targets": UNEQUAL}, "micro_batch['decoder_Targets']"),
        ((torch.ones(4, 6), UNEQUAL), "micro_batch[1]"),
        (Pair(torch.ones(4, 6), UNEQUAL), "micro_batch.targets"),
        (Batch(torch.ones(4, 6), UNEQUAL), "micro_batch.label"),
        ({"labels": torch.tensor([1, -100, 0, 1])}, "micro_batch['labels']"),
    ],
)
def test_batches_of_all_kinds(batch: Any, path: str) -> None:
    (text,) = told(batch)
    assert f"({path}, entries that are not -100: " in text


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": labels(1, 5, 2, 4)},  # equal in sum
        {"labels": labels(3, 3, 3)},  # 6 and 3 targets of 2 samples and 1
        {"labels": torch.arange(24).reshape(4, 6)},
        {"labels": UNEQUAL.float()},
        {"labels": UNEQUAL.clamp_min(-99)},
        {"labels": UNEQUAL.where(UNEQUAL != 0, -101)},  # no classes
        {"ids": UNEQUAL},
        (torch.ones(4, 6), UNEQUAL.short()),  # such as sound
        {"ids": torch.ones(4, 6), "labels": [[1], [2], [3], [-100]]},
        torch.ones(4, 6),
    ],
)
def test_no_false_alarms(batch: Any) -> None:
    assert not told(batch)


def test_equal_once_shifted_or_unless_shifted_is_equal() -> None:
    """Whether the loss shifts its labels is not known."""
    first_does_not_count = labels(4, 4, 5, 5, prompt=0)
    first_does_not_count[:2] = labels(4, 4)
    assert not told({"labels": first_does_not_count})


@pytest.mark.parametrize("module", [Weighing(), Summing()])
def test_who_weighs_or_sums_is_told_nothing(module: object) -> None:
    assert not told({"labels": UNEQUAL}, module=module)


def test_the_base_class_weighs_nothing() -> None:
    assert len(told({"labels": UNEQUAL}, module=FromBase())) == 1


def test_empty_slots_and_single_micro_batches() -> None:
    assert len(told({"labels": UNEQUAL}, parts=7)) == 1
    assert not told({"labels": UNEQUAL}, parts=1)


def test_it_looks_at_the_first_batches_alone() -> None:
    unequal = UnequalTargets(UserHooks())
    for _ in range(100):
        unequal.look(split_batch({"labels": labels(1, 1)}, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unequal.look(split_batch({"labels": labels(1, 2)}, 2))


def test_what_is_not_on_the_host_is_not_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UnequalTargets(UserHooks()).look([{"labels": rows.to("meta")} for rows in UNEQUAL.tensor_split(2)])
