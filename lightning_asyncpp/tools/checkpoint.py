"""``asyncpp checkpoint info|convert``: describe a checkpoint, or write it as one file or as weights only."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file as save_safetensors
from torch import Tensor

from lightning_asyncpp.core.checkpoint import PIPELINE
from lightning_asyncpp.core.tree import tensors_of
from lightning_asyncpp.storage import StorageError, atomic_write, is_sharded, load, read_index, save_file
from lightning_asyncpp.tools.parsers import checkpoint_parser

_OF_PIPELINE = (
    "num_stages", "partition", "data_parallel_size", "microbatches", "lookahead", "delay", "staleness", "slack",
    "synchronous_start", "weight_dtype", "seed", "mini_batch", "optimizer",
)  # fmt: skip
_LIGHTNING = "pytorch-lightning_version"


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp checkpoint <command> ...``."""
    parser = checkpoint_parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "info":
        facts = describe(Path(arguments.checkpoint).expanduser())
        print(json.dumps(facts, indent=2, default=str) if arguments.json else table(facts))
        return
    if arguments.entry is not None and arguments.to != "weights":
        parser.error(f"--entry {arguments.entry} works only with --to weights")
    if arguments.to == "full" and arguments.output.endswith(".safetensors"):
        parser.error(f"--to full cannot write {arguments.output}: safetensors hold only tensors; use --to weights")
    _convert(arguments)


def _convert(arguments: Namespace) -> None:
    source, output = Path(arguments.checkpoint).expanduser(), Path(arguments.output).expanduser()
    if os.path.lexists(output) and not arguments.force:
        raise StorageError(f"{output} exists already; name another file, or replace it with --force")
    content = load(source)
    if not isinstance(content, Mapping):
        raise StorageError(f"{source} is not a checkpoint: it contains a {type(content).__name__}")
    if arguments.to == "full":
        save_file(content, output)
    else:
        _write_weights(model_in(content, arguments.entry), output)
    print(f"{output}: {arguments.to}, {output.stat().st_size:,} bytes")


def _write_weights(weights: Mapping[str, Tensor], output: Path) -> None:
    if output.suffix != ".safetensors":
        save_file(dict(weights), output)
        return
    with atomic_write(output) as partial:
        # The format does not allow tensors that share memory.
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        save_safetensors(own, partial)
        partial.chmod(0o644)  # safetensors writes files that only their owner can read


def describe(path: Path) -> dict[str, Any]:
    """Return facts about a checkpoint, without reading tensors; unknown facts are None.

    Args:
        path: a file, or a folder with an index.

    Raises:
        StorageError: the checkpoint cannot be read.
    """
    content = load(path)
    files = read_index(path) if is_sharded(path) else None
    entries = content if isinstance(content, Mapping) else {}
    pipeline = entries.get(PIPELINE, {})
    weights = _distinct(models_in(entries))
    elements = Counter[str]()
    for tensor in weights:
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return {
        "path": str(path),
        "form": "full" if files is None else "sharded",
        "writer": writer_of(entries),
        "global_step": entries.get("global_step"),
        "epoch": entries.get("epoch"),
        **{name: pipeline.get(name) for name in _OF_PIPELINE},
        "parameters": sum(t.numel() for t in weights if t.is_floating_point()) if weights else None,
        "dtypes": dict(elements.most_common()),
        "lightning_version": entries.get(_LIGHTNING),
        "files": files,
        "bytes_on_disk": path.stat().st_size if files is None else sum(files.values()),
    }


def table(facts: Mapping[str, Any]) -> str:
    """Return the known facts as text, one per line."""
    known = {name: value for name, value in facts.items() if value not in (None, {})}
    return "\n".join(f"{name:<20}{', '.join(v) if isinstance(v, dict) else v}" for name, v in known.items())


def writer_of(entries: Mapping[str, Any]) -> str | None:
    """Return the writer of a checkpoint; None if it is unknown.

    The writer is ``"Trainer"``, ``"Fabric"`` (with a strategy of this package), or ``"weights"`` if there are only
    tensors.
    """
    if _LIGHTNING in entries:
        return "Trainer"
    if PIPELINE in entries:
        return "Fabric"
    return "weights" if entries and all(isinstance(value, Tensor) for value in entries.values()) else None


def models_in(entries: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the ``state_dict`` of each model by its entry, which is ``""`` if the checkpoint has only tensors."""
    writer = writer_of(entries)
    if writer == "weights":
        return {"": entries}
    if writer == "Trainer":
        state = entries.get("state_dict")
        return {"state_dict": state} if isinstance(state, Mapping) else {}
    return {
        str(name): value
        for name, value in entries.items()
        if name != PIPELINE
        and isinstance(value, Mapping)
        and "param_groups" not in value
        and any(isinstance(child, Tensor) for child in value.values())
    }


def model_in(entries: Mapping[str, Any], entry: str | None) -> dict[str, Tensor]:
    """Return the model's ``state_dict`` without a LightningModule's prefix ``model.``.

    Args:
        entries: entries of a checkpoint.
        entry: entry of the model; not needed if there is only one.

    Raises:
        StorageError: there is no such model, or there are several and no ``entry``.
    """
    models = models_in(entries)
    chosen = models if entry is None else {name: model for name, model in models.items() if name == entry}
    if not models:
        raise StorageError("the checkpoint has no model: nothing in it is a state_dict")
    if len(chosen) != 1:
        asked = "" if entry is None else f" called {entry!r}"
        raise StorageError(
            f"the checkpoint has {len(chosen) or 'no'} models{asked}; choose one with --entry: {', '.join(models)}"
        )
    (state,) = chosen.values()
    weights = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    prefix = "model." if writer_of(entries) == "Trainer" and all(key.startswith("model.") for key in weights) else ""
    return {key.removeprefix(prefix): value for key, value in weights.items()}


def _distinct(content: Any) -> list[Tensor]:
    """Return the tensors in nested containers; a shared tensor is returned once."""
    found: dict[Any, Tensor] = {}
    for tensor in tensors_of(content):
        key: Any = id(tensor)
        if tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
            key = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        found.setdefault(key, tensor)
    return list(found.values())
