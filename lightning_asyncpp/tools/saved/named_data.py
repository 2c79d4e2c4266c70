"""The data that a checkpoint says its model was trained with: read only when the user has seen where they are.

A checkpoint may come from anywhere. What it names is a folder of whoever evaluates it, and would become tokens that
others may read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.data.corpus import LIBRARIES, TEXT_PATTERNS
from lightning_asyncpp.data.source import default_cache_dir, is_token_source, is_uri
from lightning_asyncpp.models import SavedGPT, WeightsError

_CLASS = "_class_path"  # so the command line calls it; what is built here is a TextDataModule, whatever it says
_OWN = ("lightning_asyncpp.data.TextDataModule", f"{TextDataModule.__module__}.{TextDataModule.__name__}")
_WRITES = ("cache_dir",)


def named_data(saved: SavedGPT) -> dict[str, Any]:
    """Arguments of the data module that the checkpoint names, but for places to write to: those are the user's own.

    Raises:
        WeightsError: it names none, or another class of data, which is not imported.
    """
    if saved.data is None:
        raise WeightsError(f"{saved.origin} does not say what it was trained on; name what to evaluate it on: --data")
    if (kind := saved.data.get(_CLASS)) is not None and kind not in _OWN:
        raise WeightsError(
            f"{saved.origin} was trained on data of the class {kind!r}, which is none of this package's and is not"
            " imported; name what to evaluate it on: --data"
        )
    known = TextDataModule.__init__.__annotations__
    named = {name: value for name, value in saved.data.items() if name in known and name not in _WRITES}
    patterns = named.get("patterns", TEXT_PATTERNS)
    places = [named.get("source", "stdlib"), named.get("val_source") or "", *_as_list(patterns)]
    if not all(isinstance(place, str) for place in places) or not places[0]:
        raise WeightsError(f"{saved.origin} names no data that can be read; name what to evaluate it on: --data")
    return named


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [None]


def confirm(saved: SavedGPT, options: Mapping[str, Any], is_agreed: bool) -> None:
    """Have the user agree to what is about to be read and written; on a terminal by asking.

    Args:
        saved: whose data they are.
        options: of the data module.
        is_agreed: whether the user agreed on the command line.

    Raises:
        WeightsError: there is nobody to be asked, or the answer is no.
    """
    if is_agreed:
        return
    shown = _shown(saved, options)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WeightsError(f"{shown}\nTo evaluate on this, give --yes; or name what to evaluate on: --data")
    if not _says_yes(f"{shown}\nRead this? [y/N] ", sys.stdin, sys.stderr):
        raise WeightsError("nothing was read; name what to evaluate on: --data")


def _shown(saved: SavedGPT, options: Mapping[str, Any]) -> str:
    """What is read and written, a line each; whatever stands in the checkpoint without characters that act."""
    source, val_source = str(options.get("source", "stdlib")), options.get("val_source")
    cache = options.get("cache_dir") or default_cache_dir()
    are_tokens = is_token_source(source)
    reads = [_place(source, options.get("patterns", TEXT_PATTERNS))]
    if val_source is not None:
        reads.append(_place(str(val_source), ()))
    writes = [] if are_tokens and not any(map(is_uri, (source, str(val_source)))) else [str(cache)]
    rows = [("class", _OWN[0]), *(("reads", place) for place in reads)]
    rows += [
        ("writes", f"{folder!r}, {'what is streamed' if are_tokens else 'the text as tokens'}") for folder in writes
    ]
    table = "\n".join(f"  {name:<8}{text}" for name, text in rows)
    return f"{saved.origin} names the data that its model was trained with:\n{table}"


def _place(source: str, patterns: Any) -> str:
    if source in LIBRARIES:
        return f"{source} (of this Python)"
    if is_token_source(source):
        return f"{source!r}, tokens"
    return f"{source!r}, text: {', '.join(repr(str(pattern)) for pattern in patterns)}"


def _says_yes(question: str, answers: TextIO, shown: TextIO) -> bool:
    shown.write(question)
    shown.flush()
    return answers.readline().strip().lower() in ("y", "yes")
