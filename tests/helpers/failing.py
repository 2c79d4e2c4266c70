"""Separate processes for runs that fail, and the scenarios in which they fail."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.engine import Engine, StageEngine
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.agreement import agree_on_error
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Staleness
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.updates.update import Update
from lightning_asyncpp.errors import NonFiniteGradientError
from tests.helpers.cases import Case, make_model
from tests.helpers.pool import free_port, worker_context
from tests.nccl_rules.late import know_on_device_alone

CPU = torch.device("cpu")
ALIVE: list[Any] = []  # keeps runs alive: a sent message may never arrive if its tensor is freed
Batch = dict[str, Tensor]


@dataclass
class Outcome:
    """Outcome of a rank: the name and text of an error, or the value that the scenario returned."""

    error: str = ""
    text: str = ""
    value: Any = None
    seconds: float = 0.0


def run_ranks(scenario: Callable[..., Any], world_size: int, *args: Any, timeout: float = 40.0) -> list[Outcome]:
    """Run ``scenario(mesh, *args)`` on every rank; ``error`` is "killed" or "hang" for a rank that reported nothing."""
    context, port = worker_context(), free_port()
    connections, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(rank, world_size, port, there, scenario, args), daemon=True)
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    deadline = time.monotonic() + timeout
    outcomes = [_outcome(connection, deadline) for connection in connections]
    for process in processes:
        process.kill()
    return outcomes


def _outcome(connection: Any, deadline: float) -> Outcome:
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            return connection.recv()
        return Outcome("hang")
    except EOFError:
        return Outcome("killed")


def _work(rank: int, world_size: int, port: int, connection: Any, scenario: Callable[..., Any], args: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60))
    replicas = 2 if world_size == 4 else 1
    mesh = Mesh(world_size // replicas, replicas, rank)
    mesh.connect()
    start = time.monotonic()
    try:
        outcome = Outcome(value=scenario(mesh, *args))
        dist.barrier()
    except Exception as error:
        outcome = Outcome(type(error).__name__, str(error))
    outcome.seconds = time.monotonic() - start
    connection.send(outcome)
    os._exit(0)  # like a failed process, without telling the other ranks


@dataclass
class Run:
    """Small training run on one rank."""

    mesh: Mesh
    microbatches: int = 3
    staleness: Staleness = "uniform"
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        mesh = self.mesh
        self.model = make_model()
        self.stage = cut(self.model, mesh.stage, mesh.num_stages, 0, CPU)
        settings = PipelineSettings(
            microbatches=self.microbatches, data_parallel_size=mesh.num_replicas, staleness=self.staleness
        )
        self.case = Case(self.microbatches, batch_sizes=(6,) * 40)
        hooks = UserHooks(microbatch_weight=self.case.weight)
        own = StageEngine(self.stage, mesh, settings.resolved(mesh.world_size), 0, CPU, hooks)
        self.engine = Engine([own], mesh, own.runner, own.weights)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.engine.updates.optimizer_step = lambda _: self.optimizer.step() and None
        self.step = self.case.step(self.model)
        ALIVE.append(self)

    def train(self, index: int, batch: Batch | None = None, step: Callable[..., Tensor] | None = None) -> list[Update]:
        """Run one batch, and return the updates that are due after it."""
        self.engine.run(self.case.batch(index, self.mesh.replica) if batch is None else batch, step or self.step)
        self.engine.complete()
        return self.engine.apply_due()

    def drain(self) -> None:
        self.engine.drain()


def error_of_user(mesh: Mesh, stage: int, when: int) -> None:
    """Fail on one stage at batch ``when``: in the user's step on the first or last stage, in a layer on another one."""
    run = Run(mesh)

    def failing(microbatch: Batch, weight: float) -> Tensor:
        raise ValueError("the user's own mistake")

    for index in range(6):
        step = failing if (mesh.stage, index) == (stage, when) else run.step
        if step is failing and not (mesh.is_first or mesh.is_last):
            run.stage.units[0].module.forward = lambda x: failing({}, 0.0)
        run.train(index, step=step)


def other_batch(mesh: Mesh, when: int) -> None:
    """Run with other data on the last stage, from batch ``when`` on."""
    run = Run(mesh)
    for index in range(6):
        batch = run.case.batch(index)
        if mesh.is_last and index >= when:
            batch["x"] = batch["x"] + 0.001
        run.train(index, batch)


def shorter_batch(mesh: Mesh, stage: int) -> None:
    """Run a batch that has fewer samples on one stage."""
    run = Run(mesh)
    length = 2 if mesh.stage == stage else 3
    run.train(0, {name: value[:length] for name, value in run.case.batch(0).items()})


def ends_early(mesh: Mesh, stage: int) -> None:
    """Evaluate three batches on one stage and four on the others."""
    run = Run(mesh)
    for index in range(3 if mesh.stage == stage else 4):
        with torch.no_grad():
            run.engine.evaluate(run.case.batch(index), run.step)
    run.engine.end_evaluation()
    run.drain()
    agree_on_error(mesh, None)


def stopped(mesh: Mesh, rank: int, flag: str) -> list[int]:
    """Return the mini-batches of the updates that this rank applied once it knew of a rank's request to stop."""
    run, told = Run(mesh), []
    for index in range(6):
        if (mesh.rank, index) == (rank, 2):
            setattr(run.engine.updates.requested, flag, True)
        updates = run.train(index)
        if getattr(run.engine.updates.agreed, flag):
            told += [update.mini_batch for update in updates]
    return told


def not_a_number(mesh: Mesh, late: bool) -> tuple[int, str, bool] | None:
    """Train with a NaN gradient on the first stage of the last replica at mini-batch 2; losses stay finite.

    Return the batch that raised the error, its text, and whether all weights are finite; None without an error.
    ``late``: stages step before the others have agreed, and before the host knows whether gradients are finite.
    """
    if late:
        know_on_device_alone()
    run = Run(mesh, staleness="least" if late else "uniform")
    for index in range(6):
        if (mesh.stage, mesh.replica, index) == (0, mesh.num_replicas - 1, 2):
            _spoil_gradient(run.stage.units[0].module)
        try:
            run.train(index)
        except NonFiniteGradientError as error:
            weights = run.stage.parameters.values()
            return index, str(error), all(bool(weight.isfinite().all()) for weight in weights)
    return None


def _spoil_gradient(module: torch.nn.Module) -> None:
    """Make the gradient of a module's first parameter NaN from its next forward on."""
    forward = module.forward

    def spoiled(x: Tensor) -> Tensor:
        total = next(module.parameters()).sum()
        nothing = total - total.detach()
        nothing.register_hook(lambda gradient: gradient * float("nan"))
        return forward(x) + nothing

    module.forward = spoiled
