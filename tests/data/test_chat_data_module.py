"""Chat data has the right targets, padding and order, leaves out long conversations, and names lines with errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.data import ChatDataModule, DataError
from tests.helpers.models import TEMPLATE, make_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": " Seven — é."},
]


def rows_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"the quick brown fox {n}", "response": "a b" * (n % 3 + 1) + str(n)} for n in range(count)]


def make(folder: Path, rows: list[Any], template: str | None = TEMPLATE, **arguments: Any) -> ChatDataModule:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows)
    (folder / "rows.jsonl").write_bytes(lines.encode(errors="surrogateescape"))
    how = {"batch_size": 1, "shuffle": False, "max_length": 64, "cache_dir": str(folder / "cache"), **arguments}
    data = ChatDataModule(str(folder / "rows.jsonl"), str(folder / "tokenizer"), **how)
    data.prepare_data()
    data.setup()
    return data


def texts(batch: dict[str, torch.Tensor], row: int = 0) -> tuple[str, str]:
    """Return the text of a conversation and the text of its targets."""
    tokens, labels = batch["input_ids"][row], batch["labels"][row]
    assert torch.equal(labels[labels != -100], tokens[labels != -100])
    kept = tokens[batch["attention_mask"][row] == 1]
    return make_tokenizer().decode(kept), make_tokenizer().decode(labels[labels != -100])


def test_targets_are_what_the_assistant_says_with_the_ends_of_its_turns(tmp_path: Path) -> None:
    pair = {"prompt": "a quick question", "response": "an answer"}
    conversation, answer = map(texts, make(tmp_path, [{"messages": TURNS}, pair]).train_dataloader())
    assert conversation == (
        "<|system|>Be brief.<|end|><|user|>What is two and two?<|end|><|assistant|>Four.<|end|>"
        "<|user|>And three?<|end|><|assistant|> Seven — é.<|end|>",
        "Four.<|end|> Seven — é.<|end|>",
    )
    assert answer == ("<|user|>a quick question<|end|><|assistant|>an answer<|end|>", "an answer<|end|>")


@pytest.mark.parametrize(
    ("row", "template", "targets"),
    [
        pytest.param(
            {"messages": TURNS},
            "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
            "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
            "Four.<|end|> Seven — é.<|end|>",
            id="the template marks them",
        ),
        pytest.param({"messages": [TURNS[2], *TURNS[1:3]]}, TEMPLATE, "Four.<|end|>", id="the assistant begins"),
        pytest.param({"prompt": "two is", "response": " 2"}, None, " 2<|endoftext|>", id="no template"),
    ],
)
def test_targets_by_other_templates(tmp_path: Path, row: Any, template: str | None, targets: str) -> None:
    (batch,) = make(tmp_path, [row], template).train_dataloader()
    assert texts(batch)[1] == targets


def test_batches_are_padded_to_their_longest_and_ordered_by_seed_and_epoch(tmp_path: Path) -> None:
    def epochs(seed: int) -> list[list[str]]:
        loader = make(tmp_path, rows_of(10), batch_size=4, shuffle=True, seed=seed).train_dataloader()
        assert len(loader) == 2
        found = [list(loader) for _ in range(2)]
        for batch in [*found[0], *found[1]]:
            assert {tensor.shape for tensor in batch.values()} == {batch["input_ids"].shape}
            assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
            assert batch["attention_mask"].sum(dim=1).max() == batch["input_ids"].shape[1]
            assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
        return [[texts(batch, row)[0] for batch in epoch for row in range(4)] for epoch in found]

    first, again, other = epochs(42), epochs(42), epochs(7)
    assert first == again
    assert first[0] not in (first[1], other[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_another_one_was(tmp_path: Path, workers: int) -> None:
    """A resumed loader continues after the last returned batch, whatever workers prefetched; later epochs are whole."""

    def loader() -> Any:
        return make(tmp_path, rows_of(22), batch_size=3, shuffle=True, num_workers=workers).train_dataloader()

    whole, before, after = loader(), loader(), loader()
    expected = [[batch["input_ids"].tolist() for batch in whole] for _ in range(2)]
    iterator = iter(before)
    assert next(iterator)["input_ids"].tolist() == expected[0][0]
    state = before.state_dict()
    del iterator
    after.load_state_dict(json.loads(json.dumps(state)))
    assert [batch["input_ids"].tolist() for batch in after] == expected[0][1:]
    assert [batch["input_ids"].tolist() for batch in after] == expected[1]


def test_a_share_is_kept_for_validation_and_what_is_long_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are split by their content, so that equal rows are never in both splits."""
    rows, long = rows_of(40), {"prompt": "x" * 90, "response": "y" * 90}
    with caplog.at_level("INFO"):
        data = make(tmp_path, [*rows, rows[0], long], val_fraction=0.3)
    assert "1 of 42 conversations are longer than max_length=64 tokens" in caplog.text
    train, val = ([texts(batch)[0] for batch in loader] for loader in (data.train_dataloader(), data.val_dataloader()))
    assert len(train) + len(val) == 41
    assert not set(train) & set(val)
    assert 4 < len(val) < 22
    assert len(make(tmp_path, rows, val_source=data.source).val_dataloader()) == 40
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 24, "rank": 0})  # type: ignore[assignment]
    with pytest.raises(DataError, match=f"holds {len(val)} conversations .val.*at least 24 are needed"):
        data.val_dataloader()
    for name, value in (("val_fraction", 1.0), ("batch_size", 0)):
        with pytest.raises(DataError, match=f"{name}={value}"):
            make(tmp_path, rows, **{name: value})  # type: ignore[arg-type]


def test_what_is_tokenised_is_kept_until_anything_changes(tmp_path: Path) -> None:
    for count, max_length, folders in ((4, 64, 1), (4, 64, 1), (5, 64, 2), (4, 32, 3)):
        make(tmp_path, rows_of(count), max_length=max_length)
        assert len(list((tmp_path / "cache").glob("chat-*"))) == folders


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param("\udcff", "line 3 is not JSON: 'utf-8' codec", id="no UTF-8"),
        pytest.param([1, 2], "line 3 is not a conversation", id="no object"),
        pytest.param({"messages": [{"content": "a"}]}, "line 3 is not a conversation", id="no role"),
        pytest.param({"messages": TURNS[:2]}, "line 3: no message has the role 'assistant'", id="no answer"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(tmp_path, [rows_of(1)[0], row])


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    forgetful = TEMPLATE.replace("{{ m['content'] }}", "{% if loop.last %}{{ m['content'] }}{% endif %}")
    with pytest.raises(DataError, match="line 1: the chat template renders message 3 differently"):
        make(tmp_path, [{"messages": TURNS}], forgetful)
