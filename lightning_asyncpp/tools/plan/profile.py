"""One stage, run by the code that trains on tensors without memory: what a forward, a backward and an update take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.ties import names_on, trained_on
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner.common import Flight, Task
from lightning_asyncpp.core.runner.stages import stage_runner
from lightning_asyncpp.core.weights import WeightVersions, lent, writing
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.core.wire.transport import Arrival
from lightning_asyncpp.tools.plan.fake_tensors import Meter, Reading, bytes_of


class Loopback:
    """Takes the place of a stage's transport.

    Args:
        arriving: header of what the stage before sends; None on the first stage.

    Attributes:
        sent: header of what this stage sent last.
    """

    def __init__(self, arriving: Header | None) -> None:
        self.arriving = arriving
        self.sent: Header | None = None

    def receive_activation(self, k: int) -> Arrival:
        """Return new tensors as the stage before sends them."""
        assert self.arriving is not None
        tensors = tuple(torch.empty(i.shape, dtype=i.dtype, device="cpu") for i in self.arriving.tensors)
        return Arrival(self.arriving, tensors)

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Note what is sent."""
        self.sent = header

    def receive_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return new tensors as the stage after sends them."""
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """Drop them."""


@dataclass(frozen=True)
class StageJob:
    """A stage to profile.

    Attributes:
        stage: its layers, with weights that have no memory.
        num_versions: weight versions that are alive.
        compute_dtype: of the versions beside masters; None without masters.
        batch: a microbatch, on the first and the last stage.
        arriving: header of what the stage before sends; None on the first stage.
        hooks: the user's side.
        step: the user's training step, called with a microbatch and its weight.
        make_optimizer: makes the optimizer of this stage's parameters.
        staleness: how many updates old its gradients are, for an optimizer that wants to know.
    """

    stage: Stage
    num_versions: int
    compute_dtype: torch.dtype | None
    batch: Any
    arriving: Header | None
    hooks: UserHooks
    step: Callable[[Any, float], Any]
    make_optimizer: Callable[[], Optimizer]
    staleness: float


@dataclass
class Profile:
    """What one stage takes for microbatches of one size; memory in bytes.

    Attributes:
        num_parameters: trainable values.
        weights: memory of the parameters; with masters, of these.
        versions: of the weight versions beside them.
        buffers: of tensors that are no parameters.
        gradients: of a set of them, as they are summed over microbatches.
        tied: of the parameters that another stage has, too.
        optimizer: what the optimizer keeps.
        correction: what Error Feedback, or another correction, keeps.
        forward: a forward; what it keeps stays until the backward.
        first_backward: the first backward of a mini-batch, with which the gradients come into being.
        backward: any other.
        update: the step of the optimizer.
        sent: header of what goes to the stage after; None on the last.
    """

    num_parameters: int = 0
    weights: int = 0
    versions: int = 0
    buffers: int = 0
    gradients: int = 0
    tied: int = 0
    optimizer: int = 0
    correction: int = 0
    forward: Reading = field(default_factory=Reading)
    first_backward: Reading = field(default_factory=Reading)
    backward: Reading = field(default_factory=Reading)
    update: Reading = field(default_factory=Reading)
    sent: Header | None = None


def profile(job: StageJob, meter: Meter) -> Profile:
    """Run two microbatches and two updates of a stage, under tensors without memory and the meter."""
    return _Run(job, meter).profile()


class _Run:
    def __init__(self, job: StageJob, meter: Meter) -> None:
        self.job, self.meter, self.found = job, meter, Profile()
        stage = job.stage
        self.transport = Loopback(job.arriving) if stage.num_stages > 1 else None
        mesh = Mesh(stage.num_stages, 1, stage.num_stages - 1 - stage.index)
        # The runner calls nothing but what the loopback has.
        self.runner = stage_runner(stage, mesh, self.transport, job.hooks, 0, stage.device)  # type: ignore[arg-type]
        self.weights = self._weights()
        self.count = 0

    def profile(self) -> Profile:
        found, meter = self.found, self.meter
        with meter.reading() as made:
            optimizer = self.job.make_optimizer()
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay(self.job.staleness)
        gradients = self._mini_batch()
        again = {name: None if g is None else torch.empty_like(g) for name, g in gradients.items()}
        with meter.reading() as first:
            self._update(optimizer, gradients)
        with meter.reading() as found.update:
            self._update(optimizer, again)
        kept = made.kept + first.kept + found.update.kept + 2 * found.gradients
        found.optimizer = bytes_of(tensors_of(optimizer.state))
        found.correction = max(0, kept - found.optimizer)
        return found

    def _weights(self) -> WeightVersions:
        found, stage = self.found, self.job.stage
        parameters = stage.parameters.values()
        found.num_parameters = sum(p.numel() for p in parameters if p.requires_grad)
        found.weights = bytes_of(parameters)
        found.buffers = bytes_of(buffer for unit in stage.units for buffer in unit.module.buffers())
        trained = {name for name, p in stage.parameters.items() if p.requires_grad}
        tied = names_on(stage.index, trained_on(stage.index, stage.whole.ties, trained))
        found.tied = bytes_of(stage.parameters[name] for name in tied)
        with self.meter.reading() as versions:
            weights = WeightVersions(
                stage.parameters, self.job.num_versions, stage.uses, stage.buffers, self.job.compute_dtype
            )
        found.versions = versions.kept
        return weights

    def _mini_batch(self) -> dict[str, Tensor | None]:
        found, meter = self.found, self.meter
        flights = [self._forward()]  # what a layer makes at its first call and keeps is not part of every call
        with meter.reading() as found.forward:
            flights.append(self._forward())
        with meter.reading() as found.first_backward:
            self._backward(flights.pop(0))
        with meter.reading() as found.backward:
            self._backward(flights.pop(0))
        gradients = self.weights.take_gradients()
        found.gradients = bytes_of(gradient for gradient in gradients.values() if gradient is not None)
        found.sent = None if self.transport is None else self.transport.sent
        return gradients

    def _forward(self) -> Flight:
        version = max(0, self.weights.newest + 1 - self.job.num_versions)  # what gradients are taken at
        task = Task(self.count, version, self.weights.leaves(version), self.job.batch, 0, self.job.step)
        self.count += 1
        flight = self.runner.forward(task)
        flight.said.take_statistics()
        return flight

    def _backward(self, flight: Flight) -> None:
        self.runner.backward(flight, self.weights.sum_at(flight.version))
        flight.outputs = flight.inputs = ()
        flight.said.losses = []
        flight.result = None

    def _update(self, optimizer: Optimizer, gradients: dict[str, Tensor | None]) -> None:
        """Step as the update queue and the session do; gradients are used up."""
        before = self.weights.advance()
        for name, parameter in self.weights.parameters.items():
            parameter.grad = gradients.get(name)
        with lent(optimizer, before), writing(optimizer, self.weights.compute_weights()):
            optimizer.step()
        for parameter in self.weights.parameters.values():
            parameter.grad = None
        gradients.clear()
