"""Runs all systems of a benchmark in turn, in the same processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from research.benchmarks import link
from research.benchmarks.run import RankRun, Run
from research.benchmarks.systems import run_system

R = TypeVar("R", bound=Run)


def measure(run: R) -> tuple[R, dict[str, list[list[RankRun]]]]:
    """Run all systems in new processes; how far they are goes to standard error.

    Returns the run as it was prepared, and system -> repeats -> what each process measured.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lightning", "research.benchmarks.systems"])
    with tempfile.TemporaryDirectory() as name, _hosts(run) as hosts:
        for line in hosts.facts:
            print(line, file=sys.stderr, flush=True)
        arguments = run, Path(name), hosts, _free_port()
        start_processes(_work, arguments, run.processes, start_method="forkserver")
        ranks = [pickle.loads(Path(name, str(rank)).read_bytes()) for rank in range(run.processes)]
    runs: dict[str, list[list[RankRun]]] = {system: [] for system in run.systems}
    for of_ranks in zip(*(of_rank for _, of_rank in ranks), strict=True):
        runs[of_ranks[0].system].append(list(of_ranks))
    return ranks[0][0], runs


def _hosts(run: Run) -> nullcontext[link.Hosts] | link.OpenedHosts:
    if run.hosts == 1:
        return nullcontext(link.Hosts(("127.0.0.1",)))
    return link.open_hosts(run.link_latency_ms, run.link_mbit)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, run: Run, folder: Path, hosts: link.Hosts, port: int) -> None:
    """Run all systems as one rank."""
    host, local_rank = divmod(rank, run.processes // run.hosts)
    places = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": host, "WORLD_SIZE": run.processes}
    os.environ.update({name: str(value) for name, value in places.items()}, **hosts.environment)
    os.environ.update(MASTER_ADDR=hosts.addresses[0], MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning gives each rank the cores of its host
    hosts.enter(host)
    if run.pinned and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    gc.freeze()  # or the first collection copies what the ranks share, amid what is measured
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    run = run.prepared()
    runs = [_run(run, system, repeat) for repeat in range(run.repeats) for system in run.order(repeat)]
    (folder / str(rank)).write_bytes(pickle.dumps((run, runs)))
    dist.barrier()
    dist.destroy_process_group()


def _run(run: Run, system: str, repeat: int) -> RankRun:
    started = time.monotonic()
    done = run_system(run, system)
    if dist.get_rank() == 0:
        seconds = time.monotonic() - started
        print(f"repeat {repeat + 1} of {run.repeats}: {system} took {seconds:.1f} s", file=sys.stderr, flush=True)
    return done
