"""Environment variables that change how a pipeline runs on GPUs: what each does, and which values are a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_OFF = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: of it.
        is_problem: value -> whether it is one.
        effect: what such a value does.
        fix: what to do.
    """

    name: str
    is_problem: Callable[[str], bool]
    effect: str
    fix: str


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF


def _is_zero(value: str) -> bool:
    return value.strip() == "0"


def _few(value: str) -> bool:
    return value.strip().isdigit() and int(value) < 4


VARIABLES = (
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS", _few,
        "all streams of a GPU share so few hardware queues: a message that waits for its peer holds up what is computed"
        " behind it, so nothing overlaps. Scripts made for Megatron's tensor parallelism set it to 1",
        "unset it, or set it to 8 (the default) or more, up to 32",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING", _is_on,
        "the host waits for every kernel: nothing overlaps, and speed means nothing; it is for debugging", "unset it",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT", _is_on,
        "the host waits for every message: stages no longer run ahead of each other", "unset it",
    ),
    Variable(
        "NCCL_BLOCKING_WAIT", _is_on,
        "the host waits for every message: stages no longer run ahead of each other", "unset it",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", _is_zero,
        "nobody ends a rank whose message never comes: a lost peer may leave the others waiting", "unset it",
    ),
    Variable("NCCL_P2P_DISABLE", _is_on, "messages between GPUs of this machine go through its memory", "unset it"),
    Variable(
        "NCCL_SHM_DISABLE", _is_on, "where GPUs do not reach each other, messages go through the network", "unset it"
    ),
    Variable("NCCL_IB_DISABLE", _is_on, "messages between machines go over TCP instead of InfiniBand", "unset it"),
    Variable(
        "NCCL_DEBUG", lambda value: value.strip().upper() in ("INFO", "TRACE"),
        "NCCL writes much, TRACE for every call", "unset it, or set it to WARN, once NCCL works",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on,
        "every tensor is asked of the driver and given back, for which the whole device is waited", "unset it",
    ),
    Variable(
        "OMP_NUM_THREADS", lambda value: value.strip().isdigit() and int(value) > 16,
        "every rank of a machine starts as many threads on its CPUs", "set it to the cores divided by the ranks",
    ),
)  # fmt: skip


def problems(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Variables whose values are a problem: (assignment, effect, fix)."""
    found = []
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if value is not None and variable.is_problem(value):
            found.append((f"{variable.name}={value}", variable.effect, variable.fix))
    return found
