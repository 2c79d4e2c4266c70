"""Conversations as tokens: JSON lines, rendered by a chat template, with responses as targets."""

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
_MARKED = "{% generation", "{%- generation"  # templates with these tags mark the assistant's texts themselves
Messages = list[dict[str, Any]]


class Example(NamedTuple):
    """Token ids of a conversation, and whether each is a target."""

    tokens: list[int]
    is_target: list[bool]

    def sample(self) -> dict[str, Tensor]:
        """Return the tensors to store: (length,) int32 each, with a label of -100 where there is no target."""
        tokens = torch.tensor(self.tokens, dtype=torch.int32)
        return {"input_ids": tokens, "labels": tokens.masked_fill(~torch.tensor(self.is_target), IGNORED)}


class Row(NamedTuple):
    """Line of a file: a conversation, or a prompt with its response."""

    where: str
    """File and line, for messages."""
    messages: Messages
    is_pair: bool
    """Whether the line has a prompt and a response."""
    in_validation: bool
    """Whether the line belongs to the share for validation."""


def read_rows(path: Path, val_fraction: float = 0.0) -> Iterator[Row]:
    """Yield the rows of a JSONL file, without empty lines.

    Args:
        path: the file.
        val_fraction: share of rows for validation, chosen by a hash of the row, so that equal rows stay together.

    Raises:
        DataError: a line is not JSON or not a conversation; the message names file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}; give JSON lines, {_FORMS}") from error
            draw = int.from_bytes(hashlib.sha256(line.strip()).digest()[:8], "big") / 2**64
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
    raise DataError(f"{where} is not a conversation; give JSON lines, {_FORMS}")


def encode(tokenizer: Any, row: Row) -> Example:
    """Return the tokens of a conversation; targets are the assistant's texts, with the ends of their turns.

    Args:
        tokenizer: a fast tokenizer of `transformers`. Without a chat template only pairs work: prompt, response and the
            token that ends a text are concatenated, after the token that begins a text if the tokenizer adds it.
        row: the conversation.

    Raises:
        DataError: the template refuses the conversation, or does not show where responses begin and end.
    """
    template = tokenizer.chat_template
    if template is None and not row.is_pair:
        raise DataError(f"{row.where} has messages, and the tokenizer has no chat template; give prompt and response")
    if isinstance(template, str) and any(tag in template for tag in _MARKED):
        rendered = _rendered(
            tokenizer, row, row.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Example(list(rendered["input_ids"]), [bool(value) for value in rendered["assistant_masks"]])
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
    """Return the text of a conversation, and the spans of the assistant's texts."""
    text = _rendered(tokenizer, row, row.messages)
    spans = []
    for place, message in enumerate(row.messages):
        # Templates show no prompt before a turn with which a conversation begins, so it is no target.
        if message["role"] != ASSISTANT or all(m["role"] == ASSISTANT for m in row.messages[:place]):
            continue
        before = _rendered(tokenizer, row, row.messages[:place], add_generation_prompt=True)
        until = _rendered(tokenizer, row, row.messages[: place + 1])
        if not (text.startswith(before) and text.startswith(until)):
            raise DataError(
                f"{row.where}: the chat template renders message {place + 1} differently when further messages"
                " follow it, so the assistant's text cannot be found; give rows with one response, or a template with"
                " {% generation %}"
            )
        spans.append((len(before), len(until)))
    return text, spans


def _rendered(tokenizer: Any, row: Row, messages: Messages, tokenize: bool = False, **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **how)
    except Exception as error:  # templates may raise any exception
        raise DataError(f"{row.where}: the tokenizer's chat template refuses it: {error}") from error


def padded(padding: int, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Pad conversations on the right to the longest one, by the token id ``padding``.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``: (batch, longest) int64 each.
    """
    tokens, labels = ([example[name].long() for example in examples] for name in ("input_ids", "labels"))
    pad = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": pad(tokens, padding_value=padding),
        "attention_mask": pad([torch.ones_like(one) for one in tokens]),
        "labels": pad(labels, padding_value=IGNORED),
    }
