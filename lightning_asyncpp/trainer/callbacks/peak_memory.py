"""How much memory each stage of a pipeline has needed on its GPU."""

from __future__ import annotations

import torch

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.session import PipelineSession

_GB = 1e9


def peak_memory(session: PipelineSession, device: torch.device) -> dict[str, float]:
    """The most that torch has had allocated on each stage since its process began, in GB; a collective call on GPUs.

    Args:
        session: the pipeline, connected.
        device: of this rank.

    Returns:
        ``peak_memory_stage_0`` and so on, of several replicas the largest; empty where there are no GPUs.
    """
    if device.type != "cuda":
        return {}
    assert session.mesh is not None
    with session.watch.collective():
        own = f"{session.mesh.stage} {torch.cuda.max_memory_allocated(device)}"
        said = [text.split() for text in exchange(session.mesh, own)]
    peaks = [max(int(size) for stage, size in said if int(stage) == s) for s in range(session.mesh.num_stages)]
    return {f"peak_memory_stage_{stage}": peak / _GB for stage, peak in enumerate(peaks)}
