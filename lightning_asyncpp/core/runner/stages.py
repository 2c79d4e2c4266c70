"""What happens to one micro-batch on the first stage, on one in the middle, on the last, and on the only one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.core.batches.host_batch import HostBatch
from lightning_asyncpp.core.batches.micro_batch import NO_MARK, Slot
from lightning_asyncpp.core.batches.user_hooks import UserHooks, loss_of
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.randomness import generator_states, set_generator_states
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner.common import Departure, Flight, StageRunner, Task
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.core.wire.received import InputGradient
from lightning_asyncpp.core.wire.transport import Arrival, Transport
from lightning_asyncpp.errors import BatchMismatchError, ConfigurationError


def stage_runner(
    stage: Stage, mesh: Mesh, transport: Transport | None, hooks: UserHooks, seed: int, device: torch.device
) -> StageRunner:
    """The runner of this rank's stage; arguments as for :class:`StageRunner`."""
    if transport is None:
        return (WholeStep if stage.runs_whole_step else OnlyStage)(stage, mesh, None, hooks, seed, device)
    kind: type[StageRunner] = FirstStage if mesh.is_first else LastStage if mesh.is_last else MiddleStage
    return kind(stage, mesh, transport, hooks, seed, device)


class FirstStage(StageRunner):
    """Where batches enter: the user's step is run up to its call of the model, and left there."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Micro-batches with their weights, which travel with them."""
        return self._cut(batch, parts, host_batch, self.hooks.micro_batch_weight)

    def forward(self, task: Task) -> Flight:
        """Take the arguments of the step's call, run the layers on them, and send what comes out."""
        if task.slot is None:
            return self._send_empty(task)
        with self._span_of(task, Kind.FORWARD, task.version):
            departure = self._enter(task)
        return self._send(task, departure)

    def _enter(self, task: Task) -> Departure:
        """Run the step up to its call of the model, leave it there, and run the layers."""
        self._seed(task.purpose, self.mesh.replica, task.k)
        with self._step_context():
            args, kwargs = self.call.capture(lambda: task.step(task.slot, None))
        header = Header(task.k, weight=task.weight, fingerprint=task.mark)
        with collecting() as said:
            output = self._compute(task, args, kwargs)
        return self._departure(task, output, header, (), said)

    def send_input_gradients(self, flight: Flight) -> None:
        """Nothing was received."""


class MiddleStage(StageRunner):
    """Takes what the stage before made and hands it on; it has no batches, and no step of the user's is run here."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Empty ones."""
        return [Slot()] * parts

    def forward(self, task: Task) -> Flight:
        """Run the layers on what arrives, and send what comes out."""
        with self.hooks.forward_context():
            departure = self.stage.under(task.weights, lambda: self._pass_through(task))
        return self._send_empty(task) if departure is None else self._send(task, departure)

    def _pass_through(self, task: Task) -> Departure | None:
        """The forward with its weights in place, which they are before the wait; None for an empty slot."""
        arrival = self._receive(task)
        if arrival.header.kind == Header.EMPTY:
            return None
        with self._span_of(task, Kind.FORWARD, task.version):
            inputs, arguments = self._open(arrival)
            with collecting() as said:
                output = self.stage.forward((arguments,), {}, self.seed, self.mesh.replica, task.k)
            return self._departure(task, output, arrival.header, inputs, said)


