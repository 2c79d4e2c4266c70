"""How evenly the stages compute: what the cut of the model promised, measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Balance:
    """Computation of the stages against each other.

    Attributes:
        busiest: the stage that computes most.
        imbalance: its forwards and backwards over the mean of all stages'; 1 is even.
        layers: of each stage, first stage first; empty if they were not recorded.
    """

    busiest: int
    imbalance: float
    layers: tuple[int, ...] = ()

    def sentence(self) -> str:
        """For the table."""
        cut = f"; layers per stage: {', '.join(map(str, self.layers))}" if self.layers else ""
        return (
            f"Balance: the busiest stage, stage {self.busiest}, computes {self.imbalance:.2f} times the mean of the"
            f" stages{cut}."
        )


def balance_of(seconds: Mapping[int, float], layers: Mapping[int, int]) -> Balance | None:
    """Compare the stages; None if there is only one, or nothing was computed.

    Args:
        seconds: stage -> its time inside forwards and backwards, summed over the replicas.
        layers: stage -> its number of layers, 0 if it is not known.
    """
    mean = sum(seconds.values()) / max(len(seconds), 1)
    if len(seconds) < 2 or mean <= 0:
        return None
    busiest = max(seconds, key=lambda stage: seconds[stage])
    known = tuple(layers[stage] for stage in sorted(layers))
    return Balance(busiest, seconds[busiest] / mean, known if all(known) else ())
