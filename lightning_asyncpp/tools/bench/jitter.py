"""Work that takes longer at one time than at another: factors that depend on what is worked on, not on who works."""

from __future__ import annotations

import random

from lightning_asyncpp.pipeline.schedule import Kind


def jitter_factor(sigma: float, seed: int, stage: int, micro_batch: int, kind: Kind) -> float:
    """What the length of a forward or a backward is multiplied by: lognormal, with median 1.

    The same arguments give the same factor in every process and for every system, so that their pairs are fair.

    Args:
        sigma: standard deviation of the factor's logarithm; 0 gives 1.
        seed: of the whole run.
        stage: of the pipeline, 0 first; the parts of a stage that is cut into chunks share its factors.
        micro_batch: counted over the run.
        kind: forward or backward.
    """
    if sigma == 0:
        return 1.0
    return random.Random(f"{seed}/{stage}/{micro_batch}/{kind.value}").lognormvariate(0.0, sigma)
