"""Checks that every rank must pass: what one of them finds, all of them raise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.errors import ConfigurationError, lost_peers
from lightning_asyncpp.pipeline.mesh import Mesh


class OtherStageFailedError(RuntimeError):
    """Another rank failed at a check; its error is quoted."""


def exchange(mesh: Mesh, text: str) -> list[str]:
    """Give every rank the text of every rank, in the order of ranks; a blocking collective."""
    if mesh.groups is None:
        return [text]
    encoded = text.encode()
    with lost_peers():
        sizes = _gather(mesh, torch.tensor([len(encoded)]))
        mine = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        if encoded:
            mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = _gather(mesh, mine) if mine.numel() else [mine] * mesh.world_size
    return [bytes(row[: int(size)].tolist()).decode(errors="replace") for row, size in zip(rows, sizes)]


def _gather(mesh: Mesh, tensor: Tensor) -> list[Tensor]:
    assert mesh.groups is not None
    gathered = [torch.empty_like(tensor) for _ in range(mesh.world_size)]
    dist.all_gather(gathered, tensor, group=mesh.groups.host)
    return gathered


def agree_on_problems(mesh: Mesh, problems: list[str]) -> None:
    """Raise one ConfigurationError with the problems of all ranks, each once, on every rank."""
    found: dict[str, None] = {}
    for text in exchange(mesh, "\0".join(problems)):
        found.update(dict.fromkeys(part for part in text.split("\0") if part))
    if found:
        raise ConfigurationError.from_problems(list(found))


def agree_on_error(mesh: Mesh, error: Exception | None) -> None:
    """If any rank failed, raise on every rank: its own error where there is one, a quotation elsewhere.

    Raises:
        ConfigurationError: on every rank, if that is what the failing ranks found.
        OtherStageFailedError: on the ranks without an error of their own.
    """
    config = isinstance(error, ConfigurationError)
    text = "" if error is None else f"{'C' if config else 'E'}{error if config else f'{type(error).__name__}: {error}'}"
    texts = exchange(mesh, text)
    configuration = list(dict.fromkeys(t[1:] for t in texts if t.startswith("C")))
    others = [(rank, t[1:]) for rank, t in enumerate(texts) if t.startswith("E")]
    if error is not None and (not config or configuration == [str(error)]):
        raise error  # the whole story, with the place in the user's code
    if configuration:
        raise ConfigurationError.from_problems(configuration) from error
    if others:
        quoted = "; ".join(f"rank {rank} (stage {mesh.stage_of(rank)}): {text}" for rank, text in others)
        raise OtherStageFailedError(quoted)
