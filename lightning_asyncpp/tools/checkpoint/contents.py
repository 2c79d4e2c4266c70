"""What a checkpoint is and who wrote it, and what its entries are: weights, older weights, optimizer, corrections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.batches import tree
from lightning_asyncpp.core.checkpoint.state import MASTERS, OLDER, PIPELINE
from lightning_asyncpp.optim import ErrorFeedback, WeightPrediction
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.sharded import files_of, is_sharded, read_index

_CORRECTIONS = {*ErrorFeedback.keys, *WeightPrediction.keys}  # beside what the base keeps of a parameter
_OF_STRATEGY = (
    "num_stages", "partition", "data_parallel_size", "micro_batches", "lookahead", "delay", "staleness",
    "slack", "weight_dtype", "seed", "mini_batch", "optimizer",
)  # fmt: skip
_LIGHTNING = "pytorch-lightning_version"


class Contents(NamedTuple):
    """A checkpoint, taken apart.

    Attributes:
        writer: ``"Trainer"``; ``"Fabric"``, under a strategy of ours; or ``"weights"`` if it holds nothing else.
        models: entry -> ``state_dict`` of a model; the entry is empty for weights alone.
        strategy: what the pipeline kept.
        parts: part -> its tensors, nested.
    """

    writer: str | None
    models: dict[str, Mapping[str, Any]]
    strategy: Mapping[str, Any]
    parts: dict[str, Any]


def contents_of(content: Any) -> Contents:
    """Take a checkpoint apart.

    Args:
        content: all that it holds.
    """
    entries = content if isinstance(content, Mapping) else {}
    writer = _writer(entries)
    strategy = entries.get(PIPELINE, {})
    models = _models(writer, entries)
    states = [state for value in entries.values() for state in _optimizers(value)]
    optimizer = _without_corrections(states)
    stepped = {_identity(tensor) for tensor in tensors_of(optimizer)}
    parts = {
        "weights": models,
        "older weights": strategy.get(OLDER, {}),
        "masters": strategy.get(MASTERS, {}),
        "optimizer": optimizer,
        "correction buffers": [tensor for tensor in tensors_of(states) if _identity(tensor) not in stepped],
    }
    known = {_identity(tensor) for part in parts.values() for tensor in tensors_of(part)}
    other = [tensor for tensor in tensors_of(content) if _identity(tensor) not in known]
    return Contents(writer, models, strategy, {**parts, "else": other})


def model_of(contents: Contents, entry: str | None) -> dict[str, Tensor]:
    """The model's ``state_dict``; what a LightningModule puts before all names, ``model.``, is left out.

    Args:
        contents: of a checkpoint.
        entry: which, if there are several.

    Raises:
        StorageError: there is none, or several.
    """
    models = contents.models
    if entry is not None:
        models = {name: model for name, model in models.items() if name == entry}
    if len(models) != 1:
        if not contents.models:
            raise StorageError("the checkpoint has no model: nothing in it is a state_dict")
        found = ", ".join(contents.models)
        asked = "" if entry is None else f" called {entry!r}"
        raise StorageError(f"the checkpoint has not one model{asked}; its models are: {found}; name one: --entry NAME")
    (state,) = models.values()
    weights = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if contents.writer == "Trainer" and all(key.startswith("model.") for key in weights):
        weights = {key.removeprefix("model."): value for key, value in weights.items()}
    return weights


def tensors_of(content: Any) -> list[Tensor]:
    """All tensors of nested containers; one that has several names once."""
    found: dict[Any, Tensor] = {}
    for tensor in tree.tensors_of(content):
        found.setdefault(_identity(tensor), tensor)
    return list(found.values())


def _identity(tensor: Tensor) -> Any:
    if not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def _writer(entries: Mapping[str, Any]) -> str | None:
    if _LIGHTNING in entries:
        return "Trainer"
    if PIPELINE in entries:
        return "Fabric"
    return "weights" if entries and all(isinstance(value, Tensor) for value in entries.values()) else None


def _models(writer: str | None, entries: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if writer == "weights":
        return {"": entries}
    if writer == "Trainer":
        state = entries.get("state_dict")
        return {"state_dict": state} if isinstance(state, Mapping) else {}
    return {
        str(name): value
        for name, value in entries.items()
        if name != PIPELINE and isinstance(value, Mapping) and _is_model(value)
    }


def _is_model(state: Mapping[str, Any]) -> bool:
    return not list(_optimizers(state)) and any(isinstance(value, Tensor) for value in state.values())


def _optimizers(value: Any) -> Iterator[Mapping[str, Any]]:
    """The optimizer states in an entry: itself, or those in a list."""
    for state in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(state, Mapping) and "state" in state and "param_groups" in state:
            yield state


def _without_corrections(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_corrections(value) for key, value in node.items() if key not in _CORRECTIONS}
    return [_without_corrections(value) for value in node] if isinstance(node, (list, tuple)) else node


def describe(path: Path) -> dict[str, Any]:
    """Facts on a checkpoint, as JSON has them; what nobody wrote down is None. Tensors are not read.

    Args:
        path: a file, or a folder with an index.

    Raises:
        StorageError: it cannot be read.
    """
    content = load(path)
    index = read_index(path) if is_sharded(path) else None
    contents = contents_of(content)
    entries = content if isinstance(content, Mapping) else {}
    weights = tensors_of(contents.parts["weights"])
    elements = Counter[str]()
    for tensor in weights:
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return {
        "path": str(path),
        "form": "full" if index is None else "sharded",
        "writer": contents.writer,
        "global_step": _plain(entries.get("global_step")),
        "epoch": _plain(entries.get("epoch")),
        **{name: _plain(contents.strategy.get(name)) for name in _OF_STRATEGY},
        "parameters": sum(t.numel() for t in weights if t.is_floating_point()) if weights else None,
        "dtypes": dict(elements.most_common()),
        "lightning_version": _plain(entries.get(_LIGHTNING)),
        **_of_index(path, index),
        "bytes": {name: _num_bytes(part) for name, part in contents.parts.items()},
        "bytes_on_disk": size_on_disk(path),
    }


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if it is not there, or cannot be looked at."""
    total = 0
    with suppress(OSError):
        for file in path.iterdir() if path.is_dir() else [path]:
            with suppress(FileNotFoundError):  # a run may remove it right now
                total += file.stat().st_size if file.is_file() else 0
    return total


