"""Several stages on one GPU: NCCL refuses that, so their messages take the way over the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_asyncpp.pipeline.errors import ConfigurationError


def backend_of(devices: Sequence[torch.device] | None, given: str | None) -> str | None:
    """The process group's backend for the devices of this machine's ranks; None leaves the choice to Lightning.

    Args:
        devices: one for each rank of this machine.
        given: the user's choice.

    Raises:
        ConfigurationError: NCCL was chosen though ranks share a GPU.
    """
    gpus = [device for device in devices or () if device.type == "cuda"]
    if len(set(gpus)) == len(gpus):
        return given
    if given is not None and "nccl" in given:
        raise ConfigurationError(
            f"process_group_backend={given!r}: NCCL refuses several ranks on one GPU, and"
            f" parallel_devices={[str(device) for device in gpus]} names one more than once; leave the backend out, or"
            " give every stage a GPU of its own"
        )
    return given or "gloo"
