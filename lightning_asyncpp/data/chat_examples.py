"""Conversations as tokens: JSON lines, rendered by a chat template, with the responses as targets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_asyncpp.errors import DataError

IGNORED = -100
ASSISTANT = "assistant"
_FORMS = '{"messages": [{"role": "user", "content": ...}, ...]} or {"prompt": ..., "response": ...}'
_MARKED = "{% generation", "{%- generation"  # a template that says itself what the assistant writes
Messages = list[dict[str, Any]]


class Example(NamedTuple):
    """One conversation: token ids, and which of them are to be learnt."""

    tokens: list[int]
    is_target: list[bool]

    def sample(self) -> dict[str, Tensor]:
        """What is kept of it: (length,) int32 each, -100 as a label where nothing is to be learnt."""
        tokens = torch.tensor(self.tokens, dtype=torch.int32)
        return {"input_ids": tokens, "labels": tokens.masked_fill(~torch.tensor(self.is_target), IGNORED)}


class Row(NamedTuple):
    """A line of a file: a conversation, or a text to go on from and how it goes on."""

    where: str
    """File and line, for messages."""
    messages: Messages
    is_pair: bool
    """Whether it was given as prompt and response."""
    in_validation: bool
    """Whether the share that is kept for validation holds it."""


def read_rows(path: Path, val_fraction: float = 0.0) -> Iterator[Row]:
    """Yield the rows of a JSONL file; empty lines are left out.

    Args:
        path: the file.
        val_fraction: share of rows that are for validation; a hash of a row decides, so that equal ones are together.

    Raises:
        DataError: a line is no JSON, or no conversation; with file and line.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is no JSON: {error}; give JSON lines, {_FORMS}") from error
            draw = int.from_bytes(hashlib.sha256(line.strip().encode()).digest()[:8], "big") / 2**64
            yield Row(where, *_messages(content, where), draw < val_fraction)


def _messages(content: Any, where: str) -> tuple[Messages, bool]:
    if isinstance(content, Mapping):
        prompt, response, messages = (content.get(name) for name in ("prompt", "response", "messages"))
        if isinstance(prompt, str) and isinstance(response, str):
            return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response}], True
        if isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages):
            if any(message["role"] == ASSISTANT for message in messages):
                return [dict(message) for message in messages], False
            raise DataError(f"{where}: no message has the role {ASSISTANT!r}, so there is nothing to learn")
    raise DataError(f"{where} is no conversation; give JSON lines, {_FORMS}")


def encode(tokenizer: Any, row: Row) -> Example:
    """The tokens of a conversation; targets are what the assistant says, with what ends its turn.

    Args:
        tokenizer: a fast tokenizer of `transformers`. Without a chat template it takes pairs alone: prompt, response
            and the token that ends a text, one after the other.
        row: the conversation.

    Raises:
        DataError: the template refuses it, or does not say where responses begin and end.
    """
    template = tokenizer.chat_template
    if template is None and not row.is_pair:
        raise DataError(f"{row.where} has messages, and the tokenizer has no chat template; give prompt and response")
    if isinstance(template, str) and any(mark in template for mark in _MARKED):
        told = _rendered(
            tokenizer, row, row.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Example(list(told["input_ids"]), [bool(value) for value in told["assistant_masks"]])
    text, spans = _pair(tokenizer, row) if template is None else _conversation(tokenizer, row)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_target = [
        end > start and any(first <= start < last for first, last in spans) for start, end in found["offset_mapping"]
    ]
    return Example(list(found["input_ids"]), is_target)


def _pair(tokenizer: Any, row: Row) -> tuple[str, list[tuple[int, int]]]:
    prompt, response = (str(message["content"]) for message in row.messages)
    begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    prompt = (tokenizer.bos_token if begins else "") + prompt
    text = prompt + response + (tokenizer.eos_token or "")
    return text, [(len(prompt), len(text))]


def _conversation(tokenizer: Any, row: Row) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and from where to where the assistant speaks."""
    text = _rendered(tokenizer, row, row.messages)
    spans = []
    for place, message in enumerate(row.messages):
        if message["role"] != ASSISTANT:
            continue
        before = _rendered(tokenizer, row, row.messages[:place], add_generation_prompt=True)
        until = _rendered(tokenizer, row, row.messages[: place + 1])
        if not (text.startswith(before) and text.startswith(until)):
            raise DataError(
                f"{row.where}: the chat template writes message {place + 1} otherwise once others follow, so it is not"
                " known what the assistant says; give rows with one response, or a template with {% generation %}"
            )
        spans.append((len(before), len(until)))
    return text, spans


def _rendered(tokenizer: Any, row: Row, messages: Messages, tokenize: bool = False, **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **how)
    except Exception as error:  # templates raise what they like
        raise DataError(f"{row.where}: the tokenizer's chat template refuses it: {error}") from error


class Padded:
    """Makes a batch of conversations, each padded on the right to the longest one.

    Args:
        padding: token id that stands where nothing is.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """``input_ids``, ``attention_mask`` and ``labels``: (batch, longest) int64 each."""
        tokens, labels = ([example[name].long() for example in examples] for name in ("input_ids", "labels"))
        pad = partial(pad_sequence, batch_first=True)
        return {
            "input_ids": pad(tokens, padding_value=self.padding),
            "attention_mask": pad([torch.ones_like(one) for one in tokens]),
            "labels": pad(labels, padding_value=IGNORED),
        }
