"""Training data of a loop over Fabric, which goes on where a checkpoint was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader, set_epoch, warn_if_inexact
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderBatch, PlaceholderLoader, shuffle_by_epoch


class FabricLoader(ResumableLoader):
    """What a loop over Fabric iterates: in a state for ``fabric.save`` it says where it is.

    After ``fabric.load`` the next loop over it reads the rest of its epoch, and those after it read the next ones. In
    which epoch it is, it counts itself: Fabric, which tells samplers, counts from the start of the process.

    Args:
        loader: of this replica; on a middle stage a :class:`PlaceholderLoader`.
    """

    def __init__(self, loader: Any) -> None:
        given = loader.loader if isinstance(loader, PlaceholderLoader) else loader
        shuffle_by_epoch(given, shuffle=True)
        super().__init__(loader, lambda: 0)
        self._given = given
        self._epoch, self._is_over = -1, True  # of the newest iteration
        self._newest: object = None
        self._rest: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that the loop has got, or between two epochs."""
        if self._rest is not None:  # loaded, and not gone on from yet
            return dict(self._rest)
        if self._resumed is not None:
            return {**self._resumed[0], "is_over": True}
        here = {"epoch": self._epoch, "is_over": self._is_over, "length": self.length}
        return {**here, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        if self._has_rest(state):
            warn_if_inexact(self._given, state)
        self._rest = state

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or the rest of the one in which the checkpoint was written."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._epoch, self._is_over = int(rest["epoch"]), bool(rest["is_over"])
        goes_on = rest is not None and not self._is_over
        if rest is not None and not (goes_on and self._has_rest(rest)):
            self.resume(rest, ended=True)
            if goes_on:  # nothing is left of its epoch; the next iteration is the next one's
                self._is_over = True
                return
        elif rest is not None:
            self.resume(rest, ended=False)
        self._epoch, self._is_over = self._epoch + (not goes_on), False
        self._newest = newest = object()
        try:
            yield from self._batches_of_epoch(int(rest["batches"]) if rest is not None and goes_on else 0)
        finally:
            if newest is self._newest:  # an older one may be given up later
                self._is_over = True

    def _batches_of_epoch(self, begun: int) -> Iterator[Any]:
        if not isinstance(self.loader, PlaceholderLoader):
            set_epoch(self.loader, self._epoch)
            yield from super().__iter__()
            return
        for number in range(begun, len(self.loader)):
            self._batches = number + 1
            yield PlaceholderBatch()

    def _has_rest(self, state: Mapping[str, Any]) -> bool:
        """Whether batches are left of the epoch in which a state was saved."""
        if state["is_over"] or state["exhausted"]:
            return False
        length = state["length"]
        return length is None or int(state["batches"]) < length


def resumable(loader: Any, given: Any) -> FabricLoader:
    """A loader that goes on where a checkpoint was, with the attributes (``dataset``, ``batch_size``) of the one given.

    Args:
        loader: what this rank iterates.
        given: what the user gave.
    """
    wrapped = FabricLoader(loader)
    attributes = {name: value for name, value in vars(given).items() if name not in ("state_dict", "load_state_dict")}
    vars(wrapped).update({**attributes, **vars(wrapped)})  # Fabric's wrapper shows those that are here
    return wrapped
