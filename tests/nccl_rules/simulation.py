"""A pipeline over NCCL, simulated on the engine's own action lists: who waits for whom, and nothing else.

Three files: ``devices.py`` has streams and hardware queues, ``directions.py`` the protocol by which tensors change
hands, and this one the hosts, who do what ``engine.py``, ``transport.py`` and ``update_queue.py`` do: the actions of a
``Schedule``; frames, read in the order in which they were written; control messages, which all exchange; all-reduces of
replicas; updates; drains. At any of its moments (before and after each action, before it asks for a tensor, before what
it has computed leaves) a host may wait for its whole device: no wait for a device can be for more.

Each simulation draws anew how long everything takes, how fast each host is, and whether its waits keep other threads of
its process from launching, as a lock of the driver would. Between any two things that a thread does, others may go on.

Not modelled: the very first microbatch, after which all hosts meet; evaluation, which has forwards alone; tied weights
and loaded batches, which travel between hosts; several buckets per all-reduce; waits that keep the interpreter, so that
no other thread of the process runs. The stream of a way and that of its communicator are one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import NamedTuple

from lightning_asyncpp.core.schedule import Kind, Schedule, Slack, Staleness, StalenessRule
from tests.nccl_rules.devices import Clock, Meeting, Operation, Queues, Signal, Thread
from tests.nccl_rules.directions import Direction, Process, Waits

FORWARD_TIME, BACKWARD_TIME, UPDATE_TIME = 1.0, 2.0, 0.3
STREAMS = ("compute", "from_before", "to_before", "to_next", "from_next")
REPLICAS = "replicas"  # the stream of all-reduces
ACTIVATION, GRADIENT, END = "activation", "gradient", "end"


class Case(NamedTuple):
    """What is run: ``runs`` counts mini-batches, and a drain ends each run; ``slowdown`` is that of ``Device``."""

    stages: int
    microbatches: int
    lookahead: int
    runs: tuple[int, ...] = (2, 1)
    replicas: int = 1
    synchronous_start: int = 0
    staleness: Staleness = "uniform"
    slack: Slack = 0
    slowdown: float = 0.0


class Host(Process):
    """The training thread of one rank."""

    def __init__(self, simulation: Simulation, stage: int, queue_of: Queues, waits: Waits) -> None:
        case = simulation.case
        super().__init__(simulation.clock, queue_of, waits, case.slowdown)
        self.simulation, self.case, self.stage = simulation, case, stage
        rule = StalenessRule(1, case.synchronous_start)
        self.schedule = Schedule(stage, case.stages, case.lookahead, rule, case.staleness, case.slack)
        self.to_next: Direction | None = None
        self.from_next: Direction | None = None
        self.to_before: Direction | None = None
        self.from_before: Direction | None = None
        self.is_done, self.doing = False, "nothing"
        self._forwards = self._backwards = 0  # how many are done
        self._closed: deque[int] = deque()  # mini-batches without an update
        self._stepped: set[int] = set()  # of those, whose update came before all had agreed
        self._norms: dict[int, Operation] = {}  # mini-batch -> what the device has to do until its norm is there
        self._reductions: dict[int, Operation] = {}  # mini-batch -> its all-reduce
        self._counts: dict[int, Operation] = {}  # and that of its samples, where a stage steps ahead
        self._launched: set[int] = set()  # mini-batches whose control message was sent
        self._agreed: dict[int, Signal] = {}  # mini-batch -> that those of all ranks are there

    def run(self) -> Thread:
        """All runs of the case, as ``Engine`` runs them."""
        for end in itertools.accumulate(self.case.runs):
            while self._forwards < end * self.case.microbatches:
                yield from self._mini_batch(self._forwards // self.case.microbatches)
            yield from self._drain()
        yield from self.device.wait()
        self.is_done = True

    def _mini_batch(self, t: int) -> Thread:
        first, count = self._forwards, self.case.microbatches
        do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.UPDATE: self._apply_held}
        for action in self.schedule.batch(first, count, self._backwards, t, first):
            yield from do[action.kind](action.index)
        self._closed.append(t)
        if flushes := self.schedule.pipeline_rule.flushes(t):
            yield from self._finish_backwards()
        yield from self._launch_complete()
        while self._closed and self._closed[0] < t + flushes:
            yield from self._apply(self._closed.popleft())
        if self._closed and self.schedule.stage_rule.held == 0 and self.schedule.steps_ahead(t):
            yield from self._step_ahead(t)

    def _drain(self) -> Thread:
        if self.to_next is not None:
            self.to_next.frames.write(END, self._forwards)
        yield from self._finish_backwards()
        yield from self._launch_complete()
        if self.from_before is not None:
            yield from self._frame(self.from_before, END, self._forwards)
        while self._closed:
            yield from self._apply(self._closed.popleft())
        for direction in (self.to_before, self.to_next):
            if direction is not None:
                yield from direction.settle()

    def _forward(self, k: int) -> Thread:
        self.doing = f"F{k}"
        yield from self.moment(k)
        if self.from_before is not None:
            yield from self._frame(self.from_before, ACTIVATION, k)
            yield from self.from_before.take(k)
        self.device.launch("compute", duration=FORWARD_TIME)
        yield from self.moment(k)
        if self.to_next is not None:
            yield from self.to_next.put(k)
            self.to_next.frames.write(ACTIVATION, k)
        self._forwards = k + 1
        yield from self.moment(k)
        yield from self._poll()

    def _backward(self, k: int) -> Thread:
        self.doing = f"B{k}"
        yield from self.moment(k)
        if self.from_next is not None:
            yield from self._frame(self.from_next, GRADIENT, k)
            yield from self.from_next.take(k)
        self.device.launch("compute", duration=BACKWARD_TIME)
        t, rest = divmod(k + 1, self.case.microbatches)
        if rest == 0 and t - 1 in self._closed:
            yield from self._reduce(t - 1)  # its buckets leave during the last backward
        yield from self.moment(k)
        if self.to_before is not None:
            yield from self.to_before.put(k)
            self.to_before.frames.write(GRADIENT, k)
        self._backwards = k + 1
        yield from self.moment(k)
        yield from self._launch_complete()

    def _finish_backwards(self) -> Thread:
        for action in self.schedule.drain(self._backwards, self._forwards):
            yield from self._backward(action.index)

    # -- messages of hosts --

    def _frame(self, direction: Direction, kind: str, index: int) -> Thread:
        """``Transport._next``: the next frame must be this one."""
        frame = yield from direction.frames.read()
        assert frame == (kind, index), f"{frame} came, and not {kind} {index}"

    # -- updates --

    def _launch_complete(self) -> Thread:
        """``UpdateQueue.launch_complete``."""
        for t in self._closed:
            if self._backwards >= (t + 1) * self.case.microbatches and t not in self._launched:
                if self.case.replicas == 1:
                    self._norms.setdefault(t, self.device.newest["compute"])
                else:
                    if t not in self._reductions:
                        yield from self._reduce(t)
                    if self.schedule.steps_ahead(t) and t not in self._counts:
                        self.device.launch(REPLICAS, self.device.newest["compute"])
                        yield self.step
                        meeting = self.simulation.counts[self.stage, t]
                        self._counts[t] = self.device.launch(REPLICAS, meeting=meeting)
                        yield self.step
        yield from self._poll()

    def _poll(self) -> Thread:
        """``UpdateQueue.poll``: what is known, with replicas what is reduced, sends its message."""
        for t, operation in (self._reductions or self._norms).items():
            if t not in self._launched:
                if not operation.is_set:
                    return
                yield from self._launch_message(t)

    def _reduce(self, t: int) -> Thread:
        """Launch the all-reduce of the gradients."""
        if self.case.replicas > 1:
            self.device.launch(REPLICAS, self.device.newest["compute"])
            yield self.step
            meeting = self.simulation.reductions[self.stage, t]
            self._reductions[t] = self.device.launch(REPLICAS, meeting=meeting)
            yield self.step

    def _launch_message(self, t: int) -> Thread:
        """``MiniBatch._send_message``: the norm, for which the host waits, and the control message."""
        self._launched.add(t)
        if t in self._reductions:
            self.device.launch("compute", self._reductions[t])
            yield self.step
        yield self._norms.get(t, self.device.newest["compute"])
        yield self.step
        self._agreed[t] = Signal(self.clock)
        self.simulation.exchanges[t].start(self._agreed[t].set)

    def _apply_held(self, t: int) -> Thread:
        """``UpdateQueue.apply_held``, in the middle of a batch."""
        if self._closed and t not in self._stepped:
            assert list(self._closed) == [t]
            if self.schedule.steps_ahead(t):
                yield from self._step_ahead(t)
            else:
                yield from self._apply(self._closed.popleft())

    def _step_ahead(self, t: int) -> Thread:
        """``UpdateQueue._step_ahead``: wait for the replicas, if there are any, and not for the other stages."""
        self.doing = f"U{t} ahead"
        self._stepped.add(t)
        if self.case.replicas > 1:  # their samples are counted together
            if t not in self._launched:
                yield from self._launch_message(t)
            self.device.launch("compute", self._counts[t])
            yield self.device.newest["compute"]
        self.device.launch("compute", duration=UPDATE_TIME)
        yield from self.moment(self._forwards)

    def _apply(self, t: int) -> Thread:
        """``UpdateQueue._apply``, once all ranks have said what they have to."""
        if self.schedule.steps_ahead(t) and t not in self._stepped:
            yield from self._step_ahead(t)
        self.doing = f"U{t}"
        if t not in self._launched:
            yield from self._launch_message(t)
        yield self._agreed[t]
        if t not in self._stepped:
            self.device.launch("compute", duration=UPDATE_TIME)
        yield from self.moment(self._forwards)


class Simulation:
    """All hosts of a case.

    Args:
        case: what they run.
        queue_of: stream -> its hardware queue.
        waits: when hosts wait for their devices.
        seed: of all that is drawn.
        direction: the protocol.
    """

    def __init__(
        self, case: Case, queue_of: Queues, waits: Waits, seed: int = 0, direction: type[Direction] = Direction
    ) -> None:
        self.case, clock = case, Clock(seed)
        self.clock = clock
        self.reductions = defaultdict[tuple[int, int], Meeting](lambda: Meeting(clock, case.replicas))
        self.counts = defaultdict[tuple[int, int], Meeting](lambda: Meeting(clock, case.replicas))
        self.exchanges = defaultdict[int, Meeting](lambda: Meeting(clock, case.replicas * case.stages))
        self.hosts: list[Host] = []
        for _ in range(case.replicas):
            pipeline = [Host(self, stage, queue_of, waits) for stage in range(case.stages)]
            for before, after in itertools.pairwise(pipeline):
                before.to_next = after.from_before = direction(before, after, "to_next", "from_before")
                after.to_before = before.from_next = direction(after, before, "to_before", "from_next")
            self.hosts += pipeline

    def run(self) -> list[str]:
        """Run to the end, or until nothing moves any more; returns which hosts are stuck, and where."""
        for host in self.hosts:
            self.clock.soon(host.run())
        self.clock.run()
        return [f"stage {host.stage} at {host.doing}" for host in self.hosts if not host.is_done]
