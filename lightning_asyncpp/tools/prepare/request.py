"""What a preparation is asked to do, and what is wrong with it before anything is read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_asyncpp.data.hub import HUB, is_hub_name
from lightning_asyncpp.data.token_dataset import PARTIAL

_DATASET = re.compile(re.escape(HUB) + "datasets/[^/]+/[^/]+")


@dataclass(frozen=True)
class Request:
    """The arguments of ``asyncpp prepare``."""

    sources: tuple[str, ...]
    """Files, folders, globs, and URLs such as ``hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT``."""
    output: Path
    """Folder of the token shards; it exists only when they are complete."""
    tokenizer: str
    """``"byte"``, ``"bpe"``, the path of a tokenizer.json, or the name of a repository of models on the hub."""
    vocab_size: int | None = None
    """Number of token ids of a vocabulary to be trained (``"bpe"``)."""
    end_of_text: str | None = None
    """The token that ends a document; ``None`` for the tokenizer's usual one."""
    text_key: str = "text"
    """Column or field with the text."""
    val_fraction: float = 0.001
    """Share of the documents that are kept for validation."""
    num_workers: int = 0
    """Processes that tokenise; 0: this one."""
    piece_mb: float = 64.0
    """Megabytes of the source that are tokenised at a time, and lost at most per process by an interruption."""
    max_mb: float | None = None
    """Take pieces until they make so many megabytes of the source; ``None``: all."""

    @property
    def partial(self) -> Path:
        """Folder of the work in progress, beside the output."""
        return self.output.parent / (self.output.name + PARTIAL)

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the tokenizer is no file of this machine that could change."""
        return self.tokenizer in ("byte", "bpe") or is_hub_name(self.tokenizer)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the source in a piece."""
        piece_mb = self.piece_mb if self.max_mb is None else min(self.piece_mb, self.max_mb)
        return max(1, int(piece_mb * 1e6))

    def content(self) -> dict[str, Any]:
        """All that decides what is written. The number of processes does not."""
        return {
            "sources": [source if source.startswith(HUB) else str(_absolute(source)) for source in self.sources],
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "text_key": self.text_key,
            "val_fraction": self.val_fraction,
            "piece_mb": self.piece_mb,
            "max_mb": self.max_mb,
        }

    def problems(self) -> list[str]:
        """Say what is wrong with the arguments, each with its mend."""
        return [*self._wrong_numbers(), *self._wrong_tokenizer(), *self._wrong_places(), *self._missing_packages()]

    def _wrong_numbers(self) -> list[str]:
        problems = []
        if not 0 <= self.val_fraction < 1:
            problems.append(f"--val-fraction {self.val_fraction}: must be at least 0 and below 1")
        if self.num_workers < 0:
            problems.append(f"--num-workers {self.num_workers}: must be at least 0 (0: no further process)")
        for name, value in (("--piece-mb", self.piece_mb), ("--max-mb", self.max_mb)):
            if value is not None and not 0 < value < float("inf"):
                problems.append(f"{name} {value}: must be above 0 MB")
        if not self.text_key:
            problems.append("--text-key is empty; name the column or field with the text")
        return problems

    def _wrong_tokenizer(self) -> list[str]:
        problems = []
        if self.tokenizer == "bpe" and (self.vocab_size is None or self.vocab_size < 257):
            problems.append(f"--vocab-size {self.vocab_size}: --tokenizer bpe needs at least 257, the bytes and an end")
        if self.tokenizer != "bpe" and self.vocab_size is not None:
            problems.append(f"--vocab-size {self.vocab_size}: is for --tokenizer bpe, which is trained; leave it out")
        if self.tokenizer == "byte" and self.end_of_text is not None:
            problems.append(f"--end-of-text {self.end_of_text!r}: the byte tokenizer ends documents with byte 0")
        if not self.has_own_tokenizer and not _absolute(self.tokenizer).exists():
            problems.append(
                f"--tokenizer {self.tokenizer}: there is no such file; give byte, bpe, a tokenizer.json, or a name of "
                "the hub such as HuggingFaceTB/SmolLM-360M"
            )
        return problems

    def _wrong_places(self) -> list[str]:
        problems = [
            f"{source}: there is no such file or folder"
            for source in self.sources
            if not source.startswith(HUB) and not set("*?[") & set(source) and not _absolute(source).exists()
        ]
        problems += [
            f"{source}: is no place that can be read from; give a path, a glob, or {HUB}datasets/OWNER/NAME/FOLDER"
            for source in self.sources
            if "://" in source and not source.startswith(HUB)
        ]
        problems += [
            f"{source}: is no place of a dataset; give {HUB}datasets/OWNER/NAME, and a folder, file or glob if wanted"
            for source in self.sources
            if source.startswith(HUB) and not _DATASET.match(source)
        ]
        if not self.output.name or self.output.name == "..":
            return [*problems, f"--output {self.output}: name a folder that is to be made"]
        parents = (self.partial, *self.output.absolute().parents)
        existing = next(path for path in parents if path.exists())
        if not existing.is_dir():
            problems.append(f"--output {self.output}: {existing} is no folder; remove it, or name another output")
        elif not os.access(existing, os.W_OK):
            problems.append(f"--output {self.output}: {existing} cannot be written to; name another output")
        return problems

    def _missing_packages(self) -> list[str]:
        needed = {"pyarrow"}
        if any(source.startswith(HUB) for source in self.sources):
            needed.add("huggingface_hub")
        if self.tokenizer not in ("byte", "bpe") and is_hub_name(self.tokenizer):
            needed |= {"huggingface_hub", "tokenizers"}
        elif self.tokenizer != "byte":
            needed.add("tokenizers")
        missing = sorted(name for name in needed if find_spec(name) is None)
        return [f'{" and ".join(missing)} not installed: pip install "lightning-asyncpp[prepare]"'] if missing else []


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
