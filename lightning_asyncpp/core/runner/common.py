"""What the runners of all stages share: what they are given, how they travel, and the backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.auxiliary import Collected
from lightning_asyncpp.core.batches.host_batch import HostBatch
from lightning_asyncpp.core.batches.micro_batch import Slot, cut_batch
from lightning_asyncpp.core.batches.structure import flatten, unflatten
from lightning_asyncpp.core.batches.user_hooks import Step, UserHooks
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.model_call import ModelCall
from lightning_asyncpp.core.randomness import derive, seed_generators
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Beside, Trace, Wait, clock_of
from lightning_asyncpp.core.wire.header import Header, describe
from lightning_asyncpp.core.wire.received import InputGradient, begin
from lightning_asyncpp.core.wire.transport import Arrival, Transport
from lightning_asyncpp.errors import ConsequenceError, PeerLostError

NOTHING = nullcontext()
_MOST_TEXT_BYTES = 4096  # of a failure


class StageBeforeFailedError(ConsequenceError):
    """A stage before failed, at its very first micro-batch or in an evaluation, and said why."""


@dataclass
class Flight:
    """A micro-batch between its forward and its backward on this stage.

    Attributes:
        k: the micro-batch, counted over the run.
        version: the weights that it runs on.
        weight: w_k; a micro-batch of weight 0, or an empty slot, has no backward.
        inputs: where the gradients arrive of the activations received that need one.
        outputs: tensors from which the backward starts; on the last stage the loss, whose gradient is its weight.
        result: what the user's step returned, on the last stage.
        said: what this stage's layers said beside their output: losses, which the backward starts from too, and counts.
    """

    k: int
    version: int
    weight: float = 0.0
    inputs: tuple[InputGradient, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Any = None
    said: Collected = field(default_factory=Collected)


class Departure(NamedTuple):
    """What leaves this stage after a forward."""

    flight: Flight
    header: Header
    tensors: tuple[Tensor, ...]


class Task(NamedTuple):
    """A forward to run.

    Attributes:
        k: the micro-batch; counted over the run, or over evaluations if ``purpose`` is not ``"train"``.
        version: number of the weights.
        weights: name -> leaf tensor, or None for the parameters themselves.
        slot: the micro-batch on the first and the last stage; None for an empty slot and on the others.
        mark: fingerprint of the batch or of the micro-batch, on the first and the last stage, where it was taken.
        step: the user's step, called with the micro-batch and its weight; None where it ends at its call of the model.
        purpose: ``"train"``, or what is evaluated: random numbers are derived from it.
        weight: w_k, on the first stage.
    """

    k: int
    version: int
    weights: dict[str, Tensor] | None
    slot: Any
    mark: int
    step: Step
    purpose: str = "train"
    weight: float = 1.0

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted; what is evaluated is not recorded."""
        return self.purpose == "train"


