"""Checks that every rank must pass: what one of them finds, all of them raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.host_copies import as_bytes
from lightning_asyncpp.core.ranks.alike import raised_alike
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError, ConsequenceError, different_calls, lost_peers

T = TypeVar("T")
_FINISHED = "finished"
_MOST = 8  # differences that an error names
_REMEDY = "start all ranks with the same script, recipe and arguments"


class OtherStageFailedError(ConsequenceError):
    """Another rank failed at a check; its error is quoted."""


def exchange(mesh: Mesh, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Give every rank the value of every rank, in the order of ranks; a blocking collective.

    Args:
        mesh: this rank's place.
        value: of this rank: a text, nearly always.
        group: of all ranks, over gloo, if not the one that the training thread uses.

    Raises:
        ProtocolError: the values are of different types, as those of different calls.
    """
    if mesh.groups is None and group is None:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    with lost_peers():
        dist.all_gather_object(values, value, group=group or mesh.groups.host)  # type: ignore[union-attr]
    if len(types := {type(other).__name__ for other in values}) > 1:
        raise different_calls(f"they exchange values of the types {', '.join(sorted(types))}")
    return values


def broadcast(mesh: Mesh, value: T, source: int) -> T:
    """Return the value of rank ``source`` on all ranks; a blocking collective."""
    assert mesh.groups is not None
    values = [value]
    with lost_peers():
        dist.broadcast_object_list(values, source, group=mesh.groups.host)
    return values[0]


@torch.no_grad()
def broadcast_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite a tensor with that of a rank; a blocking collective.

    It travels as contiguous bytes: NCCL takes no others.

    Args:
        tensor: on the group's devices; of the same shape and dtype on all ranks.
        source: the rank, among all.
        group: default: all ranks.
    """
    data = as_bytes(tensor)
    dist.broadcast(data, source, group=group)
    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def copy_first_replica(mesh: Mesh, state_dict: Callable[[], Mapping[str, Tensor]]) -> None:
    """Overwrite tensors of a stage with those of replica 0; a blocking collective.

    Args:
        mesh: this rank's place.
        state_dict: of the stage, name -> tensor; not called with one replica.
    """
    group = mesh.groups.data_parallel if mesh.groups is not None else None
    if group is None:
        return
    source = mesh.rank_of(mesh.stage, replica=0)
    for tensor in state_dict().values():
        with lost_peers():
            broadcast_tensor(tensor, source, group)


def finish_together(mesh: Mesh) -> None:
    """Wait until all ranks finish; a blocking collective.

    Raises:
        ProtocolError: a rank is in another call, and would wait for this one.
    """
    calls = exchange(mesh, _FINISHED)
    if others := [f"rank {rank}" for rank, text in enumerate(calls) if text != _FINISHED]:
        raise different_calls(f"the run ends on this rank, and not on {', '.join(others)}")


def agree_on_problems(mesh: Mesh, problems: list[str]) -> None:
    """Raise one ConfigurationError with the problems of all ranks, each once, on every rank."""
    found: dict[str, None] = {}
    for text in exchange(mesh, "\0".join(problems)):
        found.update(dict.fromkeys(part for part in text.split("\0") if part))
    if found:
        raise raised_alike(ConfigurationError.from_problems(list(found)), mesh.rank)


def agree_on_error(mesh: Mesh, error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank failed, raise on every rank: its own error where there is one, else a quotation.

    Raises:
        ConfigurationError: on every rank, if that is what the failing ranks found.
        OtherStageFailedError: on the ranks without an error of their own.
    """
    config = isinstance(error, ConfigurationError)
    text = "" if error is None else f"{'C' if config else 'E'}{error if config else f'{type(error).__name__}: {error}'}"
    texts = exchange(mesh, text, group)
    configuration = list(dict.fromkeys(t[1:] for t in texts if t.startswith("C")))
    others = [(rank, t[1:]) for rank, t in enumerate(texts) if t.startswith("E")]
    if error is not None and texts.count(text) == len(texts) > 1:  # stages of one process are asked one by one
        raise raised_alike(error, mesh.rank)
    if error is not None and (not config or configuration == [str(error)]):
        raise error  # the whole story, with the place in the user's code
    if configuration:
        raise raised_alike(ConfigurationError.from_problems(configuration), mesh.rank) from error
    if others:
        quoted = "; ".join(f"rank {rank} (stage {mesh.stage_of(rank)}): {text}" for rank, text in others)
        raise OtherStageFailedError(quoted)


def compare_ranks(mesh: Mesh, entries: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare this rank's entries with those of rank 0; a blocking collective.

    Ranks exchange one hash each, and the entries themselves only if the hashes differ.

    Args:
        mesh: this rank's place.
        entries: name -> value, in words.
        group: of all ranks, over gloo, while the mesh has none.

    Raises:
        ConfigurationError: on every rank, if one differs; names the entries with both values.
    """
    text = json.dumps(entries, sort_keys=True)
    if len(set(exchange(mesh, hashlib.sha256(text.encode()).hexdigest(), group))) == 1:
        return
    first, *others = [json.loads(other) for other in exchange(mesh, text, group)]
    differing: dict[str, str] = {}  # named once, with the first rank that differs
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if (expected := first.get(name, "missing")) != (found := other.get(name, "missing")):
                differing.setdefault(name, f"{name} is {expected} on rank 0 and {found} on rank {rank}")
    problems = list(differing.values())
    if len(problems) > _MOST:
        problems = [*problems[:_MOST], f"{len(problems) - _MOST} more differ"]
    raise raised_alike(ConfigurationError.from_problems(problems, _REMEDY), mesh.rank)
