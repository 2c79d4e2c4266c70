"""A checkpoint in another form: one file, a folder of parts, or the weights alone; compared with the first one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from lightning_asyncpp.storage.durable import usual_mode
from lightning_asyncpp.storage.loading import damages, load, verify
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
Written = Callable[[int, int], None]


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


def convert(request: Request, written: Written = lambda num_bytes, total: None) -> None:
    """Write a checkpoint in another form; its tensors are mapped from the first one, not copied.

    Args:
        request: what to write.
        written: called with the bytes that were written since the last call, and with how many there will be.

    Raises:
        StorageError: the first one cannot be read, the second one cannot be written or is not equal, or something is in
            its place.
    """
    try:
        _convert(request, written)
    except UnicodeEncodeError as error:  # of safetensors and JSON
        raise StorageError(f"{request.source} cannot be written in this form: {error.object!r} is not UTF-8") from error


def _convert(request: Request, written: Written) -> None:
    output = request.output
    if os.path.lexists(output) and not request.force:
        raise StorageError(f"{output} exists already; name another, or give --force to replace it")
    if problems := damages(request.source):  # or the copy would have checksums that say it is whole
        raise StorageError("; ".join(problems))
    content = load(request.source)
    index = read_index(request.source) if is_sharded(request.source) else None
    if others := sorted({kind for tensor in tensors_of(content) if (kind := _kind_of_other(tensor))}):
        raise StorageError(f"{request.source} holds tensors of {', '.join(others)}, and only dense ones are written")
    contents = contents_of(content)
    if request.form == "weights":
        weights: Any = model_of(contents, request.entry)
        _write_weights(weights, output, written)
        check_equal(output, dict(sorted(weights.items())), dict(sorted(_load_weights(output).items())))
        return
    if not isinstance(content, Mapping):
        raise StorageError(f"{request.source} is no checkpoint: it holds a {type(content).__name__}")
    if request.form == "full":
        total = sum(tensor.nbytes for tensor in tensors_of(content))
        save_file(content, output, lambda num_bytes: written(num_bytes, total))
    else:
        about = {name: contents.strategy[name] for name in _OF_INDEX if name in contents.strategy}
        _write_sharded(request, content, contents, about if index is None else index["about"], written)
    if problems := verify(output):
        raise StorageError("; ".join(problems))
    check_equal(output, content, load(output))


def _kind_of_other(tensor: Tensor) -> str:
    """What a tensor is whose numbers are not one after the other in memory; nothing of the usual ones."""
    return str(tensor.layout) if tensor.layout != torch.strided else "the meta device" if tensor.is_meta else ""


def check_equal(path: Path, expected: Any, found: Any) -> None:
    """Compare two nested contents, bit for bit.

    Raises:
        StorageError: they differ.
    """
    if (place := next(_differences(expected, found), None)) is not None:
        raise StorageError(f"{path} differs from what it was converted from at {place or 'its top'}")


def _write_weights(weights: Mapping[str, Tensor], output: Path, written: Written) -> None:
    total = sum(tensor.nbytes for tensor in weights.values())
    if output.suffix != _SAFETENSORS:
        save_file(dict(weights), output, lambda num_bytes: written(num_bytes, total))
        return
    with written_beside(output) as partial, usual_mode(partial):
        save_tensors({name: tensor.contiguous() for name, tensor in without_aliases(weights).items()}, partial)
    written(total, total)


def _load_weights(path: Path) -> Any:
    if path.suffix != _SAFETENSORS:
        return load(path)
    from safetensors.torch import load_file

    return load_file(path)


def _write_sharded(
    request: Request, content: Mapping[str, Any], contents: Contents, about: Mapping[str, Any], written: Written
) -> None:
    stages = request.stages or _stages_of(contents)
    try:
        skeleton, tensors = take_apart(content)
    except ValueError as error:
        raise StorageError(f"{request.source} cannot be divided: {error}") from error
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards_of = _divided(tensors, stages)
    skeleton = put_together(skeleton, lambda entry: stored_in(entry, shard_name(shards_of[entry[STORED]])))
    target = new_target(request.output)
    try:
        shards = []
        for stage in range(stages):
            own = {name: tensor for name, tensor in tensors.items() if shards_of[name] == stage}
            shards.append(write_shard(target, shard_name(stage), own))
            written(sum(tensor.nbytes for tensor in own.values()), total)
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


def _differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    if isinstance(expected, Tensor):
        if not (isinstance(found, Tensor) and _same(expected, found)):
            yield place
    elif isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or list(expected) != list(found):
            yield place
            return
        for key, value in expected.items():
            yield from _differences(value, found[key], f"{place}/{key}")
    elif isinstance(expected, (list, tuple)):
        if type(expected) is not type(found) or len(expected) != len(found):
            yield place
            return
        for index, (one, other) in enumerate(zip(expected, found)):
            yield from _differences(one, other, f"{place}/{index}")
    elif type(expected) is not type(found) or not (expected == found or expected != expected):
        yield place


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.numel() == 0:
        return True
    # As bytes: a number that is none equals itself.
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
