"""Persistent worker processes, each in an environment like torchrun's, that run one scenario after another."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import AssertionRewritingHook
from torch import multiprocessing as mp

from lightning_asyncpp.core import failure_watch
from lightning_asyncpp.core.ranks.mesh import Mesh, destroy_retired
from tests.helpers.cases import Case
from tests.helpers.engine import run_case

Scenario = Callable[..., Any]
Prepare = Callable[[int], Callable[[], None]]
"""Function that each worker calls with its rank when it starts; it returns a function to call after every case."""
SHORT_GRACE_SECONDS = 0.3
opened = contextlib.closing  # context manager that closes pools
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def worker_context() -> Any:
    """Return the context of a fork server, whose processes take milliseconds to start, not seconds."""
    return mp.get_context("forkserver")


def fork_server() -> None:
    """Fork the server of :func:`worker_context` from this process, which has imported all tests.

    A usual server would import them again, and so would each of its processes. Call this before the first test: a fork
    has no other threads. A fork cannot use a GPU and may crash on macOS, so the usual server is used there.
    """
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return

    spawn = multiprocessing.util.spawnv_passfds

    def fork(path: str, arguments: list[str], descriptors: Sequence[int]) -> int:
        if child := os.fork():
            return child
        os.close(sys._getframe(1).f_locals["alive_w"])  # the server ends when no process holds this end of a pipe
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        for handler in (reference() for reference in logging._handlerList):  # type: ignore[attr-defined]
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setStream(sys.stderr)
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]  # its lock is held
        multiprocessing.util.spawnv_passfds = spawn
        torch.cuda._is_in_bad_fork = bool  # false, even if a test's module has asked for CUDA
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)

    multiprocessing.resource_tracker.ensure_running()  # a separate program, which must not be forked
    with patch.object(multiprocessing.util, "spawnv_passfds", fork):
        multiprocessing.forkserver.ensure_running()


def end_with_parent() -> None:
    """End this worker when its parent process has ended, since killed tests would leave it running."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not called in a worker"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def free_port() -> int:
    """Return a free port that, until it is used, no connection of another process gets by chance."""
    ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 32_768
    while True:
        port = 10_000 + secrets.randbelow(ephemeral - 10_000)  # ``random`` has the same seed in all workers
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Outcome:
    """Result of a scenario on one rank: its value, or the class name, message and traceback of its error."""

    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""


class TrainerPool:
    """Processes that Lightning takes for ``world_size`` externally started ranks, with one lasting process group."""

    def __init__(self, world_size: int, prepare: Prepare | None = None) -> None:
        self.world_size = world_size
        context = worker_context()
        self._tasks = [context.SimpleQueue() for _ in range(world_size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_work, args=(rank, world_size, port, task, self._results, prepare), daemon=True)
            for port in (free_port(),)
            for rank, task in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def outcomes(
        self, scenario: Scenario, *args: Any, timeout: float = 40.0, until_error: bool = False
    ) -> list[Outcome]:
        """Run a scenario on all ranks and return the outcomes by rank; ``until_error`` raises at the first error."""
        self._signal(signal.SIGCONT)
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
            assert not (until_error and outcome.error), f"rank {rank} failed on {args}:\n{outcome.trace}"
            outcomes[rank] = outcome
        self._signal(signal.SIGSTOP)  # gloo's threads would poll for messages a hundred times per second
        return [outcomes[rank] for rank in range(self.world_size)]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def close(self) -> None:
        """End the processes with SIGKILL, because a failed scenario may have left threads that wait on gloo."""
        for process in self._processes:
            process.kill()
            process.join(timeout=10)


class Pools:
    """One pool per number of processes, started when first needed and replaced after a hang."""

    def __init__(self, prepare: Prepare | None = None) -> None:
        self._prepare = prepare
        self._pools: dict[int, TrainerPool] = {}

    def outcomes(self, world_size: int, scenario: Scenario, *args: Any, **limits: Any) -> list[Outcome]:
        """Run a scenario that may fail on ``world_size`` ranks; ``limits`` are as in :meth:`TrainerPool.outcomes`."""
        if world_size not in self._pools:
            self._pools[world_size] = TrainerPool(world_size, self._prepare)
        try:
            return self._pools[world_size].outcomes(scenario, *args, **limits)
        except BaseException:
            self._pools.pop(world_size).close()
            raise

    def run(self, world_size: int, scenario: Scenario, *args: Any, timeout: float = 40.0) -> list[Any]:
        """Run a scenario that must not fail, and return its value on each rank."""
        outcomes = self.outcomes(world_size, scenario, *args, timeout=timeout)
        failed = {rank: outcome.trace for rank, outcome in enumerate(outcomes) if outcome.error}
        if failed:
            self._pools.pop(world_size).close()  # in the next test, its ranks might not find each other
        assert not failed, "\n".join(f"rank {rank}:\n{trace}" for rank, trace in failed.items())
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            pool.close()


class EnginePools(Pools):
    """Pools of processes that run only the engine; D replicas of P stages form a D x P mesh."""

    def run(self, case: Case, num_stages: int) -> list[dict[str, Any]]:  # type: ignore[override]
        """Run a case and return the results by rank, so the last stage of replica 0 comes first."""
        world_size = num_stages * case.data_parallel_size
        if world_size == 1:
            return [run_case(case, Mesh(1, 1, 0))]
        outcomes = self.outcomes(world_size, _run_on_this_rank, case, timeout=120.0, until_error=True)
        return [outcome.value for outcome in outcomes]


_meshes: dict[int, Mesh] = {}  # meshes of this worker by the number of replicas
_checks: list[Callable[[], None]] = []  # functions that ``prepare`` returned, to be called after every case


def _run_on_this_rank(case: Case) -> dict[str, Any]:
    replicas = case.data_parallel_size
    if replicas not in _meshes:
        _meshes[replicas] = Mesh(dist.get_world_size() // replicas, replicas, dist.get_rank())
        _meshes[replicas].connect(direct=bool(_checks))
    outcome = run_case(case, _meshes[replicas])
    for check in _checks:
        check()
    # NumPy arrays are sent by value; tensors would be shared through file descriptors
    return {k: {n: t.numpy() for n, t in v.items()} if isinstance(v, dict) else v for k, v in outcome.items()}


def impatient(scenario: Scenario, *args: Any) -> Any:
    """Run a scenario in which one rank fails alone, with a shorter wait than usual before it ends its connections."""
    grace, failure_watch.GRACE_SECONDS = failure_watch.GRACE_SECONDS, SHORT_GRACE_SECONDS
    try:
        return scenario(*args)
    finally:
        failure_watch.GRACE_SECONDS = grace


def elastic_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables by which Lightning recognises torchrun."""
    return {
        "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
    }  # fmt: skip


def _work(rank: int, world_size: int, port: int, tasks: Any, results: Any, prepare: Prepare | None) -> None:
    end_with_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG works even while this process is stopped
    os.environ.update(elastic_environment(rank, world_size, port))
    # Lightning would use cores / processes threads, so the rounding of sums would depend on the number of stages.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=20))
    if prepare is not None:
        _checks.append(prepare(rank))
    gc.freeze()
    held: list[BaseException] = []
    while True:
        scenario, args = tasks.get()
        # An error keeps its pipeline's connections open, since other ranks may read from them until they fail as well.
        # They are closed now that all ranks have ended, since their threads would take cores from the next scenario.
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
