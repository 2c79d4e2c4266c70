"""What a checkpoint is, who wrote it, and what is in it, as facts and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_asyncpp.pipeline.checkpoint.origin import PIPELINE
from lightning_asyncpp.storage.index import files_of, is_sharded, read_index
from lightning_asyncpp.storage.reading import load
from lightning_asyncpp.tools.checkpoint.contents import Contents, contents_of, tensors_of

_OF_STRATEGY = (
    "num_stages", "partition", "data_parallel_size", "micro_batches", "delay", "fresh_last_stage", "synchronous_start",
    "weight_dtype", "seed", "mini_batch", "optimizer",
)  # fmt: skip
_LIGHTNING = "pytorch-lightning_version"


def describe(path: Path) -> dict[str, Any]:
    """Facts on a checkpoint, as JSON has them; what nobody wrote down is None. Tensors are not read.

    Args:
        path: a file, or a folder with an index.

    Raises:
        StorageError: it cannot be read.
    """
    content = load(path)
    contents = contents_of(content)
    entries = content if isinstance(content, Mapping) else {}
    weights = list(tensors_of(contents.parts["weights"]))
    elements = Counter[str]()
    for tensor in weights:
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return {
        "path": str(path),
        "form": "sharded" if path.is_dir() else "full",
        "description": contents.origin.description,
        "writer": contents.origin.writer or None,
        "strategy": contents.origin.strategy or None,
        "global_step": _plain(entries.get("global_step")),
        "epoch": _plain(entries.get("epoch")),
        **_of_strategy(contents),
        "parameters": sum(t.numel() for t in weights if t.is_floating_point()) if weights else None,
        "dtypes": dict(elements.most_common()),
        "lightning_version": _plain(entries.get(_LIGHTNING)),
        **_of_index(path),
        "bytes": {name: _num_bytes(part) for name, part in contents.parts.items()},
        "bytes_on_disk": size_on_disk(path),
    }


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if it is not there."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def table(facts: Mapping[str, Any]) -> str:
    """The facts, a line for each that is known."""
    progress = {"global_step": "step", "epoch": "epoch", "mini_batch": "mini-batch"}
    pipeline = {
        "num_stages": "stages", "partition": "partition", "data_parallel_size": "replicas",
        "micro_batches": "micro-batches", "delay": "delay",
    }  # fmt: skip
    shown = {
        "checkpoint": f"{facts['path']}, {facts['form']}{_parts(facts)}",
        "origin": facts["description"],
        "progress": _joined(facts, progress),
        "run": _joined(facts, pipeline),
        "model": f"{facts['parameters']:,} parameters" if facts["parameters"] is not None else "",
        "weights": ", ".join(f"{count:,} elements {dtype}" for dtype, count in facts["dtypes"].items()),
        "written with": f"lightning {facts['lightning_version']}" if facts["lightning_version"] else "",
        **{f"  {name}": f"{size:,} bytes" for name, size in facts["bytes"].items() if size},
        "on disk": f"{facts['bytes_on_disk']:,} bytes",
    }
    return "\n".join(f"{name:<22}{text}" for name, text in shown.items() if text)


def _of_strategy(contents: Contents) -> dict[str, Any]:
    facts = {name: _plain(contents.strategy.get(name)) for name in _OF_STRATEGY}
    if contents.origin.strategy != PIPELINE:  # an emulated delay may have stages without a pipeline
        facts["num_stages"] = _plain(contents.strategy.get("stages"))
    return facts


def _of_index(path: Path) -> dict[str, Any]:
    if not is_sharded(path):
        return {"format_version": None, "files": None}
    index = read_index(path)
    run, shards = files_of(index, path)
    files = {file.name: {"file": file.file, "bytes": file.num_bytes, "crc32": file.crc32} for file in (run, *shards)}
    return {"format_version": index["version"], "files": files}


def _num_bytes(part: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(part))


def _parts(facts: Mapping[str, Any]) -> str:
    files = facts["files"]
    return f" ({len(files) - 1} parts, version {facts['format_version']})" if files else ""


def _joined(facts: Mapping[str, Any], names: Mapping[str, str]) -> str:
    return ", ".join(f"{word} {facts[name]}" for name, word in names.items() if facts[name] is not None)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
