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
from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.core.weights import WeightVersions, lent, writing
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.core.wire.transport import Arrival
from lightning_asyncpp.tools.plan.fake_tensors import Meter, Reading, bytes_of


class Loopback:
    """Takes the place of a stage's transport between neighbors that are not there."""

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


@dataclass
class Profile:
    """What one stage takes for microbatches of one size; memory in bytes."""

    num_parameters: int = 0  # trainable values
    weights: int = 0  # memory of the parameters; with masters, of these
    versions: int = 0  # of the weight versions beside them
    buffers: int = 0
    gradients: int = 0  # of a set of them, as they are summed over microbatches
    tied: int = 0  # of the parameters that another stage has, too
    optimizer: int = 0  # what the optimizer keeps
    correction: int = 0  # what Error Feedback, or another correction, keeps
    forward: Reading = field(default_factory=Reading)  # what it keeps stays until the backward
    first_backward: Reading = field(default_factory=Reading)  # with which the gradients come into being
    backward: Reading = field(default_factory=Reading)
    update: Reading = field(default_factory=Reading)
    sent: Header | None = None  # of what goes to the stage after


@dataclass
class StageUnderTest:
    """A stage whose weights have no memory, and all that runs it."""

    stage: Stage
    meter: Meter
    rule: StalenessRule  # which weights it runs on
    per_update: int  # microbatches
    compute_dtype: torch.dtype | None  # of the versions beside masters
    batch: Any  # a microbatch, on the first and the last stage
    arriving: Header | None  # of what the stage before sends
    hooks: UserHooks
    step: Callable[[Any, float | None], Any]  # of the user, called with a microbatch and its weight
    optimizer: Optimizer  # of its parameters

    def __post_init__(self) -> None:
        stage = self.stage
        self.found, self.count = Profile(), 0
        self.transport = Loopback(self.arriving) if stage.num_stages > 1 else None
        mesh = Mesh(stage.num_stages, 1, stage.num_stages - 1 - stage.index)
        # The runner calls nothing but what the loopback has.
        self.runner = stage_runner(stage, mesh, self.transport, self.hooks, 0, stage.device)  # type: ignore[arg-type]
        self.weights = self._weights()

    def profile(self) -> Profile:
        """Run two microbatches and two updates, under tensors without memory and the meter."""
        found, optimizer = self.found, self.optimizer
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay(self.rule.staleness(self.per_update))
        gradients = self._mini_batch()
        again = {name: None if g is None else torch.empty_like(g) for name, g in gradients.items()}
        self._update(optimizer, gradients)
        with self.meter.reading() as found.update:
            self._update(optimizer, again)
        remembered = [state.get(key) for state in optimizer.state.values() for key in getattr(optimizer, "keys", ())]
        found.correction = bytes_of(tensors_of(remembered))
        found.optimizer = bytes_of(tensors_of(optimizer.state)) - found.correction
        return found

    def _weights(self) -> WeightVersions:
        found, stage = self.found, self.stage
        parameters = stage.parameters.values()
        found.num_parameters = sum(p.numel() for p in parameters if p.requires_grad)
        found.weights = bytes_of(parameters)
        found.buffers = bytes_of(buffer for unit in stage.units for buffer in unit.module.buffers())
        trained = {name for name, p in stage.parameters.items() if p.requires_grad}
        tied = names_on(stage.index, trained_on(stage.index, stage.whole.ties, trained))
        found.tied = bytes_of(stage.parameters[name] for name in tied)
        with self.meter.reading() as versions:
            weights = WeightVersions(
                stage.parameters, self.rule.num_versions, stage.uses, stage.buffers, self.compute_dtype
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
        version = max(0, self.weights.newest + 1 - self.rule.num_versions)  # what gradients are taken at
        task = Task(self.count, version, self.weights.leaves(version), self.batch, 0, self.step)
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
