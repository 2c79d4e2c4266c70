"""Runs the schedule on one stage: forwards, backwards, and the updates that follow them within the next mini-batch.

What may wait for other stages comes in two forms. :meth:`Engine.run`, :meth:`Engine.close`, :meth:`Engine.apply_due`
and :meth:`Engine.drain` wait, as a process with one stage does. Each has a twin, ``iter_...``, that yields every action
right before it runs it: with several stages in one process (``local.py``) another stage goes on where one would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import BatchOutput, Slot, Step, UserHooks
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.ranks.agreement import agree_on_error, together
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import Flight, StageBeforeFailedError, Task, stage_runner
from lightning_asyncpp.core.schedule import Action, Kind, Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.trace import Beside
from lightning_asyncpp.core.updates.mini_batch import HyperParameters, Update
from lightning_asyncpp.core.updates.update_queue import UpdateQueue
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
Actions = Generator[Action, None, T]
"""Actions, each yielded right before it runs, and what they return at the end."""


class Engine:
    """One stage of a running pipeline.

    Per batch: :meth:`run`; when the mini-batch is complete (once per batch without accumulation) :meth:`close`, then
    :meth:`apply_due`. :meth:`drain` finishes what is in flight, at any moment, without changing the trajectory.

    Args:
        stage: this rank's units.
        mesh: this rank's place, connected.
        settings: microbatches, lookahead, delay, policies.
        seed: the run's seed.
        device: where tensors live.
        hooks: the user's side.
        timeout: seconds that a wait for a neighbour may take; default: half an hour.
        transport: messages with the neighbours, where they are connected already.

    Attributes:
        host_batch: to be told of batches that are moved to the device.
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
        self.next_forward = 0
        self.next_backward = 0
        self.evaluated = 0
        self.host_batch = HostBatch()
        self._drained = 0
        self._checked = False
        self._modules = list(stage.modules())
        self._in_evaluation: set[nn.Module] = set()  # in the last batch; the others were in training
        self._flights: dict[int, Flight] = {}

    @property
    def parts(self) -> Sequence[Engine]:
        """The engines of the stages that this process runs."""
        return [self]

    def schedules(self) -> list[Schedule]:
        """Those of all stages, of which ``schedule`` is this one's."""
        return [self.stage.whole.schedule(self.settings, stage) for stage in range(self.mesh.num_stages)]

    @property
    def mini_batch(self) -> int:
        """Index t of the mini-batch that the next batch belongs to."""
        return self.updates.open.index

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and no update is outstanding."""
        return self.next_backward == self.next_forward and not self.updates.closed

    @property
    def drained(self) -> bool:
        """Whether nothing was run since the last drain; the last stage is often :attr:`idle` while others are not."""
        return self.idle and self._drained == self.next_forward

    def ended_as_agreed(self) -> bool:
        """Return whether all ranks have agreed to end here, and nothing is in flight on this one."""
        return self.updates.agreed.interrupted and self.idle

    @property
    def accumulating(self) -> bool:
        """Whether batches ran that no :meth:`close` has given an update yet."""
        return self.next_forward > self.updates.open.first

    @property
    def at_newest(self) -> bool:
        """Whether microbatches of the open mini-batch may run at the weights that its own update is applied to."""
        return self.schedule.staleness == "least" or self.schedule.pipeline_rule.at_newest(self.mini_batch)

    def run(self, batch: Any, step: Step, afterwards: Callable[[], object] = lambda: None) -> BatchOutput:
        """Run a training batch: all of its forwards, and the backwards that are due by then, also of earlier batches.

        Args:
            batch: the batch, on the first and the last stage; ignored on the others.
            step: the user's step, called with a microbatch and its weight.
            afterwards: called when an update has been applied between two microbatches; it may still change weights.
        """
        with preserved_generators(self.runner.device):
            return finish(self.iter_batch(batch, step, afterwards))

    def iter_batch(
        self, batch: Any, step: Step, afterwards: Callable[[], object] = lambda: None
    ) -> Actions[BatchOutput]:
        """Run a training batch action by action; arguments as for :meth:`run`."""
        count = self.settings.microbatches
        slots = self._slots(batch) if self._checked else together(self.mesh, partial(self._slots, batch))
        self._in_evaluation = {module for module in self._modules if not module.training}
        if not self.updates.closed:  # nothing is outstanding: hooks may have changed weights
            self.weights.adopt()
        first = self.next_forward
        flights: list[Flight] = []
        if not self._checked:
            flights.append((yield from self._iter_checked(first, slots[0], step)))
        done, opened, updates = len(flights), self.updates.open, self.updates
        for action in self.schedule.batch(first + done, count - done, self.next_backward, opened.index, opened.first):
            yield action
            if action.kind is Kind.UPDATE:
                updates.apply_held()
                afterwards()
            elif action.kind is Kind.FORWARD:
                flights.append(self._forward(action.index, slots[action.index - first], step))
            else:
                self._backward(action.index)
            if updates.busy:
                updates.poll(self.next_backward)
        landed = [flight for flight in flights if flight.weight]
        return BatchOutput([flight.result for flight in landed], [flight.weight for flight in landed])

    def drop(self) -> None:
        """Throw away the gradient of the batches since the last :meth:`close`: they belong to no update.

        What follows runs on the weights that it would have run on anyway.
        """
        if self.accumulating:
            if self.runner.transport is not None:
                self.runner.transport.announce_drop(self.next_forward)
            self.updates.drop_open(self.next_forward, self.next_backward)

    def close(self, hyper_parameters: HyperParameters | None = None, note: Any = None) -> None:
        """Declare the mini-batch complete: the batches since the last close share one update.

        Args:
            hyper_parameters: of every group of the optimizer, for its update.
            note: what the strategy wants to know at its update.
        """
        with preserved_generators(self.runner.device):
            finish(self.iter_close(hyper_parameters, note))

    def iter_close(self, hyper_parameters: HyperParameters | None = None, note: Any = None) -> Actions[None]:
        """Declare the mini-batch complete; with a flush, finish its backwards. Arguments as for :meth:`close`."""
        flushes = self.schedule.pipeline_rule.flushes(self.mini_batch)
        self.updates.close(self.next_forward, hyper_parameters, note)
        if flushes:
            yield from self._iter_backwards()
        self.updates.poll(self.next_backward)

    def apply_due(self) -> list[Update]:
        """Apply the updates whose time has come; return these, and those that were applied within the last batch.

        Raises:
            NonFiniteGradientError: under the policy ``"stop"``, on every rank.
        """
        return finish(self.iter_due())

    def iter_due(self) -> Actions[list[Update]]:
        """Apply the updates whose time has come, one by one; see :meth:`apply_due`."""
        yield from self.updates.iter_due()
        return self.updates.take_applied()

    def drain(self) -> list[Update]:
        """Finish everything in flight and apply every update of a complete mini-batch; collective.

        Only the clock changes: the next mini-batch runs on the weights that it would have run on anyway.

        Raises:
            ProtocolError: the stage before has a further batch.
        """
        with (
            torch.inference_mode(False), torch.enable_grad(), self.modes_of_forwards(),
            preserved_generators(self.runner.device), self.runner.span(Beside.DRAIN, self.mini_batch),
        ):  # fmt: skip
            return finish(self.iter_drain())

    def iter_drain(self) -> Actions[list[Update]]:
        """Finish everything in flight, action by action; see :meth:`drain`."""
        transport = self.runner.transport
        if transport is not None:
            transport.announce_end()  # before this stage waits for one that may be waiting for a further batch
        yield from self._iter_backwards()
        self.updates.poll(self.next_backward)
        if transport is not None:
            transport.expect_end()  # what the stage before may still need on its way there has been sent
        yield from self.updates.iter_all()
        updates = self.updates.take_applied()
        if transport is not None:
            transport.settle()
        self._drained = self.next_forward
        return updates

    def evaluate(self, batch: Any, step: Step, purpose: str = "evaluate") -> BatchOutput:
        """Run a batch forward on the newest weights; stages work on different microbatches and batches at a time.

        Args:
            batch: the batch, on the first and the last stage; ignored on the others.
            step: the user's step, called with a microbatch and its weight.
            purpose: what random numbers are derived from.
        """
        if not self.idle:
            raise RuntimeError("evaluation needs a drained pipeline: call drain() first")
        flights = []
        self.weights.adopt()
        newest, weights = self.weights.newest, self.weights.for_evaluation()
        try:
            slots = self._slots(batch)
            with preserved_generators(self.runner.device), self.runner.untraced():
                for slot in slots:
                    task = Task(self.evaluated, newest, weights, slot.content, slot.mark, step, purpose, slot.weight)
                    flights.append(self.runner.forward(task))
                    self.evaluated += 1
        except Exception as error:
            self.runner.announce_failure(self.evaluated, error)
            raise
        if self.runner.transport is not None:
            # The stages behind may lag by a few batches, not by more: what was sent to them takes memory.
            self.runner.transport.wait_for_stage_after(backlog=4 * self.settings.microbatches)
        # What has samples but no weight (padding alone) has a result nevertheless, which a prediction must not lack.
        had = [flight for flight, slot in zip(flights, slots) if slot.content is not None]
        return BatchOutput([flight.result for flight in had], [flight.weight for flight in had])

    def end_evaluation(self) -> None:
        """Check that the stage before has evaluated the same batches; collective over the stages of a replica.

        Raises:
            ProtocolError: it has a further one.
        """
        if self.runner.transport is not None:
            self.runner.transport.announce_end()
            self.runner.transport.expect_end()

    def state_dict(self) -> dict[str, Any]:
        """Counters of a drained engine; the weights are the module's, the older ones :meth:`WeightVersions.older`'s."""
        if not self.idle:
            raise RuntimeError("the state of a pipeline can be taken only when it is drained")
        return {
            "mini_batch": self.mini_batch, "microbatch": self.next_forward, "version": self.weights.newest,
            "norm": self.updates.last_norm, "evaluated": self.evaluated,
        }  # fmt: skip

    def load_state_dict(
        self, state: Mapping[str, Any], older: Mapping[str, Tensor] | None, masters: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take up counters, the older weights and the masters; the parameters were loaded before."""
        self.next_forward = self.next_backward = self._drained = state["microbatch"]
        self.updates.begin_at(state["mini_batch"], state["microbatch"])
        self.updates.last_norm = state.get("norm")
        self.evaluated = state.get("evaluated", 0)
        self.weights.restore(state["version"], older, masters)

    def set_seed(self, seed: int) -> None:
        """Go on with the seed of another run."""
        self.runner.seed = seed

    def has_no_backward(self, k: int) -> bool:
        """Return whether microbatch ``k``, which is in flight, is an empty slot or has no weight."""
        return not self._flights[k].weight

    def release(self) -> None:
        """Take back what the engine put on the parameters."""
        self.weights.release_masters()

    def close_connections(self) -> None:
        """Let go of the connections with the neighbours, who have got everything."""
        if self.runner.transport is not None:
            self.runner.transport.close()

    def _slots(self, batch: Any) -> list[Slot]:
        return self.runner.slots(batch, self.settings.microbatches, self.host_batch)

    def _forward(self, k: int, slot: Slot, step: Step) -> Flight:
        opened = self.updates.open
        version = self.schedule.stage_rule.version(opened.index, k - opened.first)
        task = Task(k, version, self.weights.leaves(version), slot.content, slot.mark, step, weight=slot.weight)
        flight = self._flights[k] = self.runner.forward(task)
        self.next_forward = k + 1
        opened.weight += flight.weight
        if flight.weight and flight.beside.statistics:
            for layer, counts in flight.beside.take_statistics().items():
                opened.counted.add(layer, counts)
        return flight

    def _backward(self, k: int) -> None:
        flight = self._flights.pop(k)
        weights = self.weights.sum_at(flight.version)
        if self.updates.reduces:
            with self.updates.reducing(k, weights):
                self.runner.backward(flight, weights)
        else:
            self.runner.backward(flight, weights)
        flight.outputs = flight.inputs = ()
        flight.beside.losses = []
        self.next_backward = k + 1

    def _iter_checked(self, k: int, slot: Slot, step: Step) -> Actions[Flight]:
        """Run the very first microbatch forward and backward, and let every rank raise what any of them found."""
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
            self.updates.poll(self.next_backward)
        except ConfigurationError as caught:
            error = caught
            self.runner.send_input_gradients(flight)
        agree_on_error(self.mesh, error)
        self._checked = True
        return flight

    def _iter_backwards(self) -> Actions[None]:
        """Run the backwards of everything in flight."""
        for action in self.schedule.drain(self.next_backward, self.next_forward):
            yield action
            self._backward(action.index)
            if self.updates.busy:
                self.updates.poll(self.next_backward)

    @contextmanager
    def modes_of_forwards(self) -> Iterator[None]:
        """Have layers in the modes in which the forwards ran: what a backward computes again depends on them."""
        others = [m for m in self._modules if m.training == (m in self._in_evaluation)]
        for module in others:
            module.training = not module.training
        try:
            yield
        finally:
            for module in others:
                module.training = not module.training


def finish(actions: Actions[T]) -> T:
    """Run actions to their end, waiting where they wait, and return what they return."""
    while True:
        try:
            next(actions)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
