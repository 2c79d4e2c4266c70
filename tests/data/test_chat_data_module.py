"""Conversations: what is a target, padding, order, what is left out, and mistakes with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.data import ChatDataModule, DataError
from lightning_asyncpp.data.chat_examples import read_rows
from tests.helpers.hf_folders import make_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": " Seven — é."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def make(folder: Path, tokenizer: Path, rows: list[Any], **arguments: Any) -> ChatDataModule:
    how = {"batch_size": 1, "shuffle": False, "max_length": 64, "cache_dir": str(folder / "cache"), **arguments}
    data = ChatDataModule(write(folder, rows), str(tokenizer), **how)
    data.prepare_data()
    data.setup()
    return data


def said(tokenizer: Path, batch: dict[str, torch.Tensor], row: int = 0) -> tuple[str, str]:
    """The text of a conversation, and that of its targets."""
    backend = make_tokenizer()
    tokens, labels = batch["input_ids"][row], batch["labels"][row]
    assert torch.equal(labels[labels != -100], tokens[labels != -100])
    kept = tokens[batch["attention_mask"][row] == 1]
    return backend.decode(kept), backend.decode(labels[labels != -100])


def test_targets_are_what_the_assistant_says_with_the_ends_of_its_turns(tmp_path: Path, tokenizer: Path) -> None:
    pair = {"prompt": "a quick question", "response": "an answer"}
    conversation, answer = list(make(tmp_path, tokenizer, [{"messages": TURNS}, pair]).train_dataloader())
    text, targets = said(tokenizer, conversation)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>What is two and two?<|end|><|assistant|>Four.<|end|>"
        "<|user|>And three?<|end|><|assistant|> Seven — é.<|end|>"
    )
    assert targets == "Four.<|end|> Seven — é.<|end|>"
    assert said(tokenizer, answer) == (
        "<|user|>a quick question<|end|><|assistant|>an answer<|end|>", "an answer<|end|>",
    )  # fmt: skip


def test_without_a_chat_template_pairs_follow_each_other(tmp_path: Path) -> None:
    plain = make_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    rows = [{"prompt": "two and two is", "response": " four"}]
    (batch,) = make(tmp_path, tmp_path / "plain", rows).train_dataloader()
    assert said(tmp_path, batch) == ("two and two is four<|endoftext|>", " four<|endoftext|>")
    with pytest.raises(DataError, match="line 1 has messages, and the tokenizer has no chat template"):
        make(tmp_path, tmp_path / "plain", [{"messages": TURNS}])


def test_a_template_may_say_itself_what_the_assistant_writes(tmp_path: Path) -> None:
    marked = make_tokenizer()
    marked.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    marked.save_pretrained(tmp_path / "marked")
    (batch,) = make(tmp_path, tmp_path / "marked", [{"messages": TURNS}]).train_dataloader()
    assert said(tmp_path, batch)[1] == "Four.<|end|> Seven — é.<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    forgetful = make_tokenizer()
    forgetful.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    forgetful.save_pretrained(tmp_path / "forgetful")
    with pytest.raises(DataError, match=r"line 1: the chat template writes message 3 otherwise"):
        make(tmp_path, tmp_path / "forgetful", [{"messages": TURNS}])


def rows_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"the quick brown fox {n}", "response": "a b" * (n % 3 + 1) + str(n)} for n in range(count)]


def test_batches_are_padded_to_their_longest_and_ordered_by_seed_and_epoch(tmp_path: Path, tokenizer: Path) -> None:
    data = make(tmp_path, tokenizer, rows_of(10), batch_size=4, shuffle=True)
    loader = data.train_dataloader()
    assert len(loader) == 2
    epochs = []
    for _ in range(2):
        batches = list(loader)
        for batch in batches:
            assert {tensor.shape for tensor in batch.values()} == {batch["input_ids"].shape}
            assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
            assert batch["attention_mask"].sum(dim=1).max() == batch["input_ids"].shape[1]
            assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
        epochs.append([said(tokenizer, batch, row)[0] for batch in batches for row in range(4)])
    assert epochs[0] != epochs[1]
    again = make(tmp_path, tokenizer, rows_of(10), batch_size=4, shuffle=True).train_dataloader()
    assert [said(tokenizer, batch, row)[0] for batch in again for row in range(4)] == epochs[0]
    other = make(tmp_path, tokenizer, rows_of(10), batch_size=4, shuffle=True, seed=7).train_dataloader()
    assert [said(tokenizer, batch, row)[0] for batch in other for row in range(4)] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_another_one_was(tmp_path: Path, tokenizer: Path, workers: int) -> None:
    """Behind what was given out, whatever workers had read ahead; the next epoch is whole."""

    def loader() -> Any:
        return make(
            tmp_path, tokenizer, rows_of(22), batch_size=3, shuffle=True, num_workers=workers
        ).train_dataloader()

    whole, before, after = loader(), loader(), loader()
    expected = [[batch["input_ids"].tolist() for batch in whole] for _ in range(2)]
    iterator = iter(before)
    assert next(iterator)["input_ids"].tolist() == expected[0][0]
    state = before.state_dict()
    del iterator
    after.load_state_dict(json.loads(json.dumps(state)))
    assert [batch["input_ids"].tolist() for batch in after] == expected[0][1:]
    assert [batch["input_ids"].tolist() for batch in after] == expected[1]


def test_long_conversations_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "x" * 90, "response": "y" * 90}
    with caplog.at_level("INFO"):
        data = make(tmp_path, tokenizer, [*rows_of(3), long, {"messages": TURNS[:3]}])
    assert "1 of 5 conversations are longer than max_length=64 tokens" in caplog.text
    assert len(data.train_dataloader()) == 4
    with pytest.raises(DataError, match="has 0 conversations of at most max_length=64"):
        make(tmp_path, tokenizer, [long])


def test_a_share_is_kept_for_validation_by_content(tmp_path: Path, tokenizer: Path) -> None:
    rows = rows_of(40)
    data = make(tmp_path, tokenizer, [*rows, rows[0]], val_fraction=0.3)
    train = [said(tokenizer, batch)[0] for batch in data.train_dataloader()]
    val = [said(tokenizer, batch)[0] for batch in data.val_dataloader()]
    assert len(train) + len(val) == 41
    assert not set(train) & set(val)
    assert 4 < len(val) < 22
    names = [row.messages[0]["content"] for row in read_rows(Path(data.source), 0.5) if row.in_validation]
    kept = [row.messages[0]["content"] for row in read_rows(Path(data.source), 0.3) if row.in_validation]
    assert set(kept) <= set(names)
    held = make(tmp_path, tokenizer, rows, val_source=write(tmp_path, rows[:2], "val.jsonl"))
    assert len(held.val_dataloader()) == 2
    assert make(tmp_path, tokenizer, rows).val_dataloader() == []


def test_what_is_tokenised_is_kept_until_anything_changes(tmp_path: Path, tokenizer: Path) -> None:
    def kept() -> set[Path]:
        return set((tmp_path / "cache").glob("chat-*"))

    make(tmp_path, tokenizer, rows_of(4))
    (first,) = kept()
    before = first.stat().st_mtime_ns
    make(tmp_path, tokenizer, rows_of(4))
    assert kept() == {first}
    assert first.stat().st_mtime_ns == before
    make(tmp_path, tokenizer, rows_of(5))
    make(tmp_path, tokenizer, rows_of(4), max_length=32)
    assert len(kept()) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1, 2]", "line 2 is no conversation"),
        ({"prompt": "a"}, "line 2 is no conversation"),
        ({"messages": [{"content": "a"}]}, "line 2 is no conversation"),
        ({"messages": TURNS[:2]}, "line 2: no message has the role 'assistant'"),
        ({"messages": [{"role": "assistant"}, "text"]}, "line 2 is no conversation"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, tokenizer: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(tmp_path, tokenizer, [rows_of(1)[0], row])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "nowhere.jsonl"}, "source='nowhere.jsonl': there is no such file"),
        ({"val_fraction": 0.5, "val_source": __file__}, "val_source=.*give one of them"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, tokenizer: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatDataModule(**{"source": write(tmp_path, rows_of(1)), "tokenizer": str(tokenizer), **arguments})


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: str) -> str:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", not_there)
    (tmp_path / "empty").mkdir()
    missing = r"'nobody/nothing' is no file .* gives no tokenizer\.json of it \(ConnectionError: no network\)"
    for name, message in ((str(tmp_path / "empty"), "tokenizer="), ("nobody/nothing", missing)):
        with pytest.raises(DataError, match=message):
            make(tmp_path, Path(name), rows_of(1))
