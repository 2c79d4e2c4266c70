"""The engine, which runs the schedule on the stages of this process: forwards, backwards and updates.

Each training method of :class:`Engine` that may wait for other stages has a counterpart ``iter_...`` in
:class:`StageEngine`, which yields every action right before the action runs, so that several stages in one process
(``local.py``) can take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import BatchOutput, Slot, Step, UserHooks
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.ranks.agreement import agree_on_error, call_and_agree
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import Flight, ForwardTask, StageBeforeFailedError, StageRunner, stage_runner
from lightning_asyncpp.core.schedule import Action, Kind, Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.trace import Activity
from lightning_asyncpp.core.updates.update import HyperParameters, Update
from lightning_asyncpp.core.updates.update_queue import UpdateQueue
from lightning_asyncpp.core.weights import Weights, WeightVersions
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
Actions = Generator[Action, None, T]
"""Actions, each yielded right before it runs; the generator returns a result of type T."""


class StageEngine:
    """One stage of a running pipeline; :class:`Engine` calls it.

    Args:
        stage: this rank's stage of the model.
        mesh: connected mesh of ranks.
        settings: resolved settings of the pipeline.
        seed: seed of the run.
        device: device of this stage.
        hooks: user's hooks for microbatches and the loss.
        timeout: longest wait for a neighbour, in seconds; default: half an hour.
        transport: transport to the neighbours, if already connected.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        settings: ResolvedSettings,
        seed: int,
        device: torch.device,
        hooks: UserHooks,
        timeout: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.stage, self.mesh, self.settings = stage, mesh, settings
        self.schedule = stage.whole.schedule(settings, mesh.stage)
        versions = self.schedule.stage_rule.num_versions
        self.weights = WeightVersions(stage.parameters, versions, stage.uses, stage.buffers, settings.compute_dtype)
        if transport is None and mesh.num_stages > 1:
            transport = Transport(mesh, device, timeout=timeout)
        self.runner = stage_runner(stage, mesh, transport, hooks, seed, device)
        self.updates = UpdateQueue(mesh, settings, self.runner, self.weights, self.schedule)
        self.next_forward = self.next_backward = self._drained = 0
        self._checked = False
        self._modules = list(stage.modules())
        self._in_evaluation: set[nn.Module] = set()  # modules in evaluation mode in the last batch
        self._flights: dict[int, Flight] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and no update is outstanding."""
        return self.next_backward == self.next_forward and not self.updates.pending

    @property
    def drained(self) -> bool:
        """Whether nothing has run since the last drain."""
        return self.idle and self._drained == self.next_forward

    def continue_at(self, microbatch: int, mini_batch: int, last_norm: float | None) -> None:
        """Set the counters to those of a drained engine."""
        self.next_forward = self.next_backward = self._drained = microbatch
        self.updates.begin_at(mini_batch, microbatch)
        self.updates.last_norm = last_norm

    def iter_batch(
        self, batch: Any, host_batch: HostBatch, step: Step, after_update: Callable[[], object]
    ) -> Actions[BatchOutput]:
        """Run a training batch action by action; see :meth:`Engine.run`."""
        count = self.settings.microbatches
        cut_batch = partial(self.runner.slots, batch, count, host_batch)
        slots = cut_batch() if self._checked else call_and_agree(self.mesh, cut_batch)
        self._in_evaluation = {module for module in self._modules if not module.training}
        if not self.updates.pending:  # hooks may change weights while no update is outstanding
            self.weights.adopt()
        first = self.next_forward
        flights: list[Flight] = []
        if not self._checked:
            flights.append((yield from self._iter_checked(first, slots[0], step)))
        done, opened, updates = len(flights), self.updates.open, self.updates
        for action in self.schedule.batch(first + done, count - done, self.next_backward, opened.index, opened.first):
            yield action
            if action.kind is Kind.UPDATE:
                updates.step_mid_batch()
                after_update()
            elif action.kind is Kind.FORWARD:
                flights.append(self._forward(action.index, slots[action.index - first], step))
            else:
                self._backward(action.index)
            if updates.busy:
                updates.progress(self.next_backward)
        weighted = [flight for flight in flights if flight.weight]
        return BatchOutput([flight.result for flight in weighted], [flight.weight for flight in weighted])

    def drop(self) -> None:
        """Discard the gradient of the batches since the mini-batch began; see :meth:`Engine.drop`."""
        if self.runner.transport is not None:
            self.runner.transport.announce_drop(self.next_forward)
        self.updates.drop_open(self.next_forward, self.next_backward)

    def iter_complete(self, hyper_parameters: HyperParameters | None, note: Any) -> Actions[None]:
        """Complete the mini-batch, action by action; if it ends with a flush, run its backwards."""
        flushes = self.schedule.pipeline_rule.flushes(self.updates.open.index)
        self.updates.complete(self.next_forward, hyper_parameters, note)
        if flushes:
            yield from self._iter_backwards()
        self.updates.progress(self.next_backward)

    def iter_due(self) -> Actions[list[Update]]:
        """Apply the updates that are due, one by one; see :meth:`Engine.apply_due`."""
        yield from self.updates.iter_due()
        return self.updates.take_applied()

    def iter_drain(self) -> Actions[list[Update]]:
        """Drain the pipeline, action by action; see :meth:`Engine.drain`."""
        transport = self.runner.transport
        if transport is not None:
            transport.announce_end()  # before the backwards: a neighbour may be waiting for a batch
        yield from self._iter_backwards()
        self.updates.progress(self.next_backward)
        if transport is not None:
            transport.expect_end()  # after the backwards: now the previous stage has all that it needs to end
        yield from self.updates.iter_all()
        updates = self.updates.take_applied()
        if transport is not None:
            transport.settle()
        self._drained = self.next_forward
        return updates

    @contextmanager
    def modes_of_forwards(self) -> Iterator[None]:
        """Set layers to the training modes of their forwards, since activation checkpointing repeats forwards."""
        others = [m for m in self._modules if m.training == (m in self._in_evaluation)]
        for module in others:
            module.training = not module.training
        try:
            yield
        finally:
            for module in others:
                module.training = not module.training

    def _forward(self, k: int, slot: Slot, step: Step) -> Flight:
        opened = self.updates.open
        version = self.schedule.stage_rule.version(opened.index, k - opened.first)
        task = ForwardTask(
            k, version, self.weights.leaves(version), slot.content, slot.fingerprint, step, weight=slot.weight
        )
        flight = self._flights[k] = self.runner.forward(task)
        self.next_forward = k + 1
        opened.weight += flight.weight
        if flight.weight and flight.collected.statistics:
            for layer, counts in flight.collected.take_statistics().items():
                opened.collected.add(layer, counts)
        return flight

    def _backward(self, k: int) -> None:
        flight = self._flights.pop(k)
        weights = self.weights.leaves_for_backward(flight.version)
        if self.updates.reduces:
            with self.updates.reducing(k, weights):
                self.runner.backward(flight, weights)
        else:
            self.runner.backward(flight, weights)
        flight.outputs = flight.inputs = ()
        flight.collected.losses = []
        self.next_backward = k + 1

    def _iter_checked(self, k: int, slot: Slot, step: Step) -> Actions[Flight]:
        """Run the first microbatch forward and backward.

        An error in the forward, or a ConfigurationError in the backward, on any rank is raised on all ranks.
        """
        flight, error = None, None
        yield Action(Kind.FORWARD, k)
        try:
            flight = self._forward(k, slot, step)
        except Exception as caught:
            error = caught
            self.runner.announce_failure(k, error)
        agree_on_error(self.mesh, None if isinstance(error, StageBeforeFailedError) else error)
        assert flight is not None
        yield Action(Kind.BACKWARD, k)
        try:
            self._backward(k)
            self.updates.progress(self.next_backward)
        except ConfigurationError as caught:
            error = caught
            self.runner.send_input_gradients(flight)
        agree_on_error(self.mesh, error)
        self._checked = True
        return flight

    def _iter_backwards(self) -> Actions[None]:
        """Run the backwards of all microbatches in flight."""
        for action in self.schedule.drain(self.next_backward, self.next_forward):
            yield action
            self._backward(action.index)
            if self.updates.busy:
                self.updates.progress(self.next_backward)


class Engine:
    """The stages of a running pipeline that this process runs: one here, several in :class:`.LocalPipeline`.

    Call :meth:`run` for every batch. After the last batch of a mini-batch (without gradient accumulation, after every
    batch), call :meth:`complete` and then :meth:`apply_due`. :meth:`drain` may be called between batches at any time:
    it finishes what is in flight, and does not change on which weights later batches run.

    Args:
        stages: engines of the stages, in order.
        mesh: mesh of ranks.
        runner: runner of evaluations.
        weights: weights of the stages.

    Attributes:
        host_batch: record of the host tensors from which the newest batch was copied to the device.
    """

    def __init__(self, stages: Sequence[StageEngine], mesh: Mesh, runner: StageRunner, weights: Weights) -> None:
        self.stages, self.mesh, self.runner, self.weights = list(stages), mesh, runner, weights
        self.settings = self.stages[0].settings
        self.schedule = self.stages[-1].schedule  # the last stage computes and logs the loss
        self.updates = self.stages[0].updates  # the first stage applies an update last
        self.evaluated, self.host_batch = 0, HostBatch()

    def schedules(self) -> list[Schedule]:
        """Return the schedules of all stages."""
        whole = self.stages[0].stage.whole
        return [whole.schedule(self.settings, stage) for stage in range(self.settings.num_stages)]

    @property
    def mini_batch(self) -> int:
        """Index t of the next batch's mini-batch."""
        return self.updates.open.index

    @property
    def next_forward(self) -> int:
        """Number of the next microbatch, counted over the run."""
        return self.stages[0].next_forward

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and no update is outstanding, on the stages of this process."""
        return all(stage.idle for stage in self.stages)

    @property
    def drained(self) -> bool:
        """Whether nothing has run since the last drain, on any stage; :attr:`idle` is about this process only."""
        return all(stage.drained for stage in self.stages)

    def ended_as_agreed(self) -> bool:
        """Return whether all ranks know of a request to interrupt the run, and this rank has nothing in flight."""
        return self.updates.agreed.interrupted and self.idle

    @property
    def accumulating(self) -> bool:
        """Whether batches have run since the last :meth:`complete` or :meth:`drop`."""
        return self.stages[0].next_forward > self.updates.open.first

    @property
    def next_batch_may_use_newest(self) -> bool:
        """Whether some microbatches of the next batch, in mini-batch t, may run on W_t (weights before update t)."""
        return self.schedule.staleness == "least" or self.schedule.pipeline_rule.all_at_newest(self.mini_batch)

    def run(self, batch: Any, step: Step, after_update: Callable[[], object] = lambda: None) -> BatchOutput:
        """Run a training batch: its forwards, and the backwards (also of earlier batches) and update that are due.

        Args:
            batch: the batch on the first and the last stage; ignored on stages between them.
            step: the user's step, called with a microbatch and its weight.
            after_update: function called after an update that was due between two microbatches; it may change weights.
        """
        with preserved_generators(self.runner.device):
            return self._run_all(lambda stage: stage.iter_batch(batch, self.host_batch, step, after_update))[-1]

    def drop(self) -> None:
        """Discard the gradient of the batches since the last :meth:`complete`.

        The next batch then begins the same mini-batch anew.
        """
        for stage in self.stages if self.accumulating else ():
            stage.drop()

    def complete(self, hyper_parameters: HyperParameters | None = None, note: Any = None) -> None:
        """Complete the mini-batch: all batches since the last call share one update.

        Args:
            hyper_parameters: hyper-parameters of the optimizer's groups for this update.
            note: value that the strategy receives with this update.
        """
        with preserved_generators(self.runner.device):
            self._run_all(lambda stage: stage.iter_complete(hyper_parameters, note))

    def apply_due(self) -> list[Update]:
        """Apply the updates that are due; return all updates applied since the last call, in order.

        Of several stages in this process, the first stage's updates are returned.

        Raises:
            NonFiniteGradientError: a gradient is not finite under ``nonfinite_gradients="stop"``; raised on every rank.
        """
        return self._run_all(StageEngine.iter_due)[0]

    def drain(self) -> list[Update]:
        """Finish all microbatches in flight and apply the updates of all complete mini-batches; a collective call.

        Later mini-batches run on the same weight versions as without the drain. The result is as in :meth:`apply_due`.

        Raises:
            ProtocolError: the previous stage has sent a further batch.
        """
        with (
            torch.inference_mode(False), torch.enable_grad(), preserved_generators(self.runner.device),
            self.runner.span(Activity.DRAIN, self.mini_batch), ExitStack() as modes,
        ):  # fmt: skip
            for stage in self.stages:
                modes.enter_context(stage.modes_of_forwards())
            return self._run_all(StageEngine.iter_drain)[0]

    def evaluate(self, batch: Any, step: Step, purpose: str = "evaluate") -> BatchOutput:
        """Run a batch forward on the newest weights, pipelined over microbatches and batches.

        Args:
            batch: the batch on the first and the last stage; ignored on stages between them.
            step: the user's step, called with a microbatch and its weight.
            purpose: name from which random seeds are derived.
        """
        if not self.idle:
            raise RuntimeError("evaluation needs a drained pipeline: call drain() first")
        flights = []
        self.weights.adopt()
        newest, weights = self.weights.newest, self.weights.for_evaluation()
        trace, self.runner.trace = self.runner.trace, None  # the microbatches' numbers are not those of training
        try:
            slots = self.runner.slots(batch, self.settings.microbatches, self.host_batch)
            with preserved_generators(self.runner.device):
                for slot in slots:
                    task = ForwardTask(
                        self.evaluated, newest, weights, slot.content, slot.fingerprint, step, purpose, slot.weight
                    )
                    flights.append(self.runner.forward(task))
                    self.evaluated += 1
        except Exception as error:
            self.runner.announce_failure(self.evaluated, error)
            raise
        finally:
            self.runner.trace = trace
        if self.runner.transport is not None:
            # Limit how far later stages lag, since activations sent to them take memory.
            self.runner.transport.wait_for_stage_after(backlog=4 * self.settings.microbatches)
        # Predictions must include the results of microbatches of weight 0, such as those with padding only.
        had = [flight for flight, slot in zip(flights, slots) if slot.content is not None]
        return BatchOutput([flight.result for flight in had], [flight.weight for flight in had])

    def end_evaluation(self) -> None:
        """Check that the previous stage has evaluated the same batches; collective over the stages of a replica.

        Raises:
            ProtocolError: the previous stage has sent a further batch.
        """
        if self.runner.transport is not None:
            self.runner.transport.announce_end()
            self.runner.transport.expect_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of a drained engine; for its weights see :meth:`WeightVersions.older`."""
        if not self.idle:
            raise RuntimeError("only a drained pipeline can return its state: call drain() first")
        return {
            "mini_batch": self.mini_batch, "microbatch": self.next_forward, "version": self.weights.newest,
            "norm": self.updates.last_norm, "evaluated": self.evaluated,
        }  # fmt: skip

    def load_state_dict(
        self, state: Mapping[str, Any], older: Mapping[str, Tensor], masters: Mapping[str, Tensor]
    ) -> None:
        """Load counters, older weights and masters (fp32 weights that the optimizer updates), after the parameters."""
        self.drop()
        for stage in self.stages:
            stage.continue_at(state["microbatch"], state["mini_batch"], state.get("norm"))
        self.evaluated = state.get("evaluated", 0)
        self.weights.restore(state["version"], older, masters)

    def close(self) -> None:
        """Close the connections to the neighbours, after they have received everything."""
        if self.runner.transport is not None:
            self.runner.transport.close()

    def _run_all(self, actions: Callable[[StageEngine], Actions[T]]) -> list[T]:
        """Run the actions of each stage in this process, and return each stage's result."""
        own = actions(self.stages[0])
        while True:
            try:
                next(own)  # may wait for other stages
            except StopIteration as end:
                return [end.value]
