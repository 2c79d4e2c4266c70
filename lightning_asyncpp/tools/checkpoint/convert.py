"""A checkpoint in another form: one file, a folder of parts, or the weights alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from lightning_asyncpp.storage.durable import usual_mode
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.nested import STORED, put_together, stored_in, take_apart
from lightning_asyncpp.storage.sharded import (
    commit,
    give_up,
    is_sharded,
    new_target,
    read_index,
    shard_name,
    without_aliases,
    write_shard,
)
from lightning_asyncpp.storage.whole import save_file, written_beside
from lightning_asyncpp.tools.checkpoint.contents import Contents, contents_of, model_of, tensors_of

_SAFETENSORS = ".safetensors"
_OF_INDEX = (
    "num_stages", "data_parallel_size", "partition", "micro_batches", "delay", "staleness", "slack",
    "weight_dtype", "seed", "mini_batch", "optimizer",
)  # fmt: skip


class Request(NamedTuple):
    """What is asked for.

    Attributes:
        source: a checkpoint, in one file or sharded.
        output: what to write.
        form: ``"full"``, ``"sharded"`` or ``"weights"``.
        stages: number of parts of a folder; None for as many as the run had stages.
        entry: of the model, if there are several.
        force: whether what is there may be replaced.
    """

    source: Path
    output: Path
    form: str
    stages: int | None = None
    entry: str | None = None
    force: bool = False


def convert(request: Request) -> None:
    """Write a checkpoint in another form; its tensors are mapped from the first one, not copied.

    Raises:
        StorageError: the first one cannot be read, the second one cannot be written, or something is in its place.
    """
    output = request.output
    if os.path.lexists(output) and not request.force:
        raise StorageError(f"{output} exists already; name another, or give --force to replace it")
    content = load(request.source)
    index = read_index(request.source) if is_sharded(request.source) else None
    if others := sorted({kind for tensor in tensors_of(content) if (kind := _kind_of_other(tensor))}):
        raise StorageError(f"{request.source} holds tensors of {', '.join(others)}, and only dense ones are written")
    contents = contents_of(content)
    if request.form == "weights":
        _write_weights(model_of(contents, request.entry), output)
    elif not isinstance(content, Mapping):
        raise StorageError(f"{request.source} is no checkpoint: it holds a {type(content).__name__}")
    elif request.form == "full":
        save_file(content, output)
    else:
        about = {name: contents.strategy[name] for name in _OF_INDEX if name in contents.strategy}
        _write_sharded(request, content, contents, about if index is None else index["about"])


def _kind_of_other(tensor: Tensor) -> str:
    """What a tensor is whose numbers are not one after the other in memory; nothing of the usual ones."""
    return str(tensor.layout) if tensor.layout != torch.strided else "the meta device" if tensor.is_meta else ""


def _write_weights(weights: Mapping[str, Tensor], output: Path) -> None:
    if output.suffix != _SAFETENSORS:
        save_file(dict(weights), output)
        return
    with written_beside(output) as partial, usual_mode(partial):
        save_tensors({name: tensor.contiguous() for name, tensor in without_aliases(weights).items()}, partial)


def _write_sharded(request: Request, content: Mapping[str, Any], contents: Contents, about: Mapping[str, Any]) -> None:
    stages = request.stages or _stages_of(contents)
    try:
        skeleton, tensors = take_apart(content)
    except ValueError as error:
        raise StorageError(f"{request.source} cannot be divided: {error}") from error
    shards_of = _divided(tensors, stages)
    skeleton = put_together(skeleton, lambda entry: stored_in(entry, shard_name(shards_of[entry[STORED]])))
    target = new_target(request.output)
    try:
        shards = []
        for stage in range(stages):
            own = {name: tensor for name, tensor in tensors.items() if shards_of[name] == stage}
            shards.append(write_shard(target, shard_name(stage), own))
        commit(target, shards, skeleton, about)
    except BaseException:
        give_up(target)
        raise


def _divided(tensors: Mapping[str, Tensor], stages: int) -> dict[str, int]:
    """Tensor -> part, in their order, of about equal size; whoever reads them finds them in any."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    before, parts = 0, {}
    for name, tensor in tensors.items():
        parts[name] = min(before * stages // max(total, 1), stages - 1)
        before += tensor.nbytes
    return parts


def _stages_of(contents: Contents) -> int:
    stages = contents.strategy.get("num_stages")
    return stages if isinstance(stages, int) and stages > 0 else 1
