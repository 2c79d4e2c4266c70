"""Worker processes that stay: each stands in an environment like torchrun's and runs one scenario after the other."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.core import failure_watch
from lightning_asyncpp.core.ranks.mesh import destroy_retired
from tests.helpers.workers import end_with_parent, free_port, worker_context

Scenario = Callable[..., Any]
SHORT_GRACE_SECONDS = 0.3


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to on one rank: a value, or an error with its class's name and its message."""

    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""


class TrainerPool:
    """``world_size`` processes in which Lightning sees externally started ranks; their process group is made once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = worker_context()
        self._tasks = [context.SimpleQueue() for _ in range(world_size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_work, args=(rank, world_size, port, self._tasks[rank], self._results), daemon=True)
            for port in (free_port(),)
            for rank in range(world_size)
        ]
        for process in self._processes:
            process.start()

    def outcomes(self, scenario: Scenario, *args: Any, timeout: float = 40.0) -> list[Outcome]:
        """Run a scenario on all ranks; what it came to on each, by rank."""
        for task in self._tasks:
            task.put((scenario, args))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size:
            try:
                rank, outcome = self._results.get(timeout=timeout)
            except Exception as error:
                ended = {rank: o.trace or "ended well" for rank, o in sorted(outcomes.items())}
                raise TimeoutError(
                    f"only these ranks of {self.world_size} ended within {timeout} s: {ended}"
                ) from error
            outcomes[rank] = outcome
        return [outcomes[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes; with SIGKILL, because a failed scenario may have left threads that wait on gloo."""
        for process in self._processes:
            process.kill()
            process.join(timeout=10)


class Pools:
    """One pool per number of processes, started when first needed and replaced after a hang."""

    def __init__(self) -> None:
        self._pools: dict[int, TrainerPool] = {}

    def outcomes(self, world_size: int, scenario: Scenario, *args: Any, timeout: float = 40.0) -> list[Outcome]:
        """Run a scenario on ``world_size`` ranks, errors included."""
        if world_size not in self._pools:
            self._pools[world_size] = TrainerPool(world_size)
        try:
            return self._pools[world_size].outcomes(scenario, *args, timeout=timeout)
        except BaseException:
            self._pools.pop(world_size).close()
            raise

    def run(self, world_size: int, scenario: Scenario, *args: Any, timeout: float = 40.0) -> list[Any]:
        """Run a scenario that must not fail; what it returned on each rank."""
        outcomes = self.outcomes(world_size, scenario, *args, timeout=timeout)
        failed = {rank: outcome.trace for rank, outcome in enumerate(outcomes) if outcome.error}
        if failed:
            self._pools.pop(world_size).close()  # another test's ranks may not find each other in it
        assert not failed, "\n".join(f"rank {rank}:\n{trace}" for rank, trace in failed.items())
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            pool.close()


def impatient(scenario: Scenario, *args: Any) -> Any:
    """Run a scenario in which one rank fails alone: it hangs up soon, not after the seconds that others have for it."""
    grace, failure_watch.GRACE_SECONDS = failure_watch.GRACE_SECONDS, SHORT_GRACE_SECONDS
    try:
        return scenario(*args)
    finally:
        failure_watch.GRACE_SECONDS = grace


def elastic_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables by which Lightning recognises torchrun."""
    return {
        "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
    }  # fmt: skip


def _work(rank: int, world_size: int, port: int, tasks: Any, results: Any) -> None:
    end_with_parent()
    os.environ.update(elastic_environment(rank, world_size, port))
    # Lightning would take cores / processes threads, and sums would be rounded differently for every number of stages.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=20))
    gc.freeze()
    held: list[BaseException] = []
    while True:
        scenario, args = tasks.get()
        # What failed holds its pipeline's connections, which another rank may have read from until it failed as well.
        # They are let go only now that all ranks have ended; their threads would take the next scenario's cores.
        held.clear()
        gc.collect()
        destroy_retired(grace=0.0)
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                outcome = Outcome(scenario(*args))
        except BaseException as error:
            held.append(error)
            outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
        sys.stdout.flush()
        results.put((rank, outcome))
