"""What GPUs allow: several stages on one, which NCCL refuses, and one queue for all that runs, which slows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_asyncpp.pipeline.errors import ConfigurationError

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def backend_of(devices: Sequence[torch.device] | None, given: str | None) -> str | None:
    """The process group's backend for the devices of this machine's ranks; None leaves the choice to Lightning.

    Args:
        devices: one for each rank of this machine.
        given: the user's choice.

    Raises:
        ConfigurationError: NCCL was chosen though ranks share a GPU, or have none.
    """
    gpus = [device for device in devices or () if device.type == "cuda"]
    is_nccl = given is not None and given.lower() == "nccl"  # torch takes it in any case
    if is_nccl and devices and not gpus:
        raise ConfigurationError(
            f"process_group_backend={given!r} needs GPUs, and the ranks of this machine are on"
            f" {', '.join(sorted({str(device) for device in devices}))}: leave the backend out"
        )
    if len(set(gpus)) == len(gpus):
        return given
    if is_nccl:
        raise ConfigurationError(
            f"process_group_backend={given!r}: NCCL refuses several ranks on one GPU, and"
            f" parallel_devices={[str(device) for device in gpus]} names one more than once; leave the backend out, or"
            " give every stage a GPU of its own"
        )
    return given or "gloo"


def queue_warning(device: torch.device, connections: str | None) -> str | None:
    """What to tell somebody whose GPU has one hardware queue for everything.

    Args:
        device: of this rank.
        connections: what the environment variable ``CUDA_DEVICE_MAX_CONNECTIONS`` says.
    """
    if device.type != "cuda" or connections != "1":
        return None
    return (
        f"{QUEUES_VARIABLE}=1 gives a GPU one queue, in which messages between stages and what is computed wait"
        " for each other: unset it, unless something else here needs it (Megatron's tensor parallelism does)"
    )
