"""How much this process has done: counted where batches and micro-batches pass, and read by who watches over that."""

from __future__ import annotations


class Progress:
    """Counts what was done.

    Attributes:
        made: number of batches that were fetched, of forwards and backwards of micro-batches, and of messages with
            what a checkpoint holds.
    """

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 0


PROGRESS = Progress()
"""Of this process, whatever pipelines run in it."""
