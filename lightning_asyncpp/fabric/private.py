"""The private names of Fabric that the strategies need, each behind a function that fails loudly without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric import wrappers
from lightning.fabric.strategies.strategy import Strategy

from lightning_asyncpp.private_names import required


@contextmanager
def backward_allowed(allowed: bool) -> Iterator[None]:
    """Say whether a backward pass through a model that Fabric wrapped is one that Fabric knows of.

    Fabric hooks the output of ``model(...)`` so that a backward outside of ``fabric.backward`` raises. The engine runs
    the backwards itself; the user's step must not.

    Raises:
        PrivateNameError: Fabric has another way to tell by now.
    """
    before = required(wrappers, "_in_fabric_backward", "run backward passes")
    wrappers._in_fabric_backward = allowed
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before


def drop_backward_sync_control(strategy: Strategy) -> None:
    """Let ``fabric.no_backward_sync`` do nothing, as with strategies that have no reduction in the backward.

    Raises:
        PrivateNameError: Fabric has another way to tell by now.
    """
    required(strategy, "_backward_sync_control", "leave fabric.no_backward_sync without effect")
    strategy._backward_sync_control = None


def converted_state(
    strategy: Strategy, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None
) -> dict[str, Any]:
    """What ``fabric.save`` writes of its arguments: states of modules and optimizers in their place, filtered.

    Raises:
        PrivateNameError: Fabric has another way to tell by now.
    """
    convert = required(strategy, "_convert_stateful_objects_in_state", "save what fabric.save was given")
    converted: dict[str, Any] = convert(state, filter=filter or {})
    return converted
