"""A DataLoader that can say where in an epoch it is, and go on from there without reading what came before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

_GIVEN = "samples_given"


class DealtOut(DistributedSampler):
    """The share of a replica, in an order that follows from seed and epoch; its next iteration may begin later.

    Attributes:
        skipped: how many samples of this replica the next iteration leaves out at its beginning.
    """

    skipped = 0

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch."""
        skipped, self.skipped = self.skipped, 0
        return iter(list(super().__iter__())[skipped:])


class ResumableDataLoader(DataLoader):
    """Batches of the samples that a :class:`DealtOut` sampler orders; the same for any number of worker processes.

    Its state counts the samples of the batches that were given out, and not those that workers have read ahead.
    """

    _given = 0

    def state_dict(self) -> dict[str, int]:
        """How many samples of the epoch this replica has been given."""
        return {_GIVEN: self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on behind these samples."""
        self._given = self.sampler.skipped = int(state[_GIVEN])  # type: ignore[attr-defined]

    def __iter__(self) -> Any:
        """Iterate over the batches of the rest of the epoch."""
        self._given = self.sampler.skipped  # type: ignore[attr-defined]
        for batch in super().__iter__():
            self._given += len(next(iter(batch.values())))
            yield batch
        self._given = 0