class StageRunner(ABC):
    """Runs micro-batches on one stage, between two neighbours unless its class says otherwise.

    Args:
        stage: this rank's units.
        mesh: this rank's place.
        transport: messages with the neighbours; None with a single stage.
        hooks: the user's side.
        seed: the run's seed.
        device: where tensors live.

    Attributes:
        trace: records what is done when; None records nothing.
        clock: by which a trace is to measure what is computed here.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        transport: Transport | None,
        hooks: UserHooks,
        seed: int,
        device: torch.device,
    ) -> None:
        self.stage, self.mesh, self.transport, self.hooks = stage, mesh, transport, hooks
        self.seed, self.device = seed, device
        stage.device = device
        self.trace: Trace | None = None
        self.clock = clock_of(device)
        self.call = ModelCall(stage.model, hooks.model_name)

    @abstractmethod
    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """What this stage has of a batch: so many micro-batches, or empty slots.

        Args:
            batch: the batch, on the device.
            parts: number of slots.
            host_batch: what of it is still on the host.
        """

    @abstractmethod
    def forward(self, task: Task) -> Flight:
        """Run the forward of a micro-batch and send the result on.

        What can be done before a wait is done there, and as little as possible after a send: whoever is woken by it
        often waits for this core. It seeds torch's generators and leaves them so: preserving them once per batch, not
        per micro-batch, is cheaper.

        Args:
            task: what to run.
        """

    def backward(self, flight: Flight, weights: dict[str, Tensor]) -> None:
        """Run the backward of a flight, adding to the gradients of ``weights``, and send the inputs' gradients."""
        if not flight.weight:
            return
        # What a backward draws must not depend on what ran before it: a drain would change it. Seeded before the wait,
        # which everything that comes after it prolongs.
        self._seed("backward", self.stage.first_unit, self.mesh.replica, flight.k)
        self.stage.under(weights, lambda: self._backward_in_place(flight))
        self.send_input_gradients(flight)

    def _backward_in_place(self, flight: Flight) -> None:
        """The backward, with its weights in place."""
        gradients = self._output_gradients(flight)
        # A layer's own loss is part of the micro-batch's mean loss, so it has its weight.
        gradients += [torch.full_like(loss, flight.weight) for loss in flight.said.losses]
        if outputs := (*flight.outputs, *flight.said.losses):
            with self.span(Kind.BACKWARD, flight.k, flight.version):
                torch.autograd.backward(outputs, gradients)

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """Where the backward starts: from what the stage after sends back."""
        with self.span(Wait.GRADIENT, flight.k):
            return self._neighbours.receive_gradients(flight.k, flight.outputs)

    def send_input_gradients(self, flight: Flight) -> None:
        """Send the gradients of what was received; zeros for what the loss does not depend on."""
        gradients = [gradient.get() for gradient in flight.inputs]
        size = sum(gradient.nbytes for gradient in gradients) if self.trace is not None else 0
        with self.span(Beside.SEND, flight.k, num_bytes=size):
            self._neighbours.send_gradients(flight.k, gradients)

    def announce_failure(self, k: int, error: Exception) -> None:
        """Tell the stage after why nothing comes, so that it does not wait; the last one is where users look."""
        text = str(error)
        if not isinstance(error, StageBeforeFailedError):  # which says so already
            text = f"stage {self.mesh.stage} failed at micro-batch {k}: {type(error).__name__}: {text}"
        with suppress(PeerLostError):  # who is gone waits no more
            self._neighbours.send_activation(Header(k, Header.FAILED, structure=text.encode()[:_MOST_TEXT_BYTES]), ())

    def span(
        self, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs meanwhile, if anything is recorded."""
        return NOTHING if self.trace is None else self.trace.span(kind, index, version, num_bytes)

    # -- what arrives ---------------------------------------------------------------------------------------------

    def _cut(self, batch: Any, parts: int, host_batch: HostBatch, weigh: Callable[[Any], float] | None) -> list[Slot]:
        return cut_batch(batch, parts, self.hooks.split_batch, weigh, host_batch.of(batch))

    @property
    def _neighbours(self) -> Transport:
        assert self.transport is not None, "a single stage has none"
        return self.transport

    def _receive(self, task: Task) -> Arrival:
        with self._span_of(task, Wait.ACTIVATION):
            arrival = self._neighbours.receive_activation(task.k)
        if arrival.header.kind == Header.FAILED:
            raise StageBeforeFailedError(arrival.header.structure.decode(errors="ignore"))
        return arrival

    @staticmethod
    def _open(arrival: Arrival) -> tuple[tuple[InputGradient, ...], Any]:
        """Where the gradients of what arrived will arrive, and what the first layer is called with."""
        tensors, inputs = list(arrival.tensors), []
        for position, info in enumerate(arrival.header.tensors):
            if info.needs_gradient and torch.is_grad_enabled():
                tensors[position], gradient = begin(tensors[position])
                inputs.append(gradient)
        is_tensor = arrival.header.kind == Header.TENSOR
        return tuple(inputs), tensors[0] if is_tensor else unflatten(tensors, arrival.header.structure)

    # -- what is computed -----------------------------------------------------------------------------------------

    def _seed(self, *parts: int | str) -> None:
        seed_generators(derive(self.seed, *parts), self.device)

    def _step_context(self) -> AbstractContextManager[Any]:
        return self.hooks.forward_context() if self.hooks.context_around_step else NOTHING

    def _compute(self, task: Task, args: tuple, kwargs: dict[str, Any], in_context: bool = False) -> Any:
        """Run the layers on a call's arguments; ``in_context``: within the step, where the user's context is set."""

        def forward() -> Any:
            return self.stage.forward(args, kwargs, self.seed, self.mesh.replica, task.k)

        with NOTHING if in_context else self.hooks.forward_context():
            return self.stage.under(task.weights, forward)

    # -- what departs ---------------------------------------------------------------------------------------------

    def _departure(
        self, task: Task, output: Any, header: Header, inputs: tuple[InputGradient, ...], said: Collected
    ) -> Departure:
        layer = self.stage.units[-1].name
        tensors, structure = flatten(output, layer)
        kind, infos = Header.TENSOR if isinstance(output, Tensor) else Header.TUPLE, describe(tensors, layer)
        outgoing = Header(task.k, kind, header.weight, header.fingerprint, infos, structure)
        outputs = tuple(t for t in tensors if t.requires_grad)
        return Departure(Flight(task.k, task.version, header.weight, inputs, outputs, said=said), outgoing, tensors)

    def _send(self, task: Task, departure: Departure) -> Flight:
        flight, header, tensors = departure
        with self._span_of(task, Beside.SEND, num_bytes=header.num_bytes):
            self._neighbours.send_activation(header, tensors)
        return flight

    def _send_empty(self, task: Task) -> Flight:
        self._neighbours.send_activation(Header(task.k, Header.EMPTY), ())
        return Flight(task.k, task.version)

    def _span_of(
        self, task: Task, kind: Kind | Wait | Beside, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        return self.span(kind, task.k, version, num_bytes) if task.trains else NOTHING
