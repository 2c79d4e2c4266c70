"""One microbatch through one stage: forward with what arrives, backward with what comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_asyncpp.auxiliary import COLLECTED, Collected
from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import NO_MARK, ModelCall, Slot, Step, UserHooks, cut_batch, loss_of
from lightning_asyncpp.core.randomness import generator_states, seed_generators, set_generator_states
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Beside, Trace, Wait, clock_of
from lightning_asyncpp.core.tree import flatten, map_tensors, unflatten
from lightning_asyncpp.core.wire.link import Header, TensorInfo
from lightning_asyncpp.core.wire.transport import Arrival, Transport, arrived_at, begin
from lightning_asyncpp.errors import BatchMismatchError, ConfigurationError, ConsequenceError, PeerLostError

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[Any]]
_NOTHING = nullcontext()
_MOST_TEXT = 4096  # characters of a failure


class StageBeforeFailedError(ConsequenceError):
    """A stage before failed, at its very first microbatch or in an evaluation, and told why."""


@dataclass
class Flight:
    """A microbatch between its forward and its backward on this stage.

    Attributes:
        k: the microbatch, counted over the run.
        version: the weights that it runs on.
        weight: w_k; a microbatch of weight 0, or an empty slot, has no backward.
        inputs: nodes where the gradients arrive of the activations received that need one.
        outputs: tensors from which the backward starts; on the last stage the loss, whose gradient is its weight.
        result: what the user's step returned, on the last stage.
        beside: what this stage's layers add to their output: losses, which the backward starts from too, and counts.
    """

    k: int
    version: int
    weight: float = 0.0
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Any = None
    beside: Collected = field(default_factory=Collected)


class Task(NamedTuple):
    """A forward to run.

    Attributes:
        k: the microbatch; counted over the run, or over evaluations if ``purpose`` is not ``"train"``.
        version: number of the weights.
        weights: name -> leaf tensor, or None for the parameters themselves.
        slot: the microbatch on the first and the last stage; None for an empty slot and on the others.
        mark: fingerprint of the batch or of the microbatch, on the first and the last stage, where it was taken.
        step: the user's step, called with the microbatch and its weight; None where it ends at its call of the model.
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


