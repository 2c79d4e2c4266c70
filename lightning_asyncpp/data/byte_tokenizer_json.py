"""The byte tokenizer in the words of a tokenizer.json, for programs that know no other form."""

from __future__ import annotations

import json
from typing import Any

END = "\0"


def byte_tokenizer_json() -> str:
    """Content of a tokenizer.json whose ids are the UTF-8 bytes; byte 0, as a special token, ends a document."""
    return json.dumps(_content(), ensure_ascii=False, indent=2)


def is_byte_tokenizer_json(content: str) -> bool:
    """Whether a tokenizer.json is that of the byte tokenizer."""
    if '"merges": []' not in content:
        return False
    try:
        return bool(json.loads(content) == _content())
    except ValueError:
        return False


def _content() -> dict[str, Any]:
    # A byte-pair encoding without pairs. Its alphabet has a printable character for each byte; for byte 0, which no
    # text holds, the token is that byte itself, or the character that stands for it would be taken for the end.
    vocabulary = {END if byte == 0 else character: byte for byte, character in _alphabet().items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _alphabet() -> dict[int, str]:
    """The character that stands for a byte in GPT-2's vocabulary: itself if it can be printed, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)}
