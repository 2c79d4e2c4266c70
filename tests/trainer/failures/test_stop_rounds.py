"""Ranks with any numbers of evaluation batches stop together, and leave no message behind."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from lightning_asyncpp.core.ranks.agreement import StopRounds, batches_behind
from lightning_asyncpp.core.ranks.mesh import Groups, Mesh
from tests.helpers.pool import Pools

Place = tuple[int, int]


def evaluate(rounds: StopRounds, loaders: list[int], told: Place | None) -> Place | None:
    """Go through loaders with the given numbers of batches; return the loader and batch at which all ranks stop."""
    for loader, count in enumerate(loaders):
        for batch in range(count):
            if rounds.after_batch(told is not None and (loader, batch) >= told):
                return loader, batch
        if rounds.finish(told is not None and (loader, count) >= told):
            return loader, count
    return None


def random_evaluations(seed: int, number: int) -> list[tuple[int, list[list[int]], list[Place | None], Place | None]]:
    """Run random evaluations; return the batches of all ranks, when they were told to stop, and where this one did."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    draw, outcomes = random.Random(seed), []
    for _ in range(number):
        behind, num_loaders = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
        loaders = [[draw.randint(0, 9) for _ in range(num_loaders)] for _ in range(world)]
        told: list[Place | None] = [
            (draw.randrange(num_loaders), draw.randint(0, 9)) if draw.random() < 0.3 else None for _ in range(world)
        ]
        rounds = StopRounds(Mesh(1, world, rank, Groups(group, group)), behind)
        for _ in range(draw.choice([1, 2])):  # the rounds can be reused, however an evaluation ended
            ended = evaluate(rounds, loaders[rank], told[rank])
            total = torch.ones(1)
            dist.all_reduce(total, group=group)  # would receive a message left by another call
            assert total.item() == world
        outcomes.append((behind, loaders, told, ended))
    return outcomes


def test_all_ranks_end_where_they_have_to(pools: Pools) -> None:
    stopped = 0
    for evaluation in zip(*pools.run(3, random_evaluations, 3, 60)):
        behind, loaders, told, _ = evaluation[0]
        ended = [where for *_, where in evaluation]
        given = [(ask, counts) for ask, counts in zip(told, loaders) if ask is not None]
        if None in ended:
            assert set(ended) == {None}, "all or nobody"
            # A request is missed only if it came after the last flag of its rank.
            assert all(ask >= (len(counts) - 1, counts[-1]) for ask, counts in given)
            continue
        stopped += 1
        (loader,) = {place[0] for place in ended}
        first = min(ask for ask, _ in given)
        under_way = {batch for (_, batch), counts in zip(ended, loaders) if batch < counts[loader]}
        assert len(under_way) <= 1, "after the same batch"
        heard = [ask[1] for ask, counts in given if ask[0] == loader and ask[1] <= counts[loader]]
        if loader == first[0] and first[1] in heard:
            assert all(batch == first[1] + behind for batch in under_way)
    assert stopped > 10


def test_no_stage_waits_for_those_behind_it() -> None:
    """The last of four stages lags by less than a batch with four microbatches, and by three batches with one."""
    assert (batches_behind(4, 4), batches_behind(4, 1)) == (2, 5)
