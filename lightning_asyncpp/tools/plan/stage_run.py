"""One stage, run as the engine runs it, on tensors without memory: what its forwards, backwards and updates take.

It is run one micro-batch at a time, between neighbours that are not there; what a schedule makes of that is arithmetic
(:mod:`.in_flight`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.ties import names_on, trained_on
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner.common import Flight, Task
from lightning_asyncpp.core.runner.stages import stage_runner
from lightning_asyncpp.core.updates.reduction import BUCKET_BYTES, GPU_BUCKET_BYTES, Reduction, plan_buckets
from lightning_asyncpp.core.weights import WeightVersions, lent, writing
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.core.wire.transport import Arrival
from lightning_asyncpp.tools.plan.fake_tensors import Meter, Reading, bytes_of


class Loopback:
    """Takes the place of a stage's :class:`~lightning_asyncpp.core.wire.transport.Transport`.

    Args:
        arriving: header of what the stage before sends; None on the first stage.

    Attributes:
        sent: header of what this stage sent last.
    """

    def __init__(self, arriving: Header | None) -> None:
        self.arriving = arriving
        self.sent: Header | None = None

    def receive_activation(self, k: int) -> Arrival:
        """New tensors as the stage before sends them."""
        assert self.arriving is not None
        tensors = tuple(torch.empty(i.shape, dtype=i.dtype, device="cpu") for i in self.arriving.tensors)
        return Arrival(self.arriving, tensors)

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Note what is sent."""
        self.sent = header

    def receive_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """New tensors as the stage after sends them."""
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """They leave."""


@dataclass(frozen=True)
class StageJob:
    """A stage to look at.

    Attributes:
        stage: its units, with weights that have no memory.
        num_replicas: number of replicas D.
        room: weight versions that are alive.
        compute_dtype: of the versions beside masters; None without masters.
        slot: a micro-batch, on the first and the last stage.
        arriving: header of what the stage before sends; None on the first stage.
        hooks: the user's side.
        step: the user's training step, called with a micro-batch and its weight.
        make_optimizer: makes the optimizer of this stage's parameters.
        staleness: how many updates old its gradients are, for an optimizer that wants to know.
    """

    stage: Stage
    num_replicas: int
    room: int
    compute_dtype: torch.dtype | None
    slot: Any
    arriving: Header | None
    hooks: UserHooks
    step: Callable[[Any, float], Any]
    make_optimizer: Callable[[], Optimizer]
    staleness: float


