"""What a stage takes: measured on tensors without memory by the code that trains, and added up over its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import Flight, Task, stage_runner
from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.tree import tensors_of
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.core.wire.link import Header
from lightning_asyncpp.core.wire.transport import Arrival
from lightning_asyncpp.tools.plan.fake_tensors import Meter, Reading, bytes_of


@dataclass
class Loopback:
    """Takes the place of a stage's transport between neighbors that are not there."""

    arriving: Header | None  # of what the stage before sends
    sent: Header | None = None  # of what goes to the stage after

    def receive_activation(self, k: int) -> Arrival:
        """Return new tensors as the stage before sends them."""
        assert self.arriving is not None
        return Arrival(self.arriving, tuple(info.empty(torch.device("cpu")) for info in self.arriving.tensors))

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
    versions: int  # of its weights
    compute_dtype: torch.dtype | None  # of the versions beside masters
    batch: Any  # a microbatch, on the first and the last stage
    arriving: Header | None  # of what the stage before sends
    hooks: UserHooks
    step: Callable[[Any, float | None], Any]  # of the user, called with a microbatch and its weight
    optimizer: Optimizer  # of its parameters

    def __post_init__(self) -> None:
        stage = self.stage
        self.transport = Loopback(self.arriving)
        transport: Any = self.transport if stage.num_stages > 1 else None  # it has all that the runner calls
        mesh = Mesh(stage.num_stages, 1, stage.num_stages - 1 - stage.index)
        self.runner = stage_runner(stage, mesh, transport, self.hooks, 0, stage.device)
        self.found = Profile(
            num_parameters=sum(p.numel() for p in stage.parameters.values() if p.requires_grad),
            weights=bytes_of(stage.parameters.values()),
            buffers=bytes_of(buffer for unit in stage.units for buffer in unit.module.buffers()),
        )
        with self.meter.reading() as made:
            self.weights = WeightVersions(
                stage.parameters, self.versions, stage.uses, stage.buffers, self.compute_dtype
            )  # fmt: skip
        self.found.versions = made.kept

    def profile(self) -> Profile:
        """Run two microbatches and two updates, under tensors without memory and the meter."""
        found, state = self.found, self.optimizer.state
        gradients = self._mini_batch()
        again = {name: None if g is None else torch.empty_like(g) for name, g in gradients.items()}
        self._update(gradients)  # in which the optimizer's state comes into being
        with self.meter.reading() as found.update:
            self._update(again)
        remembered = [of_one.get(key) for of_one in state.values() for key in getattr(self.optimizer, "keys", ())]
        found.correction = bytes_of(tensors_of(remembered))
        found.optimizer = bytes_of(tensors_of(state)) - found.correction
        return found

    def _mini_batch(self) -> dict[str, Tensor | None]:
        found, meter = self.found, self.meter
        flights = [self._forward(0)]  # what a layer makes at its first call and keeps is not part of every call
        with meter.reading() as found.forward:
            flights.append(self._forward(1))
        with meter.reading() as found.first_backward:
            self.runner.backward(flights.pop(0), self.weights.sum_at(0))
        with meter.reading() as found.backward:
            self.runner.backward(flights.pop(0), self.weights.sum_at(0))
        gradients = self.weights.take_gradients()
        found.gradients = bytes_of(gradient for gradient in gradients.values() if gradient is not None)
        found.sent = self.transport.sent
        return gradients

    def _forward(self, k: int) -> Flight:
        flight = self.runner.forward(Task(k, 0, self.weights.leaves(0), self.batch, 0, self.step))
        flight.beside.take_statistics()
        return flight

    def _update(self, gradients: dict[str, Tensor | None]) -> None:
        """Step as the update queue and the session do; gradients are used up."""
        before = self.weights.advance()
        for name, parameter in self.weights.parameters.items():
            parameter.grad = gradients.get(name)
        with around_step(self.optimizer, before, self.weights.compute_weights()):
            self.optimizer.step()
        for parameter in self.weights.parameters.values():
            parameter.grad = None
        gradients.clear()


_MINI_BATCHES = 4
"""After three of them nothing changes from one to the next."""


@dataclass(frozen=True)
class Memory:
    """What is alive on a stage when it is most."""

    parts: dict[str, int]  # in bytes: see :func:`peak_of`
    in_flight: int  # number of microbatches
    during: str  # what runs then: forward, backward, reduction or update

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def peak_of(schedule: Schedule, profile: Profile, per_update: int, batch: int, replicas: int = 1) -> Memory:
    """Follow the schedule's actions over a few mini-batches and return the moment with the most memory.

    Its parts: weights, versions, buffers, optimizer, correction, batch (the loader's tensors), gradients (all sets),
    activations (of microbatches in flight) and working (the rest of that moment: logits, a microbatch's own gradients).

    Args:
        schedule: of the stage.
        profile: what a microbatch takes there.
        per_update: microbatches per update.
        batch: bytes of a batch on this stage.
        replicas: of the pipeline.
    """
    schedule = replace(schedule, pipeline_rule=replace(schedule.pipeline_rule, synchronous_start=0))
    batches = 2 if schedule.depth and schedule.pipeline_rule.delay else 1
    constant = {
        name: getattr(profile, name) for name in ("weights", "versions", "buffers", "optimizer", "correction")
    } | {"batch": batch * batches}
    flights: dict[int, int] = {}  # microbatch -> what it keeps
    gradients: dict[int, int] = {}  # mini-batch -> its sum, until its update
    moments: list[Memory] = []

    def note(working: int, during: str) -> None:
        alive = {"gradients": sum(gradients.values()), "activations": sum(flights.values())}
        moments.append(Memory({**constant, **alive, "working": working}, len(flights) + (during == "forward"), during))

    for action in schedule.run(_MINI_BATCHES, per_update):
        t, place = divmod(action.index, per_update)
        if action.kind is Kind.UPDATE:
            note(profile.update.peak, "update")
            gradients.pop(action.index, None)
        elif action.kind is Kind.FORWARD:
            note(profile.forward.peak, "forward")
            flights[action.index] = profile.forward.kept
        else:
            note((profile.backward if t in gradients else profile.first_backward).peak, "backward")
            del flights[action.index]
            gradients.setdefault(t, profile.gradients)
            if place == per_update - 1 and replicas > 1:
                note(profile.gradients, "reduction")  # packed for the replicas
    return max(moments, key=lambda moment: moment.total)
