"""The process groups of a Trainer or a Fabric go with it: each keeps threads that wake a hundred times a second."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_asyncpp.core.ranks import mesh
from lightning_asyncpp.fabric import AsyncPipelineStrategy
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit


def train_with_trainer() -> None:
    fit(Run(Net, "async", {"microbatches": 2}))


def set_up_fabric() -> None:
    devices = torch.distributed.get_world_size()
    fabric = Fabric(strategy=AsyncPipelineStrategy(microbatches=2), devices=devices, accelerator="cpu")
    fabric.launch()
    fabric.setup_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


TRAIN = {"trainer": train_with_trainer, "fabric": set_up_fabric}


def threads_after(kind: str) -> int:
    """Threads of this rank, once what was trained is gone; those of its groups end when the next are made."""
    grace, mesh.GRACE_SECONDS = mesh.GRACE_SECONDS, 0.0
    try:
        TRAIN[kind]()
    finally:
        mesh.GRACE_SECONDS = grace  # this process runs other tests, too
    gc.collect()
    time.sleep(0.2)  # a thread that was told to end is listed until it has
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("kind", TRAIN)
def test_no_thread_outlives_its_run(pools: Pools, kind: str) -> None:
    pools.run(2, threads_after, kind)
    first, *others = [pools.run(2, threads_after, kind) for _ in range(3)]
    assert all(now <= then for later in others for then, now in zip(first, later))