def table(facts: Mapping[str, Any]) -> str:
    """The facts, a line for each that is known."""
    progress = {"global_step": "step", "epoch": "epoch", "mini_batch": "mini-batch"}
    pipeline = {
        "num_stages": "stages", "partition": "partition", "data_parallel_size": "replicas",
        "micro_batches": "micro-batches", "lookahead": "lookahead", "delay": "delay", "staleness": "staleness",
        "slack": "slack",
    }  # fmt: skip
    shown = {
        "checkpoint": f"{facts['path']}, {facts['form']}{_parts(facts)}",
        "written by": facts["writer"] or "",
        "progress": _joined(facts, progress),
        "run": _joined(facts, pipeline),
        "model": f"{facts['parameters']:,} parameters" if facts["parameters"] is not None else "",
        "weights": ", ".join(f"{count:,} elements {dtype}" for dtype, count in facts["dtypes"].items()),
        "written with": f"lightning {facts['lightning_version']}" if facts["lightning_version"] else "",
        **{f"  {name}": f"{size:,} bytes" for name, size in facts["bytes"].items() if size},
        "on disk": f"{facts['bytes_on_disk']:,} bytes",
    }
    return "\n".join(f"{name:<22}{text}" for name, text in shown.items() if text)


def _of_index(path: Path, index: Mapping[str, Any] | None) -> dict[str, Any]:
    if index is None:
        return {"format_version": None, "files": None}
    run, shards = files_of(index, path)
    files = {file.name: {"file": file.file, "bytes": file.num_bytes} for file in (run, *shards)}
    return {"format_version": index["version"], "files": files}


def _num_bytes(part: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(part))


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