@dataclass
class Profile:
    """What one stage takes for micro-batches of one size; memory in bytes.

    Attributes:
        num_parameters: trainable values.
        weights: memory of the parameters; with masters, of these.
        versions: of the weight versions beside them.
        buffers: of tensors that are no parameters.
        gradients: of a set of them, as they are summed over micro-batches.
        tied: of the parameters that another stage has, too.
        optimizer: what the optimizer keeps.
        correction: what Error Feedback, or another correction, keeps.
        forward: a forward; what it keeps stays until the backward.
        backward: the first backward of a mini-batch, with which the gradients come into being.
        backward_again: any other.
        backward_reduced: the last one where replicas share gradients, which it packs for them; None with one replica.
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
    backward: Reading = field(default_factory=Reading)
    backward_again: Reading = field(default_factory=Reading)
    backward_reduced: Reading | None = None
    update: Reading = field(default_factory=Reading)
    sent: Header | None = None


def profile(job: StageJob, meter: Meter, known: Profile | None = None) -> Profile:
    """Run a few micro-batches and two updates of a stage; to be called under tensors without memory and the meter.

    Args:
        job: the stage.
        meter: what is read.
        known: of the same stage with micro-batches of another size: updates need not be run again.
    """
    return _Run(job, meter).profile(known)


class _PackedOnly(Reduction):
    """Packs gradients for the replicas and sends them to nobody."""

    def _send(self, gradients: Mapping[str, Tensor | None]) -> None:
        with torch.no_grad():
            self._sent.append(self._buckets[len(self._sent)].pack(gradients))  # type: ignore[arg-type]


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

    def profile(self, known: Profile | None) -> Profile:
        if known is not None:
            self.found = replace(known)
            self._mini_batch()
            return self.found
        with self.meter.reading() as made:
            optimizer = self.job.make_optimizer()
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay(self.job.staleness)
        gradients = self._mini_batch()
        again = {name: None if g is None else torch.empty_like(g) for name, g in gradients.items()}
        with self.meter.reading() as first:
            self._update(optimizer, gradients)
        with self.meter.reading() as self.found.update:
            self._update(optimizer, again)
        kept = made.kept + first.kept + self.found.update.kept + 2 * self.found.gradients
        self.found.optimizer = bytes_of(tensors_of(optimizer.state))
        self.found.correction = max(0, kept - self.found.optimizer)
        return self.found

    def _weights(self) -> WeightVersions:
        job, found = self.job, self.found
        parameters = list(job.stage.parameters.values())
        found.num_parameters = sum(p.numel() for p in parameters if p.requires_grad)
        found.weights = bytes_of(parameters)
        found.buffers = bytes_of(buffer for unit in job.stage.units for buffer in unit.module.buffers())
        trained = {name for name, p in job.stage.parameters.items() if p.requires_grad}
        ties = trained_on(job.stage.index, job.stage.whole.ties, trained)
        found.tied = bytes_of(job.stage.parameters[name] for name in names_on(job.stage.index, ties))
        with self.meter.reading() as versions:
            weights = WeightVersions(
                job.stage.parameters, job.room, job.stage.uses, job.stage.buffers, job.compute_dtype
            )
        found.versions = versions.kept
        return weights

    def _mini_batch(self) -> dict[str, Tensor | None]:
        found, meter = self.found, self.meter
        flights = [self.forward()]  # what a layer makes at its first call and keeps is not part of every call
        with meter.reading() as found.forward:
            flights.append(self.forward())
        with meter.reading() as found.backward:
            self.backward(flights.pop(0))
        if self.job.num_replicas > 1:
            flights.append(self.forward())
        with meter.reading() as found.backward_again:
            self.backward(flights.pop(0))
        if self.job.num_replicas > 1:
            reduction = self._reduction()
            with meter.reading() as found.backward_reduced:
                self.backward(flights.pop(0), reduction)
        gradients = self._take()
        found.gradients = bytes_of(gradient for gradient in gradients.values() if gradient is not None)
        if self.transport is not None:
            found.sent = self.transport.sent
        return gradients

    @property
    def version(self) -> int:
        """The weights that gradients are taken at."""
        return max(0, self.weights.newest + 1 - self.job.room)

    def forward(self) -> Flight:
        task = Task(self.count, self.version, self.weights.leaves(self.version), self.job.slot, 0, self.job.step)
        self.count += 1
        flight = self.runner.forward(task)
        flight.said.take_statistics()
        return flight

    def backward(self, flight: Flight, reduction: Reduction | None = None) -> None:
        weights = self.weights.sum_at(flight.version)
        with nullcontext() if reduction is None else reduction.watching(weights, self.weights.gradient):
            self.runner.backward(flight, weights)
        flight.outputs = flight.inputs = ()
        flight.said.losses = []
        flight.result = None

    def _reduction(self) -> Reduction:
        size = BUCKET_BYTES if self.job.stage.device.type == "cpu" else GPU_BUCKET_BYTES
        buckets = plan_buckets(self.weights.parameters, size, self.weights.used_twice)
        return _PackedOnly(buckets, None, late=self.weights.used_twice)  # type: ignore[arg-type]

    def _take(self) -> dict[str, Tensor | None]:
        return self.weights.take_gradients()

    def _update(self, optimizer: Optimizer, gradients: dict[str, Tensor | None]) -> None:
        """What the update queue and the session do; gradients are used up."""
        before = self.weights.advance()
        foreach.divide_([gradient for gradient in gradients.values() if gradient is not None], 1.0)
        for name, parameter in self.weights.parameters.items():
            parameter.grad = gradients.get(name)
        with lent(optimizer, before), writing(optimizer, self.weights.compute_weights()):
            optimizer.step()
        for parameter in self.weights.parameters.values():
            parameter.grad = None
        gradients.clear()