class StageRunner(ABC):
    """Runs microbatches on one stage, between two neighbours unless its class says otherwise.

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
        self.call = ModelCall(called_by_steps(stage.model), hooks.model_name)
        # Around the step of the user, and around the layers within it.
        self._step_context: Context = hooks.forward_context if hooks.context_around_step else nullcontext
        self._layers_context: Context = nullcontext if hooks.context_around_step else hooks.forward_context
        self._neighbours: Transport = transport  # type: ignore[assignment]  # a single stage does not ask for it

    @abstractmethod
    def forward(self, task: Task) -> Flight:
        """Run the forward of a microbatch and send the result on.

        What can be done before a wait is done there, and as little as possible after a send: whoever is woken by it
        often waits for this core. It seeds torch's generators and leaves them so: preserving them once per batch, not
        per microbatch, is cheaper.

        Args:
            task: what to run.
        """

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Cut a batch into this stage's microbatches and empty slots.

        Args:
            batch: the batch, on the device.
            parts: number of slots.
            host_batch: what of it is still on the host.
        """
        weigh = self.hooks.microbatch_weight if self.mesh.is_first else None  # weights travel with microbatches
        on_host = host_batch.of(batch) if host_batch.copies else batch
        return cut_batch(batch, parts, self.hooks.split_batch, weigh, on_host)

    def backward(self, flight: Flight, weights: dict[str, Tensor]) -> None:
        """Run the backward of a flight, adding to the gradients of ``weights``, and send the inputs' gradients."""
        if not flight.weight:
            return
        # What a backward draws must not depend on what ran before it: a drain would change it. Seeded before the wait,
        # which everything that comes after it prolongs.
        seed_generators(self.seed, self.device, "backward", self.stage.first_unit, self.mesh.replica, flight.k)
        self.stage.under(weights, partial(self._backward_in_place, flight))
        self.send_input_gradients(flight)

    def _backward_in_place(self, flight: Flight) -> None:
        """The backward, with its weights in place."""
        gradients = self._output_gradients(flight)
        outputs = flight.outputs
        if flight.beside.losses:
            # A layer's own loss is part of the microbatch's mean loss, so it has its weight.
            gradients += [torch.full_like(loss, flight.weight) for loss in flight.beside.losses]
            outputs = (*outputs, *flight.beside.losses)
        if outputs:
            with self.span(Kind.BACKWARD, flight.k, flight.version):
                torch.autograd.backward(outputs, gradients)

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """Receive the gradients of the outputs, with which the backward starts, from the stage after."""
        with self.span(Wait.GRADIENT, flight.k):
            return self._neighbours.receive_gradients(flight.k, flight.outputs)

    def send_input_gradients(self, flight: Flight) -> None:
        """Send the gradients of what was received; zeros for what the loss does not depend on."""
        gradients = list(map(arrived_at, flight.inputs))
        size = sum(gradient.nbytes for gradient in gradients) if self.trace is not None else 0
        with self.span(Beside.SEND, flight.k, num_bytes=size):
            self._neighbours.send_gradients(flight.k, gradients)

    def announce_failure(self, k: int, error: Exception) -> None:
        """Tell the stage after why nothing comes, so that it does not wait; the last one is where users look."""
        text = str(error)
        if not isinstance(error, StageBeforeFailedError):  # which has it already
            text = f"stage {self.mesh.stage} failed at microbatch {k}: {type(error).__name__}: {text}"
        news = Header(k, Header.FAILED, structure=text[:_MOST_TEXT].encode(errors="replace"))
        with suppress(PeerLostError):  # who is gone waits no more
            self._neighbours.send_activation(news, ())

    def span(
        self, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs meanwhile, if anything is recorded."""
        return _NOTHING if self.trace is None else self.trace.span(kind, index, version, num_bytes)

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Record nothing of what runs meanwhile."""
        trace, self.trace = self.trace, None
        try:
            yield
        finally:
            self.trace = trace

    # -- what arrives, and what departs ----------------------------------------------------------------------------

    def _receive(self, k: int) -> Arrival:
        with self.span(Wait.ACTIVATION, k):
            arrival = self._neighbours.receive_activation(k)
        if arrival.header.kind == Header.FAILED:
            raise StageBeforeFailedError(arrival.header.structure.decode(errors="ignore"))
        return arrival

    @staticmethod
    def _open(arrival: Arrival) -> tuple[tuple[Any, ...], Any]:
        """Return the nodes that receive the gradients of an arrival, and the arguments of the first layer."""
        tensors, inputs = list(arrival.tensors), []
        for position, info in enumerate(arrival.header.tensors):
            if info.needs_gradient and torch.is_grad_enabled():
                tensors[position], node = begin(tensors[position])
                inputs.append(node)
        is_tensor = arrival.header.kind == Header.TENSOR
        return tuple(inputs), tensors[0] if is_tensor else unflatten(tensors, arrival.header.structure)

    def _compute(self, task: Task, args: tuple, kwargs: dict[str, Any], beside: Collected) -> Any:
        """Run the layers on a call's arguments; what they have to add is put ``beside`` their output."""
        token = COLLECTED.set(beside)
        try:
            forward = partial(self.stage.forward, args, kwargs, self.seed, self.mesh.replica, task.k)
            return self.stage.under(task.weights, forward)
        finally:
            COLLECTED.reset(token)

    def _send(self, task: Task, output: Any, header: Header, flight: Flight) -> Flight:
        """Send the output of the layers on, behind a header with the weight and the fingerprint of ``header``."""
        is_tensor = type(output) is Tensor
        tensors, structure = ((output,), b"") if is_tensor else flatten(output, self.stage.units[-1].name)
        kind = Header.TENSOR if is_tensor or isinstance(output, Tensor) else Header.TUPLE
        infos = tuple(map(TensorInfo.of, tensors))
        outgoing = Header(task.k, kind, header.weight, header.fingerprint, infos, structure)
        flight.outputs = tuple([tensor for tensor in tensors if tensor.requires_grad])
        with self.span(Beside.SEND, task.k, num_bytes=0 if self.trace is None else outgoing.num_bytes):
            self._neighbours.send_activation(outgoing, tensors)
        return flight

    def _send_empty(self, task: Task) -> Flight:
        self._neighbours.send_activation(Header(task.k, Header.EMPTY), ())
        return Flight(task.k, task.version)


class FirstStage(StageRunner):
    """First stage: it runs the user's step up to its call of the model, and leaves the step there."""

    def forward(self, task: Task) -> Flight:
        """Take the arguments of the step's call, run the layers on them, and send what comes out."""
        if task.slot is None:
            return self._send_empty(task)
        flight = Flight(task.k, task.version, task.weight)
        with self.span(Kind.FORWARD, task.k, task.version):
            seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
            with self._step_context():
                args, kwargs = self.call.capture(partial(task.step, task.slot, None))
            with self.hooks.forward_context():
                output = self._compute(task, args, kwargs, flight.beside)
        return self._send(task, output, Header(task.k, weight=task.weight, fingerprint=task.mark), flight)

    def send_input_gradients(self, flight: Flight) -> None:
        """Nothing was received."""


class MiddleStage(StageRunner):
    """Takes what the stage before made and hands it on; it has no batches, and no step of the user's is run here."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Empty ones."""
        return [Slot()] * parts

    def forward(self, task: Task) -> Flight:
        """Run the layers on what arrives, and send what comes out."""
        arrival = self._receive(task.k)
        if arrival.header.kind == Header.EMPTY:
            return self._send_empty(task)
        with self.span(Kind.FORWARD, task.k, task.version), self.hooks.forward_context():
            inputs, argument = self._open(arrival)
            flight = Flight(task.k, task.version, arrival.header.weight, inputs)
            output = self._compute(task, (argument,), {}, flight.beside)
        return self._send(task, output, arrival.header, flight)


class LastStage(StageRunner):
    """Runs the whole step of the user, with what the pipeline computed for the model's output, to the loss."""

    def forward(self, task: Task) -> Flight:
        """Run the step; when it calls the model, run the layers on what has arrived, and give it what comes out."""
        arrival = self._receive(task.k)
        header = arrival.header
        if header.kind == Header.EMPTY:
            if task.slot is not None:
                raise BatchMismatchError(_mismatch(task.k, "an empty slot on the first stage, samples on the last"))
            return Flight(task.k, task.version)
        if task.slot is None:
            raise BatchMismatchError(_mismatch(task.k, "samples on the first stage, an empty slot on the last"))
        if NO_MARK not in (header.fingerprint, task.mark) and header.fingerprint != task.mark:
            raise BatchMismatchError(_mismatch(task.k, "their shapes or contents differ"))
        with self.span(Kind.FORWARD, task.k, task.version):
            inputs, received = self._open(arrival)
            return self._run_step(task, Flight(task.k, task.version, header.weight, inputs), (received,))

    def _run_step(self, task: Task, flight: Flight, received: tuple | None = None) -> Flight:
        """Run the step of the user with the layers in place of its call of the model, and take its loss.

        Args:
            task: the microbatch.
            flight: of it; gets the result.
            received: arguments of the first layer here; None: those that the step calls the model with.
        """

        def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
            if received is not None:
                args, kwargs = received, {}
            states = generator_states(self.device)  # what the step draws afterwards does not depend on the layers
            with self._layers_context():
                output = self._compute(task, args, kwargs, flight.beside)
            set_generator_states(states, self.device)
            return output

        seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
        with self._step_context():
            result = self.call.redirect(partial(task.step, task.slot, flight.weight), compute)
        return self._landed(task, flight, result)

    def _landed(self, task: Task, flight: Flight, result: Any) -> Flight:
        flight.result = result
        if task.purpose == "train":
            loss = loss_of(result)
            if not loss.requires_grad:
                raise ConfigurationError(
                    f"the loss that training_step returned has no gradient: compute it from {self.hooks.model_name}'s"
                    " output, without detach() or no_grad(), and let some parameter be trained there or before it"
                    " (requires_grad)"
                )
            flight.outputs = (loss,)
            # With its graph the result would keep what the nodes have, such as the gradients that were sent off.
            flight.result = result.detach() if isinstance(result, Tensor) else map_tensors(Tensor.detach, result)
        return flight

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """The backward starts from w_k or 1, as if the loss had been multiplied with it."""
        weight = 1.0 if self.hooks.loss_reduction == "sum" else flight.weight
        return [torch.full_like(flight.outputs[0], weight)]

    def announce_failure(self, k: int, error: Exception) -> None:
        """No stage comes after."""


class OnlyStage(LastStage):
    """A pipeline of one stage: the layers take what the step calls the model with, and nothing travels."""

    def forward(self, task: Task) -> Flight:
        """Run the step; when it calls the model, run the layers."""
        if task.slot is None:
            return Flight(task.k, task.version)
        with self.span(Kind.FORWARD, task.k, task.version):
            return self._run_step(task, Flight(task.k, task.version, task.weight))

    def send_input_gradients(self, flight: Flight) -> None:
        """Nothing was received."""


class WholeStep(OnlyStage):
    """A module that is not cut: the whole step runs on the weights of a version, whatever it calls."""

    def _run_step(self, task: Task, flight: Flight, received: tuple | None = None) -> Flight:
        """Run the step."""
        seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
        token = COLLECTED.set(flight.beside)
        try:
            with self._step_context():
                result = self.stage.under(task.weights, partial(task.step, task.slot, flight.weight))
        finally:
            COLLECTED.reset(token)
        return self._landed(task, flight, result)


def stage_runner(
    stage: Stage, mesh: Mesh, transport: Transport | None, hooks: UserHooks, seed: int, device: torch.device
) -> StageRunner:
    """The runner of this rank's stage; arguments as for :class:`StageRunner`."""
    if transport is None:
        return (WholeStep if stage.runs_whole_step else OnlyStage)(stage, mesh, None, hooks, seed, device)
    kind: type[StageRunner] = FirstStage if mesh.is_first else LastStage if mesh.is_last else MiddleStage
    return kind(stage, mesh, transport, hooks, seed, device)


def _mismatch(k: int, how: str) -> str:
    return (
        f"the first and the last stage were given different batches (microbatch {k}: {how}). All stages of a replica"
        " must read the same data in the same order: look at the data loader's shuffling, its seed and its sampler,"
        " and give random transforms a seed that does not depend on the rank"
    )
