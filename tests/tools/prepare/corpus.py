"""Small corpora in every format, and an independent reader of the shards made of them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_asyncpp.data.tokenizer import Tokenizer
from lightning_asyncpp.tools.prepare.pieces import is_validation
from lightning_asyncpp.tools.prepare.work_plan import Request

WORDS = [
    "the",
    "model",
    "of",
    "a",
    "stage",
    "learns",
    "slowly;",
    "ünïcode,",
    "漢字",
    "and",
    "🙂",
    "numbers",
    "12345",
    "end\n",
]


def make_texts(count: int = 240, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{index} " + " ".join(draw.choices(WORDS, k=draw.randint(5, 120))) for index in range(count)]


def write(folder: Path, texts: Sequence[str | None], kind: str, files: int = 3, key: str = "text") -> Path:
    """Write ``texts`` as ``files`` files of a kind; the last of several lines has no newline at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = np.linspace(0, len(texts), files + 1).astype(int)
    for index, (start, stop) in enumerate(pairwise(bounds)):
        rows = [{"id": i, key: texts[i], "meta": {"score": 1.0, "tags": ["a"]}} for i in range(start, stop)]
        path = folder / f"{index:03d}.{kind}"
        lines = "\n".join(json.dumps(row, ensure_ascii=bool(index % 2)) for row in rows).encode()
        if kind == "parquet":
            schema = pa.schema([("id", pa.int64()), ("meta", pa.struct([("score", pa.float64())])), (key, pa.string())])
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=7)
        elif kind == "jsonl.gz":
            half = len(lines) // 2
            path.write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
        elif kind == "jsonl.zst":
            path.write_bytes(pa.Codec("zstd").compress(lines).to_pybytes())
        else:
            path.write_bytes(lines)
    return folder


def request(source: Path | str, output: Path, **arguments: Any) -> Request:
    given: dict[str, Any] = {"tokenizer": "byte", "val_fraction": 0.1, "piece_mb": 0.01, "num_workers": 0}
    return Request(sources=(str(source),), output=output, **{**given, **arguments})


def expected(texts: Sequence[str | None], tokenizer: Tokenizer, val_fraction: float) -> tuple[list[int], list[int]]:
    """What both splits have to hold."""
    splits: tuple[list[int], list[int]] = ([], [])
    for text in texts:
        if text:
            (tokens,) = tokenizer.encode_batch([text])
            splits[is_validation(text, val_fraction)].extend([*tokens.tolist(), int(tokenizer.end_of_document or 0)])
    return splits


def stored(folder: Path) -> tuple[list[int], list[int]]:
    """All tokens of both splits in their order, read without litdata."""
    dtype = np.dtype(json.loads((folder / "metadata.json").read_text())["dtype"])
    splits = []
    for name in ("train", "val"):
        index = folder / name / "index.json"
        chunks = json.loads(index.read_text())["chunks"] if index.exists() else []
        parts = [(folder / name / chunk["filename"], chunk["dim"] * dtype.itemsize) for chunk in chunks]
        splits.append([int(t) for path, size in parts for t in np.frombuffer(path.read_bytes()[-size:], dtype)])
    return splits[0], splits[1]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder, without the times that litdata writes into its indices."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    indices = [name for name in files if name.endswith("index.json")]
    for name in indices:
        files[name] = json.dumps({**json.loads(files[name]), "updated_at": ""}).encode()
    metadata = json.loads(files["metadata.json"])
    assert set(indices) <= set(metadata["checksums"])
    metadata["checksums"] = {name: value for name, value in metadata["checksums"].items() if name not in indices}
    return {**files, "metadata.json": json.dumps(metadata).encode()}
