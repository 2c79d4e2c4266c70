"""One micro-batch through one stage: forward with what arrives, backward with what comes back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.pipeline.batches.micro_batch import NO_MARK
from lightning_asyncpp.pipeline.batches.user_hooks import Step, UserHooks, loss_of
from lightning_asyncpp.pipeline.clocks import Clock, clock_of
from lightning_asyncpp.pipeline.cut.stage import Stage
from lightning_asyncpp.pipeline.errors import BatchMismatchError, ConfigurationError, ConsequenceError, PeerLostError
from lightning_asyncpp.pipeline.randomness import derive, generator_states, seed_generators, set_generator_states
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.step.around_call import AroundCall
from lightning_asyncpp.pipeline.step.call_digest import NOT_LOOKED_AT, digest
from lightning_asyncpp.pipeline.step.gradients_in_step import GradientsInStep, refuse_input_gradients
from lightning_asyncpp.pipeline.step.kept_tensors import KeptTensors
from lightning_asyncpp.pipeline.step.model_call import ModelCall
from lightning_asyncpp.pipeline.trace import Beside, Trace, Wait
from lightning_asyncpp.pipeline.wire.boundary import put_together, take_apart
from lightning_asyncpp.pipeline.wire.header import Header, describe
from lightning_asyncpp.pipeline.wire.received import InputGradient, begin
from lightning_asyncpp.pipeline.wire.transport import Arrival, Transport

_NOTHING = nullcontext()
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


class _Departure(NamedTuple):
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
        step: the user's step, called with the micro-batch and its weight.
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


@dataclass
class StageRunner:
    """Runs micro-batches on one stage.

    Attributes:
        stage: this rank's units.
        mesh: this rank's place.
        transport: messages with the neighbours; None with a single stage.
        hooks: the user's side.
        seed: the run's seed.
        device: where tensors live.
        trace: records what is done when; None records nothing.
        clock: by which a trace is to measure what is computed here.
    """

    stage: Stage
    mesh: Mesh
    transport: Transport | None
    hooks: UserHooks
    seed: int
    device: torch.device
    trace: Trace | None = None
    call: ModelCall = field(init=False)
    around: AroundCall = field(init=False)
    kept: KeptTensors = field(init=False)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.stage.device = self.device
        self.call = ModelCall(self.stage.model, self.hooks.model_name)
        self.around = AroundCall(self.stage, self.device, self.hooks)
        self.kept = KeptTensors(self.stage.root)
        self.clock = clock_of(self.device)

    def begin(self, purpose: str = "train") -> None:
        """Get ready for the micro-batches of a batch; once for each.

        Args:
            purpose: that of its tasks.
        """
        if self.mesh.num_stages > 1 and (self.mesh.is_first or self.mesh.is_last):
            self.around.begin(purpose)

    def forward(self, task: Task) -> Flight:
        """Run the forward of a micro-batch and send the result on.

        What can be done before a wait is done there, and as little as possible after a send: whoever is woken by it
        often waits for this core. It seeds torch's generators and leaves them so: preserving them once per batch, not
        per micro-batch, is cheaper.

        Args:
            task: what to run.
        """
        trace = self.trace if task.purpose == "train" else None
        if not (self.mesh.is_first or self.mesh.is_last):
            with self.hooks.forward_context():
                departure = self.stage.under(task.weights, lambda: self._pass_through(task, trace))
            return self._pass_empty(task) if departure is None else self._send(departure, trace)
        arrival = self._receive(task.k, trace)
        if (task.slot is None and self.mesh.is_first) or (arrival and arrival.header.kind == Header.EMPTY):
            return self._pass_empty(task)
        with _span(trace, Kind.FORWARD, task.k, task.version):
            if self.mesh.is_last:
                return self._leave(task, arrival)
            departure = self._enter(task)
        return self._send(departure, trace)

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
        """Where the backward starts: on the last stage from w_k or 1, as if the loss had been multiplied with it."""
        if self.transport is None or self.mesh.is_last:
            weight = 1.0 if self.hooks.loss_reduction == "sum" else flight.weight
            return [torch.full_like(loss, weight) for loss in flight.outputs]
        with self.span(Wait.GRADIENT, flight.k):
            return self.transport.receive_gradients(flight.k, flight.outputs)

    def send_input_gradients(self, flight: Flight) -> None:
        """Send the gradients of what was received; zeros for what the loss does not depend on."""
        if self.transport is not None and not self.mesh.is_first:
            gradients = [gradient.get() for gradient in flight.inputs]
            size = sum(gradient.nbytes for gradient in gradients) if self.trace is not None else 0
            with self.span(Beside.SEND, flight.k, num_bytes=size):
                self.transport.send_gradients(flight.k, gradients)

    def announce_failure(self, k: int, error: Exception) -> None:
        """Tell the stage after why nothing comes, so that it does not wait; the last one is where users look."""
        if self.transport is None or self.mesh.is_last:
            return
        text = str(error)
        if not isinstance(error, StageBeforeFailedError):  # which says so already
            text = f"stage {self.mesh.stage} failed at micro-batch {k}: {type(error).__name__}: {text}"
        with suppress(PeerLostError):  # who is gone waits no more
            self.transport.send_activation(Header(k, Header.FAILED, structure=text.encode()[:_MOST_TEXT_BYTES]), ())

    def span(
        self, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs meanwhile, if anything is recorded."""
        return _span(self.trace, kind, index, version, num_bytes)

    def _receive(self, k: int, trace: Trace | None) -> Arrival | None:
        if self.mesh.is_first or self.transport is None:
            return None
        with _span(trace, Wait.ACTIVATION, k):
            arrival = self.transport.receive_activation(k)
        if arrival.header.kind == Header.FAILED:
            raise StageBeforeFailedError(arrival.header.structure.decode(errors="ignore"))
        return arrival

    def _pass_empty(self, task: Task) -> Flight:
        if self.mesh.is_last and task.slot is not None:
            raise BatchMismatchError(_mismatch(task.k, "an empty slot on the first stage, samples on the last"))
        if self.transport is not None and not self.mesh.is_last:
            self.transport.send_activation(Header(task.k, Header.EMPTY), ())
        return Flight(task.k, task.version)

    def _enter(self, task: Task) -> _Departure:
        weight = task.weight
        self._seed(task.purpose, self.mesh.replica, task.k)
        with self._step_context():
            args, kwargs = self.call.capture(lambda: task.step(task.slot, weight), self.around.look)
        trains = task.purpose == "train"
        around = self.around.judge(trains)
        if trains:
            refuse_input_gradients((args, kwargs), self.hooks.model_name)
        call = digest(args, kwargs) if trains and self.around.looks_closely else NOT_LOOKED_AT
        header = Header(task.k, weight=weight, fingerprint=task.mark, around=around, call=call)
        with collecting() as said, self.kept.watching() if trains else _NOTHING:
            output = self._compute(task, args, kwargs, around)
        return self._departure(task, output, header, (), said)

    def _pass_through(self, task: Task, trace: Trace | None) -> _Departure | None:
        """The forward of a stage in the middle, with its weights in place; None for an empty slot."""
        arrival = self._receive(task.k, trace)
        assert arrival is not None
        if arrival.header.kind == Header.EMPTY:
            return None
        with _span(trace, Kind.FORWARD, task.k, task.version):
            inputs, arguments = self._open(arrival)
            kept = self.kept.watching() if task.purpose == "train" else _NOTHING
            with self.around.set_as(arrival.header.around), collecting() as said, kept:
                output = self.stage.forward((arguments,), {}, self.seed, self.mesh.replica, task.k)
            return self._departure(task, output, arrival.header, inputs, said)

    def _send(self, departure: _Departure, trace: Trace | None) -> Flight:
        assert self.transport is not None
        flight, header, tensors = departure
        with _span(trace, Beside.SEND, flight.k, num_bytes=header.num_bytes):
            self.transport.send_activation(header, tensors)
        return flight

    def _departure(
        self, task: Task, output: Any, header: Header, inputs: tuple[InputGradient, ...], said: Collected
    ) -> _Departure:
        layer = self.stage.units[-1].name
        tensors, structure = take_apart(output, layer)
        kind, infos = Header.TENSOR if isinstance(output, Tensor) else Header.TUPLE, describe(tensors, layer)
        outgoing = Header(task.k, kind, header.weight, header.fingerprint, infos, structure, header.around, header.call)
        outputs = tuple(t for t in tensors if t.requires_grad)
        return _Departure(Flight(task.k, task.version, header.weight, inputs, outputs, said=said), outgoing, tensors)

    def _leave(self, task: Task, arrival: Arrival | None) -> Flight:
        if task.slot is None:
            raise BatchMismatchError(_mismatch(task.k, "samples on the first stage, an empty slot on the last"))
        inputs: tuple[InputGradient, ...] = ()
        if arrival is None:
            weight = task.weight
        else:
            if NO_MARK not in (there := arrival.header.fingerprint, task.mark) and there != task.mark:
                raise BatchMismatchError(_mismatch(task.k, "their shapes or contents differ"))
            weight = arrival.header.weight
            inputs, received = self._open(arrival)
        said = Collected()

        def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
            if arrival is not None:
                self.around.check_call(arrival.header.call, args, kwargs)
                args, kwargs = (received,), {}
                self.around.check_model()
            states = generator_states(self.device)  # what the step draws after the model does not depend on it
            around = 0 if arrival is None else arrival.header.around
            with collecting() as heard:
                output = self._compute(task, args, kwargs, around, in_context=self.hooks.context_around_step)
                # Taken before the end, where a collection of the user's around the model would get it.
                said.losses, said.statistics = heard.losses, heard.take_statistics()
            set_generator_states(states, self.device)
            if arrival is not None:
                gradients.watch(output)
                self.around.model_ran()
            return output

        self._seed(task.purpose, self.mesh.replica, task.k)
        gradients = GradientsInStep(self.hooks.model_name)
        with self._step_context(), _NOTHING if arrival is None else gradients.within():
            result = self.call.redirect(lambda: task.step(task.slot, weight), compute)
        if arrival is not None:
            self.around.check_step()
        outputs = (self._loss_to_differentiate(result, inputs),) if task.purpose == "train" else ()
        return Flight(task.k, task.version, weight, inputs, outputs, result, said)

    def _seed(self, *parts: int | str) -> None:
        seed_generators(derive(self.seed, *parts), self.device)

    def _step_context(self) -> AbstractContextManager[Any]:
        return self.hooks.forward_context() if self.hooks.context_around_step else _NOTHING

    def _compute(self, task: Task, args: tuple, kwargs: dict[str, Any], around: int, in_context: bool = False) -> Any:
        def forward() -> Any:
            return self.stage.forward(args, kwargs, self.seed, self.mesh.replica, task.k)

        with _NOTHING if in_context else self.hooks.forward_context(), self.around.set_as(around):
            return self.stage.under(task.weights, forward)

    def _open(self, arrival: Arrival) -> tuple[tuple[InputGradient, ...], Any]:
        tensors, inputs = list(arrival.tensors), []
        for position, info in enumerate(arrival.header.tensors):
            if info.needs_gradient and torch.is_grad_enabled():
                tensors[position], gradient = begin(tensors[position])
                inputs.append(gradient)
        is_tensor = arrival.header.kind == Header.TENSOR
        return tuple(inputs), tensors[0] if is_tensor else put_together(tensors, arrival.header.structure)

    def _loss_to_differentiate(self, result: Any, inputs: tuple[InputGradient, ...]) -> Tensor:
        loss, model = loss_of(result), self.hooks.model_name
        if loss.requires_grad:
            return loss
        if not inputs and not any(parameter.requires_grad for parameter in self.stage.parameters.values()):
            raise ConfigurationError(
                f"no parameter of {model} requires a gradient on the last stage, and what arrives there needs none:"
                " call requires_grad_(True) on what is to be trained"
            )
        raise ConfigurationError(
            f"the loss that training_step returned does not depend on {model}'s parameters: it has no gradient; compute"
            " it from the model's output, without detach() or no_grad()"
        )


def _span(
    trace: Trace | None, kind: Kind | Wait | Beside, index: int, version: int = -1, num_bytes: int = 0
) -> AbstractContextManager[None]:
    return _NOTHING if trace is None else trace.span(kind, index, version, num_bytes)


def _mismatch(k: int, how: str) -> str:
    return (
        f"the first and the last stage were given different batches (micro-batch {k}: {how}). All stages of a replica"
        " must read the same data in the same order: look at the data loader's shuffling, its seed and its sampler,"
        " and give random transforms a seed that does not depend on the rank"
    )
