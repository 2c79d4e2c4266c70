"""Forward and backward of one microbatch on one stage, with the messages to its neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.auxiliary import COLLECTED, Collected
from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import NO_FINGERPRINT, ModelCall, Slot, Step, UserHooks, cut_batch, loss_of
from lightning_asyncpp.core.randomness import generator_states, seed_generators, set_generator_states
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Activity, Trace, Wait, clock_of
from lightning_asyncpp.core.tree import flatten, map_tensors, unflatten
from lightning_asyncpp.core.wire.link import Header, Layout, TensorInfo
from lightning_asyncpp.core.wire.transport import Arrival, Transport, arrived_at, begin
from lightning_asyncpp.errors import BatchMismatchError, ConfigurationError, ConsequenceError, PeerLostError

Context = Callable[[], AbstractContextManager[Any]]
_NOTHING = nullcontext()
_MOST_TEXT = 4096  # maximum number of characters of an error that is sent


class StageBeforeFailedError(ConsequenceError):
    """Failure of an earlier stage at the first microbatch of training or in an evaluation.

    Failures at other times are not sent to the next stage. The text is the failed stage's message.
    """


@dataclass
class Flight:
    """Microbatch between its forward and its backward on this stage.

    Attributes:
        k: number of the microbatch, counted over the run.
        version: version of the weights on which the microbatch runs.
        weight: weight w_k in the mean loss; 0, as for empty slots (places without samples), means no backward.
        inputs: autograd nodes that receive the gradients of the received activations.
        outputs: tensors from which the backward starts; on the last stage the loss.
        result: result of the user's step, on the last stage.
        collected: statistics and auxiliary losses of this stage's layers; the backward starts from these losses, too.
    """

    k: int
    version: int
    weight: float = 0.0
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Any = None
    collected: Collected = field(default_factory=Collected)


class ForwardTask(NamedTuple):
    """Forward to be run.

    Attributes:
        k: number of the microbatch, counted over the run; if ``purpose`` is not ``"train"``, over all evaluations.
        version: version of the weights.
        weights: name -> leaf tensor; None if the forward runs on the parameters themselves.
        microbatch: the microbatch on the first and the last stage; None for an empty slot, and on stages between them.
        fingerprint: hash of the batch or the microbatch, on the first and the last stage, if computed.
        step: the user's step, called with the microbatch and its weight; the weight is None on the first of several
            stages.
        purpose: ``"train"`` or a name of the evaluation, from which random seeds are derived.
        weight: w_k, on the first stage.
    """

    k: int
    version: int
    weights: dict[str, Tensor] | None
    microbatch: Any
    fingerprint: int
    step: Step
    purpose: str = "train"
    weight: float = 1.0


class StageRunner(ABC):
    """Forwards and backwards on one stage.

    Args:
        stage: this rank's stage of the model.
        mesh: mesh of ranks.
        transport: transport to the neighbours; None with a single stage.
        hooks: user's hooks for microbatches and the loss.
        seed: seed of the run.
        device: device of this stage.

    Attributes:
        trace: trace that records spans; None if nothing is recorded.
        clock: clock for traces of this stage.
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
        # The context around the user's step, and the context around the layers within the step.
        self._step_context: Context = hooks.forward_context if hooks.context_around_step else nullcontext
        self._layers_context: Context = nullcontext if hooks.context_around_step else hooks.forward_context
        self._neighbours: Transport = transport  # type: ignore[assignment]  # not used by a single stage

    @abstractmethod
    def forward(self, task: ForwardTask) -> Flight:
        """Run the forward of a microbatch, and send the result to the next stage.

        Implementations do extra work before a wait, not after a send, since after a send the receiver may need this
        CPU core. They do not restore torch's generators: the engine restores them once per batch.

        Args:
            task: forward to be run.
        """

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Cut a batch into this stage's microbatches and empty slots.

        Args:
            batch: the batch on the device.
            parts: number of slots.
            host_batch: record of the batch's tensors on the host.
        """
        # Later stages receive the microbatches' weights w_k with the activations.
        weigh = self.hooks.microbatch_weight if self.mesh.is_first else None
        on_host = host_batch.of(batch) if host_batch.copies else batch
        return cut_batch(batch, parts, self.hooks.split_batch, weigh, on_host)

    def backward(self, flight: Flight, weights: dict[str, Tensor]) -> None:
        """Run the backward of a microbatch, which adds to the gradients of ``weights``; send the inputs' gradients."""
        if not flight.weight:
            return
        # A backward's random numbers must not depend on drains (runs of all backwards in flight), so generators are
        # seeded here: before the wait for the gradient, since time after the wait is on the critical path.
        seed_generators(self.seed, self.device, "backward", self.stage.first_unit, self.mesh.replica, flight.k)
        self.stage.under(weights, partial(self._backward_in_place, flight))
        self.send_input_gradients(flight)

    def _backward_in_place(self, flight: Flight) -> None:
        """Run the backward while the module holds the weights of the microbatch's version."""
        gradients = self._output_gradients(flight)
        outputs = flight.outputs
        if flight.collected.losses:
            # An auxiliary loss is a part of the microbatch's mean loss, so it has the same weight.
            gradients += [torch.full_like(loss, flight.weight) for loss in flight.collected.losses]
            outputs = (*outputs, *flight.collected.losses)
        if outputs:
            with self.span(Kind.BACKWARD, flight.k, flight.version):
                torch.autograd.backward(outputs, gradients)

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """Receive the gradients of the outputs from the next stage."""
        with self.span(Wait.GRADIENT, flight.k):
            return self._neighbours.recv_backward(flight.k, flight.outputs)

    def send_input_gradients(self, flight: Flight) -> None:
        """Send the gradients of the received activations; zeros for those on which the loss does not depend."""
        gradients = list(map(arrived_at, flight.inputs))
        size = sum(gradient.nbytes for gradient in gradients) if self.trace is not None else 0
        with self.span(Activity.SEND, flight.k, num_bytes=size):
            self._neighbours.send_backward(flight.k, gradients)

    def announce_failure(self, k: int, error: Exception) -> None:
        """Send an error to the next stage, so that no later stage waits, and the last stage can show the error."""
        text = str(error)
        if not isinstance(error, StageBeforeFailedError):  # its text names the failed stage already
            text = f"stage {self.mesh.stage} failed at microbatch {k}: {type(error).__name__}: {text}"
        news = Header(k, Layout(Header.FAILED, structure=text[:_MOST_TEXT].encode(errors="replace")))
        with suppress(PeerLostError):  # a lost neighbour does not wait
            self._neighbours.send_forward(news, ())

    def span(
        self, kind: Kind | Wait | Activity, index: int, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Return a context that records a span if there is a trace."""
        return _NOTHING if self.trace is None else self.trace.span(kind, index, version, num_bytes)

    # -- receive, compute and send ----------------------------------------------------------------------------------

    def _receive(self, k: int) -> Arrival:
        with self.span(Wait.ACTIVATION, k):
            arrival = self._neighbours.recv_forward(k)
        if arrival.header.layout.kind == Header.FAILED:
            raise StageBeforeFailedError(arrival.header.layout.structure.decode(errors="ignore"))
        return arrival

    @staticmethod
    def _open(arrival: Arrival) -> tuple[tuple[Any, ...], Any]:
        """Return the autograd nodes of an arrival's tensors, and the argument of the first layer."""
        tensors, inputs, layout = list(arrival.tensors), [], arrival.header.layout
        for position, info in enumerate(layout.tensors):
            if info.needs_gradient and torch.is_grad_enabled():
                tensors[position], node = begin(tensors[position])
                inputs.append(node)
        return tuple(inputs), tensors[0] if layout.kind == Header.TENSOR else unflatten(tensors, layout.structure)

    def _compute(self, task: ForwardTask, args: tuple, kwargs: dict[str, Any], collected: Collected) -> Any:
        """Run the layers; collect their auxiliary losses and statistics in ``collected``."""
        token = COLLECTED.set(collected)
        try:
            forward = partial(self.stage.forward, args, kwargs, self.seed, self.mesh.replica, task.k)
            return self.stage.under(task.weights, forward)
        finally:
            COLLECTED.reset(token)

    def _send(self, task: ForwardTask, output: Any, fingerprint: int, flight: Flight) -> Flight:
        """Send the layers' output to the next stage, with the weight of ``flight``."""
        is_tensor = type(output) is Tensor
        tensors, structure = ((output,), b"") if is_tensor else flatten(output, self.stage.units[-1].name)
        kind = Header.TENSOR if is_tensor or isinstance(output, Tensor) else Header.TUPLE
        layout = Layout(kind, tuple(map(TensorInfo.of, tensors)), structure)
        outgoing = Header(task.k, layout, flight.weight, fingerprint)
        flight.outputs = tuple([tensor for tensor in tensors if tensor.requires_grad])
        with self.span(Activity.SEND, task.k, num_bytes=0 if self.trace is None else outgoing.num_bytes):
            self._neighbours.send_forward(outgoing, tensors)
        return flight

    def _send_empty(self, task: ForwardTask) -> Flight:
        self._neighbours.send_forward(Header(task.k, Layout(Header.EMPTY)), ())
        return Flight(task.k, task.version)


class FirstStage(StageRunner):
    """First stage, which runs the user's step up to its call of the model."""

    def forward(self, task: ForwardTask) -> Flight:
        """Run the layers on the arguments of the step's call, and send their output."""
        if task.microbatch is None:
            return self._send_empty(task)
        flight = Flight(task.k, task.version, task.weight)
        with self.span(Kind.FORWARD, task.k, task.version):
            seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
            with self._step_context():
                args, kwargs = self.call.capture(partial(task.step, task.microbatch, None))
            with self.hooks.forward_context():
                output = self._compute(task, args, kwargs, flight.collected)
        return self._send(task, output, task.fingerprint, flight)

    def send_input_gradients(self, flight: Flight) -> None:
        """Do nothing: the first stage receives no activations."""


class MiddleStage(StageRunner):
    """Stage between the first and the last, which has no batches and does not run the user's step."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Return empty slots."""
        return [Slot()] * parts

    def forward(self, task: ForwardTask) -> Flight:
        """Run the layers on the received activation, and send their output."""
        arrival = self._receive(task.k)
        if arrival.header.layout.kind == Header.EMPTY:
            return self._send_empty(task)
        with self.span(Kind.FORWARD, task.k, task.version), self.hooks.forward_context():
            inputs, argument = self._open(arrival)
            flight = Flight(task.k, task.version, arrival.header.weight, inputs)
            output = self._compute(task, (argument,), {}, flight.collected)
        return self._send(task, output, arrival.header.fingerprint, flight)


class LastStage(StageRunner):
    """Last stage, which runs the user's whole step; the step gets the pipeline's output as the model's output."""

    def forward(self, task: ForwardTask) -> Flight:
        """Run the step; when it calls the model, run the layers on the received activation."""
        arrival = self._receive(task.k)
        header = arrival.header
        if header.layout.kind == Header.EMPTY:
            if task.microbatch is not None:
                raise BatchMismatchError(_mismatch(task.k, "an empty slot on the first stage, samples on the last"))
            return Flight(task.k, task.version)
        if task.microbatch is None:
            raise BatchMismatchError(_mismatch(task.k, "samples on the first stage, an empty slot on the last"))
        if NO_FINGERPRINT not in (header.fingerprint, task.fingerprint) and header.fingerprint != task.fingerprint:
            raise BatchMismatchError(_mismatch(task.k, "their shapes or contents differ"))
        with self.span(Kind.FORWARD, task.k, task.version):
            inputs, received = self._open(arrival)
            return self._run_step(task, Flight(task.k, task.version, header.weight, inputs), (received,))

    def _run_step(self, task: ForwardTask, flight: Flight, received: tuple | None = None) -> Flight:
        """Run the user's step with this stage's layers in place of the model.

        Args:
            task: forward to be run.
            flight: record of the microbatch, which receives the result.
            received: arguments of the first layer; default: the arguments with which the step calls the model.
        """

        def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
            if received is not None:
                args, kwargs = received, {}
            states = generator_states(self.device)  # the step's later random numbers must not depend on the layers
            with self._layers_context():
                output = self._compute(task, args, kwargs, flight.collected)
            set_generator_states(states, self.device)
            return output

        seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
        with self._step_context():
            result = self.call.redirect(partial(task.step, task.microbatch, flight.weight), compute)
        return self._with_result(task, flight, result)

    def _with_result(self, task: ForwardTask, flight: Flight, result: Any) -> Flight:
        flight.result = result
        if task.purpose == "train":
            loss = loss_of(result)
            if not loss.requires_grad:
                raise ConfigurationError(
                    f"the loss that training_step returned has no gradient: compute it from {self.hooks.model_name}'s"
                    " output, without detach() or no_grad(), and leave a parameter of this or an earlier stage"
                    " trainable (requires_grad)"
                )
            flight.outputs = (loss,)
            # Detach the result, since its graph would keep tensors alive after the backward, among them input gradients
            # that were already sent.
            flight.result = result.detach() if isinstance(result, Tensor) else map_tensors(Tensor.detach, result)
        return flight

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """Return the gradient of the loss: the microbatch's weight w_k, or 1 if the loss is a sum."""
        weight = 1.0 if self.hooks.loss_reduction == "sum" else flight.weight
        return [torch.full_like(flight.outputs[0], weight)]

    def announce_failure(self, k: int, error: Exception) -> None:
        """Do nothing: there is no next stage."""


class OnlyStage(LastStage):
    """Only stage of a pipeline, which sends and receives nothing."""

    def forward(self, task: ForwardTask) -> Flight:
        """Run the step with the layers in place of the model."""
        if task.microbatch is None:
            return Flight(task.k, task.version)
        with self.span(Kind.FORWARD, task.k, task.version):
            return self._run_step(task, Flight(task.k, task.version, task.weight))

    def send_input_gradients(self, flight: Flight) -> None:
        """Do nothing: there is no previous stage."""


class WholeStep(OnlyStage):
    """Runner for a module that is not cut; the user's whole step runs on one weight version."""

    def _run_step(self, task: ForwardTask, flight: Flight, received: tuple | None = None) -> Flight:
        """Run the step."""
        seed_generators(self.seed, self.device, task.purpose, self.mesh.replica, task.k)
        token = COLLECTED.set(flight.collected)
        try:
            with self._step_context():
                result = self.stage.under(task.weights, partial(task.step, task.microbatch, flight.weight))
        finally:
            COLLECTED.reset(token)
        return self._with_result(task, flight, result)


def stage_runner(
    stage: Stage, mesh: Mesh, transport: Transport | None, hooks: UserHooks, seed: int, device: torch.device
) -> StageRunner:
    """Return the runner of this rank's stage; arguments as for :class:`StageRunner`."""
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
