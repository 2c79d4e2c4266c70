"""Memory and work of a stage, measured with fake tensors (without data), and its peak memory under a schedule."""

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
from lightning_asyncpp.core.runner import Flight, ForwardTask, stage_runner
from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.tree import tensors_of
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.core.wire.link import Header
from lightning_asyncpp.core.wire.transport import Arrival
from lightning_asyncpp.tools.plan.fake_tensors import Meter, Reading, bytes_of


@dataclass
class Loopback:
    """Stand-in for the transport of a stage that runs without its neighbours."""

    arriving: Header | None  # header of the previous stage's messages
    sent: Header | None = None  # header of the messages to the next stage

    def recv_forward(self, k: int) -> Arrival:
        """Return new tensors with the shapes of the previous stage's activations."""
        assert self.arriving is not None
        return Arrival(self.arriving, tuple(info.empty(torch.device("cpu")) for info in self.arriving.layout.tensors))

    def send_forward(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Keep the header."""
        self.sent = header

    def recv_backward(self, k: int, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return new tensors with the shapes of the outputs."""
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]

    def send_backward(self, k: int, gradients: list[Tensor]) -> None:
        """Drop the gradients."""


@dataclass
class Profile:
    """Memory and work of one stage for microbatches of one size; memory in bytes."""

    num_parameters: int = 0  # number of trained parameters
    weights: int = 0  # memory of the parameters (fp32 masters with weight_dtype)
    versions: int = 0  # memory of further weight versions
    buffers: int = 0
    gradients: int = 0  # memory of the gradients of one mini-batch, summed over microbatches
    optimizer: int = 0  # memory of the optimizer's state
    correction: int = 0  # memory of the state of Error Feedback, or of another correction
    forward: Reading = field(default_factory=Reading)  # of one microbatch; it keeps the activations for the backward
    first_backward: Reading = field(default_factory=Reading)  # the first of a mini-batch, which allocates the gradients
    backward: Reading = field(default_factory=Reading)  # any later backward of the mini-batch
    update: Reading = field(default_factory=Reading)
    sent: Header | None = None  # header of the messages to the next stage


@dataclass
class StageUnderTest:
    """Stage with fake tensors as weights, and everything that it needs to run."""

    stage: Stage
    meter: Meter
    versions: int  # number of weight versions
    compute_dtype: torch.dtype | None  # dtype of the weight versions if the parameters are masters
    batch: Any  # a microbatch, on the first and the last stage
    arriving: Header | None  # header of the previous stage's messages
    hooks: UserHooks
    step: Callable[[Any, float | None], Any]  # (microbatch, its weight) -> result of the user's step
    optimizer: Optimizer  # optimizer of the stage's parameters

    def __post_init__(self) -> None:
        stage = self.stage
        self.transport = Loopback(self.arriving)
        transport: Any = self.transport if stage.num_stages > 1 else None  # has the methods that the runner calls
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
        """Run two microbatches and two updates on fake tensors, under the meter."""
        found, state = self.found, self.optimizer.state
        gradients = self._mini_batch()
        again = {name: None if g is None else torch.empty_like(g) for name, g in gradients.items()}
        self._update(gradients)  # allocates the optimizer's state
        with self.meter.reading() as found.update:
            self._update(again)
        remembered = [of_one.get(key) for of_one in state.values() for key in getattr(self.optimizer, "keys", ())]
        found.correction = bytes_of(tensors_of(remembered))
        found.optimizer = bytes_of(tensors_of(state)) - found.correction
        return found

    def _mini_batch(self) -> dict[str, Tensor | None]:
        found, meter = self.found, self.meter
        flights = [self._forward(0)]  # not measured: layers may allocate memory that later calls reuse
        with meter.reading() as found.forward:
            flights.append(self._forward(1))
        with meter.reading() as found.first_backward:
            self.runner.backward(flights.pop(0), self.weights.leaves_for_backward(0))
        with meter.reading() as found.backward:
            self.runner.backward(flights.pop(0), self.weights.leaves_for_backward(0))
        gradients = self.weights.take_gradients()
        found.gradients = bytes_of(gradient for gradient in gradients.values() if gradient is not None)
        found.sent = self.transport.sent
        return gradients

    def _forward(self, k: int) -> Flight:
        flight = self.runner.forward(ForwardTask(k, 0, self.weights.leaves(0), self.batch, 0, self.step))
        flight.collected.take_statistics()
        return flight

    def _update(self, gradients: dict[str, Tensor | None]) -> None:
        """Step the optimizer as the engine's update queue does, and free the gradients."""
        before = self.weights.advance()
        for name, parameter in self.weights.parameters.items():
            parameter.grad = gradients.get(name)
        with around_step(self.optimizer, before, self.weights.copies_of_masters()):
            self.optimizer.step()
        for parameter in self.weights.parameters.values():
            parameter.grad = None
        gradients.clear()


_MINI_BATCHES = 4
"""Number of simulated mini-batches; from the fourth on, the memory in use repeats."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a stage."""

    parts: dict[str, int]  # bytes by part, see :func:`peak_of`
    in_flight: int  # number of microbatches in flight
    during: str  # action at the peak: forward, backward, reduction or update

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return sum(self.parts.values())


def peak_of(schedule: Schedule, profile: Profile, per_update: int, batch: int, replicas: int = 1) -> Memory:
    """Follow the schedule's actions over a few mini-batches and return the peak memory.

    The parts are weights, versions, buffers, optimizer, correction, batch (the loader's tensors), gradients (of
    mini-batches whose update is still to come), activations (of microbatches in flight) and working (the rest, such as
    logits and the gradients of one microbatch).

    Args:
        schedule: schedule of the stage.
        profile: profile of the stage.
        per_update: number of microbatches per update.
        batch: bytes of a batch on this stage.
        replicas: number of replicas of the pipeline.
    """
    schedule = replace(schedule, pipeline_rule=replace(schedule.pipeline_rule, synchronous_start=0))
    batches = 2 if schedule.depth and schedule.pipeline_rule.delay else 1
    constant = {
        name: getattr(profile, name) for name in ("weights", "versions", "buffers", "optimizer", "correction")
    } | {"batch": batch * batches}
    flights: dict[int, int] = {}  # bytes of activations by microbatch
    gradients: dict[int, int] = {}  # bytes of summed gradients by mini-batch, until its update
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
                note(profile.gradients, "reduction")  # a packed copy is reduced over the replicas
    return max(moments, key=lambda moment: moment.total)
