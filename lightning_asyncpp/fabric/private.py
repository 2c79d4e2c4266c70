"""The private name of Fabric that the strategies need, behind a function that fails loudly without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.fabric import wrappers


class LightningChangedError(RuntimeError):
    """A private name of Lightning that this package relies on is gone."""


@contextmanager
def backward_allowed(allowed: bool) -> Iterator[None]:
    """Say whether a backward pass through a model that Fabric wrapped is one that Fabric knows of.

    Fabric hooks the output of ``model(...)`` so that a backward outside of ``fabric.backward`` raises. The engine runs
    the backwards itself; the user's step must not.

    Raises:
        LightningChangedError: Fabric has another way to tell by now.
    """
    if not hasattr(wrappers, "_in_fabric_backward"):
        raise LightningChangedError(
            f"lightning {L.__version__} has no lightning.fabric.wrappers._in_fabric_backward, which lightning_asyncpp"
            " needs to run backward passes; install a lightning version that it was tested with (2.6)"
        )
    before = wrappers._in_fabric_backward
    wrappers._in_fabric_backward = allowed
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before