class LastStage(StageRunner):
    """Runs the whole step of the user, with what the pipeline computed for the model's output, to the loss."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Micro-batches; their weights arrive."""
        return self._cut(batch, parts, host_batch, None)

    def forward(self, task: Task) -> Flight:
        """Run the step; when it calls the model, run the layers on what has arrived, and give it what comes out."""
        arrival = self._receive(task)
        if arrival.header.kind == Header.EMPTY:
            if task.slot is not None:
                raise BatchMismatchError(_mismatch(task.k, "an empty slot on the first stage, samples on the last"))
            return Flight(task.k, task.version)
        with self._span_of(task, Kind.FORWARD, task.version):
            return self._leave(task, arrival)

    def _leave(self, task: Task, arrival: Arrival) -> Flight:
        """Check that both ends mean the same micro-batch, run the step, and take its loss."""
        if task.slot is None:
            raise BatchMismatchError(_mismatch(task.k, "samples on the first stage, an empty slot on the last"))
        header = arrival.header
        if NO_MARK not in (header.fingerprint, task.mark) and header.fingerprint != task.mark:
            raise BatchMismatchError(_mismatch(task.k, "their shapes or contents differ"))
        inputs, received = self._open(arrival)
        said = Collected()

        def compute(args: tuple, kwargs: dict[str, Any]) -> Any:
            return self._compute_in_step(task, (received,), {}, said)

        self._seed(task.purpose, self.mesh.replica, task.k)
        with self._step_context():
            result = self.call.redirect(lambda: task.step(task.slot, header.weight), compute)
        return self._flight(task, header.weight, inputs, result, said)

    def _compute_in_step(self, task: Task, args: tuple, kwargs: dict[str, Any], said: Collected) -> Any:
        """Run the layers where the step calls the model; what the step draws after that does not depend on it.

        Args:
            task: the micro-batch.
            args, kwargs: of the first layer here.
            said: takes what the layers say.
        """
        states = generator_states(self.device)
        with collecting() as heard:
            output = self._compute(task, args, kwargs, in_context=self.hooks.context_around_step)
            # Taken before the end, where a collection of the user's around the model would get it.
            said.losses, said.statistics = heard.losses, heard.take_statistics()
        set_generator_states(states, self.device)
        return output

    def _flight(
        self, task: Task, weight: float, inputs: tuple[InputGradient, ...], result: Any, said: Collected
    ) -> Flight:
        outputs = (self._loss_to_differentiate(result, inputs),) if task.trains else ()
        return Flight(task.k, task.version, weight, inputs, outputs, result, said)

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

    def _output_gradients(self, flight: Flight) -> list[Tensor]:
        """The backward starts from w_k or 1, as if the loss had been multiplied with it."""
        weight = 1.0 if self.hooks.loss_reduction == "sum" else flight.weight
        return [torch.full_like(loss, weight) for loss in flight.outputs]

    def announce_failure(self, k: int, error: Exception) -> None:
        """No stage comes after."""


class OnlyStage(LastStage):
    """A pipeline of one stage: the layers take what the step calls the model with, and nothing travels."""

    def slots(self, batch: Any, parts: int, host_batch: HostBatch) -> list[Slot]:
        """Micro-batches with their weights."""
        return self._cut(batch, parts, host_batch, self.hooks.micro_batch_weight)

    def forward(self, task: Task) -> Flight:
        """Run the step; when it calls the model, run the layers."""
        if task.slot is None:
            return Flight(task.k, task.version)
        with self._span_of(task, Kind.FORWARD, task.version):
            said = Collected()
            self._seed(task.purpose, self.mesh.replica, task.k)
            with self._step_context():
                result = self.call.redirect(
                    lambda: task.step(task.slot, task.weight),
                    lambda args, kwargs: self._compute_in_step(task, args, kwargs, said),
                )
            return self._flight(task, task.weight, (), result, said)

    def send_input_gradients(self, flight: Flight) -> None:
        """Nothing was received."""


class WholeStep(OnlyStage):
    """A module that is not cut: the whole step runs on the weights of a version, whatever it calls."""

    def forward(self, task: Task) -> Flight:
        """Run the step."""
        if task.slot is None:
            return Flight(task.k, task.version)
        self._seed(task.purpose, self.mesh.replica, task.k)
        with self._span_of(task, Kind.FORWARD, task.version), self._step_context(), collecting() as said:
            result = self.stage.under(task.weights, lambda: task.step(task.slot, task.weight))
        return self._flight(task, task.weight, (), result, said)


def _mismatch(k: int, how: str) -> str:
    return (
        f"the first and the last stage were given different batches (micro-batch {k}: {how}). All stages of a replica"
        " must read the same data in the same order: look at the data loader's shuffling, its seed and its sampler,"
        " and give random transforms a seed that does not depend on the rank"
    )
