"""Checks that every rank must pass: what one of them finds, all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.batches.structure import as_text, from_text
from lightning_asyncpp.core.host_copies import as_bytes
from lightning_asyncpp.core.ranks.alike import raised_alike
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError, ConsequenceError, different_calls, lost_peers

T = TypeVar("T")
_MOST_BYTES = 2**28
_FINISHED = "finished"


class OtherStageFailedError(ConsequenceError):
    """Another rank failed at a check; its error is quoted."""


def exchange(mesh: Mesh, text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Give every rank the text of every rank, in the order of ranks; a blocking collective.

    Args:
        mesh: this rank's place.
        text: of this rank.
        group: of all ranks, over gloo, if not the one that the training thread uses.
    """
    return [encoded.decode(errors="replace") for encoded in exchange_bytes(mesh, text.encode(), group)]


def exchange_bytes(mesh: Mesh, encoded: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Give every rank the bytes of every rank, as :func:`exchange` does.

    Raises:
        ProtocolError: a rank announces more than anybody has to say.
    """
    if mesh.groups is None and group is None:
        return [encoded]
    with lost_peers():
        group = group or mesh.groups.host  # type: ignore[union-attr]  # one of the two is there
        sizes = [int(size) for size in _gather(mesh, torch.tensor([len(encoded)]), group)]
        if not 0 <= min(sizes) <= max(sizes) <= _MOST_BYTES:
            raise different_calls(f"they exchange texts of {sizes} bytes, of which {_MOST_BYTES} is the most")
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        if encoded:
            mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = _gather(mesh, mine, group) if mine.numel() else [mine] * mesh.world_size
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes)]


def broadcast(mesh: Mesh, value: T, source: int) -> T:
    """Return the value of rank ``source`` on all ranks; a blocking collective.

    It travels as JSON, of which nothing is executed, unless there is more in it than plain values: Lightning sends
    plain ones while it trains. Others, of the set-up and of the user's own calls, are pickled.

    Raises:
        ProtocolError: what came cannot be what was sent.
    """
    assert mesh.groups is not None
    text = as_text(value) if mesh.rank == source else None
    pickled = mesh.rank == source and text is None
    head = torch.tensor([int(pickled), len(text or b"")])
    with lost_peers():
        dist.broadcast(head, source, group=mesh.groups.host)
        kind, size = head.tolist()
        if kind not in (0, 1) or not 0 <= size <= _MOST_BYTES:
            raise different_calls(f"rank {source} broadcasts {size} bytes of kind {kind}")
        if kind == 1:
            values = [value]
            dist.broadcast_object_list(values, source, group=mesh.groups.host)
            return values[0]
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, source, group=mesh.groups.host)
    received: T = value if mesh.rank == source else from_text(data.numpy().tobytes())
    return received


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
    said = exchange(mesh, _FINISHED)
    if others := [f"rank {rank}" for rank, text in enumerate(said) if text != _FINISHED]:
        raise different_calls(f"the run ends on this rank, and not on {', '.join(others)}")


def _gather(mesh: Mesh, tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(mesh.world_size)]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def agree_on_problems(mesh: Mesh, problems: list[str]) -> None:
    """Raise one ConfigurationError with the problems of all ranks, each once, on every rank."""
    found: dict[str, None] = {}
    for text in exchange(mesh, "\0".join(problems)):
        found.update(dict.fromkeys(part for part in text.split("\0") if part))
    if found:
        raise raised_alike(ConfigurationError.from_problems(list(found)), mesh.rank)


def agree_on_error(mesh: Mesh, error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank failed, raise on every rank: its own error where there is one, a quotation elsewhere.

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
