"""Arguments that no number of processes could make right: refused where a strategy is made, all at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.errors import ConfigurationError


class HasProblems(Protocol):
    """Settings that know what is wrong with them."""

    def problems(self) -> list[str]:
        """Each with its mend."""


def check_arguments(settings: HasProblems, **given: object) -> None:
    """Refuse what is wrong whatever the number of processes is.

    Args:
        settings: of the strategy.
        given: its other arguments, by name.

    Raises:
        ConfigurationError: with every problem.
    """
    problems = settings.problems()
    problems += [
        f"{name}={value!r} must be {wanted}" for name, value in given.items() if (wanted := _CHECKS[name](value))
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)


def _one_of(*values: object) -> Callable[[object], str | None]:
    words = " or ".join(repr(value) for value in values)
    return lambda value: None if any(value is v or (isinstance(value, str) and value == v) for v in values) else words


def _start_method(value: object) -> str | None:
    wanted = _one_of("popen", "spawn", "fork")(value)
    # Lightning gives them the model in shared memory, and a copy of it only to those that are spawned.
    return f"{wanted}: processes of a fork server would all train the same memory" if value == "forkserver" else wanted


def _switch(value: object) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _function(value: object) -> str | None:
    return None if value is None or callable(value) else "a function, or None"


def _name(what: str) -> Callable[[object], str | None]:
    return lambda value: None if value is None or (isinstance(value, str) and value) else f"the name of {what}, or None"


def _backend(value: object) -> str | None:
    if isinstance(value, str) and {":", ","} & set(value):
        return "one backend, such as 'nccl', and not several: host data goes over gloo anyway"
    if isinstance(value, str) and value and value.lower() not in dist.Backend.backend_list:
        return "a backend that torch.distributed knows, such as 'nccl' or 'gloo'"
    return _name("a backend of torch.distributed, such as 'nccl' or 'gloo'")(value)


def _devices(value: object) -> str | None:
    if value is None or (isinstance(value, list) and value and all(isinstance(d, torch.device) for d in value)):
        return None
    return "a list of devices, one for each rank of this machine: [torch.device('cuda:0')] * 4"


def _timeout(value: object) -> str | None:
    if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
        return None
    return "a datetime.timedelta above 0, such as timedelta(minutes=5), or None"


_CHECKS: dict[str, Callable[[object], str | None]] = {
    "timeout": _timeout,
    "interface": _name("a network interface, such as 'eth1'"),
    "process_group_backend": _backend,
    "parallel_devices": _devices,
    "start_method": _start_method,
    "state_dict_type": _one_of("full", "sharded"),
    "loss_reduction": _one_of("mean", "sum", None),
    "fresh_last_stage": _switch,
    "async_checkpoints": _switch,
    "inexact_resume": _switch,
    "find_unused_parameters": _switch,
    "split_batch": _function,
    "micro_batch_weight": _function,
}
