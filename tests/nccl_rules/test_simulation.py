"""No order of waits, and no way in which streams share hardware queues, makes a pipeline hang; what would is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from random import Random

import pytest

from lightning_asyncpp.core.schedule import Slack, Staleness, largest_lookahead
from tests.nccl_rules import directions, simulation
from tests.nccl_rules.devices import Clock, Device, Meeting, Operation, Queues, Thread
from tests.nccl_rules.directions import Direction, Process, Waits
from tests.nccl_rules.simulation import REPLICAS, STREAMS, Case, Host, Simulation

MOST_STAGES, MOST_MICROBATCHES = 8, 16
PAIRS = list(itertools.combinations(STREAMS, 2))

FEW = [
    stages if stages in (2, 3, 5) else pytest.param(stages, marks=pytest.mark.slow)
    for stages in range(2, MOST_STAGES + 1)
]

WAITS: dict[str, Waits] = {
    "no-waits": lambda random, k: False,
    "waits-everywhere": lambda random, k: True,
    "random-waits": lambda random, k: random.random() < 0.1,
    "waits-together": lambda random, k: k % 5 == 3,
}
QUEUES: dict[str, Queues] = {"own-queues": lambda stream: stream, "one-queue": lambda stream: "shared"}


def sharing(pair: tuple[str, ...]) -> Queues:
    return lambda stream: "shared" if stream in pair else stream


def cases(stages: int, replicas: int = 1) -> Iterator[Case]:
    """All numbers of microbatches, with no lookahead, P - 1 and the largest."""
    for microbatches in range(stages, MOST_MICROBATCHES + 1):
        most = largest_lookahead(stages, microbatches, replicas)
        for lookahead in sorted({0, min(stages - 1, most), most}):
            yield Case(stages, microbatches, lookahead, replicas=replicas)


def assert_none_hangs(some: Iterable[Case], queues: Queues, waits: Waits, seed: int = 0) -> None:
    for case in some:
        assert not Simulation(case, queues, waits, seed).run(), case


# -- the protocol ------------------------------------------------------------------------------------------------------


# Every two of these values meet; the slow tests have all three.
MEETING = [
    pytest.param(
        stages, queues, waits, marks=[] if stages in (2, 3, 5) and (stages // 2 + j + k) % 2 else pytest.mark.slow
    )
    for stages in range(2, MOST_STAGES + 1)
    for j, queues in enumerate(QUEUES)
    for k, waits in enumerate(["no-waits", "waits-everywhere", "random-waits"])
]


@pytest.mark.parametrize(("stages", "queues", "waits"), MEETING)
def test_it_does_not_hang(stages: int, queues: str, waits: str) -> None:
    assert_none_hangs(cases(stages), QUEUES[queues], WAITS[waits], seed=stages)


@pytest.mark.parametrize("stages", FEW)
def test_it_does_not_hang_where_all_wait_together(stages: int) -> None:
    for case, queues in zip(cases(stages), itertools.cycle(QUEUES.values())):
        assert_none_hangs([case], queues, WAITS["waits-together"], seed=stages)


RULES: list[tuple[Staleness, Slack]] = [("least", 0), ("least", 1), ("least", 2), ("least", "exact")]
SLOWDOWN = 0.35  # of matrix products beside a kernel that spins on one multiprocessor of an H200


def with_staleness(case: Case, staleness: Staleness, slack: Slack) -> Case:
    """As settings resolve it: a stage that steps ahead needs the norm of a mini-batch without delay."""
    start = int(staleness == "least" and slack != "exact")
    return case._replace(staleness=staleness, slack=slack, synchronous_start=start, runs=(3, *case.runs[1:]))


@pytest.mark.parametrize("stages", FEW)
def test_it_does_not_hang_where_two_streams_share_a_queue(stages: int) -> None:
    """Another pair in every case; the slow tests have all of them in all cases."""
    for number, case in enumerate(cases(stages), start=stages):
        waits = list(WAITS.values())[number % len(WAITS)]
        rule = ("least", 0) if number // len(PAIRS) % 2 else ("uniform", 0)
        case = with_staleness(case, *rule)._replace(slowdown=SLOWDOWN)
        assert_none_hangs([case], sharing(PAIRS[number % len(PAIRS)]), waits, seed=number)


@pytest.mark.slow
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("staleness", ["least", "uniform"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_it_does_not_hang_with_any_pair(pair: tuple[str, str], staleness: Staleness, waits: str) -> None:
    for stages in range(2, MOST_STAGES + 1):
        some = [with_staleness(case, staleness, 0)._replace(slowdown=SLOWDOWN) for case in cases(stages)]
        assert_none_hangs(some, sharing(pair), WAITS[waits])


@pytest.mark.parametrize(
    ("queues", "waits"),
    [
        ("own-queues", "random-waits"),
        ("one-queue", "waits-everywhere"),
        pytest.param("own-queues", "waits-everywhere", marks=pytest.mark.slow),
        pytest.param("one-queue", "random-waits", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("stages", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (2, 4, 5, 6, 7, 8))])
def test_replicas_do_not_hang(stages: int, queues: str, waits: str) -> None:
    assert_none_hangs(cases(stages, replicas=2), QUEUES[queues], WAITS[waits])


@pytest.mark.parametrize("waits", [pytest.param("waits-everywhere", marks=pytest.mark.slow), "random-waits"])
@pytest.mark.parametrize(
    ("rule", "replicas"),
    [
        pytest.param(rule, replicas, marks=[] if (number + replicas) % 2 else pytest.mark.slow, id=f"{rule}-{replicas}")
        for number, rule in enumerate(RULES)
        for replicas in (1, 2)
    ],
)
@pytest.mark.parametrize("stages", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (2, 4, 5, 6, 7, 8))])
def test_updates_within_a_batch_do_not_hang(
    stages: int, rule: tuple[Staleness, Slack], replicas: int, waits: str
) -> None:
    some = [with_staleness(case, *rule) for case in cases(stages, replicas)]
    for case, queues in zip(some, itertools.cycle(QUEUES.values())):
        assert_none_hangs([case], queues, WAITS[waits], seed=stages)


def check_at_random(seed: int) -> None:
    """Any drains and staleness, up to three replicas, and any streams that share queues."""
    random = Random(seed)
    stages, replicas = random.randint(2, MOST_STAGES), random.choice((1, 1, 2, 3))
    microbatches = random.randint(stages, MOST_MICROBATCHES)
    lookahead = random.randint(0, largest_lookahead(stages, microbatches, replicas))
    runs = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    case = Case(stages, microbatches, lookahead, runs, replicas)
    case = with_staleness(case, *random.choice([("uniform", 0), *RULES]))._replace(runs=runs)
    number = random.randint(1, len(STREAMS))
    queue_of = {stream: str(random.randrange(number)) for stream in (*STREAMS, REPLICAS)}
    share = random.choice((0.001, 0.03, 0.3))
    assert_none_hangs([case], queue_of.__getitem__, lambda random, k: random.random() < share, seed)


@pytest.mark.parametrize("seed", range(0, 50, 10))
def test_random_cases_do_not_hang(seed: int) -> None:
    for each in range(seed, seed + 10):
        check_at_random(each)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 3000, 100))
def test_more_random_cases_do_not_hang(seed: int) -> None:
    for each in range(seed, seed + 100):
        check_at_random(each)


# -- what the simulation can tell --------------------------------------------------------------------------------------


class SendsAtOnce(Direction):
    """A send is launched where its tensor is made, and the receive when it is announced."""

    def put(self, k: int) -> Thread:
        yield from self.send(k, self.sender.device.newest["compute"])

    def take(self, k: int) -> Thread:
        yield from self.receiver.moment(k)
        yield from self.receive(k)


class ReceivesEarly(SendsAtOnce):
    """The receive of a gradient is launched with the activation, long before the gradient is made."""

    def __init__(self, sender: Process, receiver: Process, leaves_on: str, arrives_on: str) -> None:
        super().__init__(sender, receiver, leaves_on, arrives_on)
        self.early: dict[int, Operation] = {}

    def put(self, k: int) -> Thread:
        assert isinstance(self.sender, Host)
        back = self.sender.from_next
        if self.leaves_on == "to_next" and isinstance(back, ReceivesEarly):
            back.early[k] = back.launch_receive(k)
        yield from super().put(k)

    def take(self, k: int) -> Thread:
        if k not in self.early:
            yield from super().take(k)
        else:
            self.receiver.device.launch("compute", self.early.pop(k))


class AllocatesLate(Direction):
    """The memory for a tensor is allocated after the sender has launched its send."""

    def take(self, k: int) -> Thread:
        self.asked.write("take", k)
        yield from self.answered.read()
        yield from self.receiver.moment(k)
        yield from self.receive(k)


@pytest.mark.parametrize("case", [Case(3, 3, 0), Case(4, 8, 3), Case(8, 16, 7)], ids=["3", "4", "8"])
@pytest.mark.parametrize(
    ("broken", "queues", "waits"),
    [
        (SendsAtOnce, "own-queues", "waits-everywhere"),
        (SendsAtOnce, "own-queues", "waits-together"),
        (ReceivesEarly, "own-queues", "waits-everywhere"),
        (ReceivesEarly, "own-queues", "waits-together"),
        (ReceivesEarly, "one-queue", "no-waits"),
        (AllocatesLate, "own-queues", "waits-everywhere"),
    ],
)
def test_what_breaks_the_rule_hangs(broken: type[Direction], case: Case, queues: str, waits: str) -> None:
    """And seems to work where nobody waits and no queue is shared."""
    assert any(Simulation(case, QUEUES[queues], WAITS[waits], seed, broken).run() for seed in range(5))
    assert not Simulation(case, QUEUES["own-queues"], WAITS["no-waits"], 0, broken).run()


def test_two_stages_never_noticed_an_early_receive() -> None:
    for queues, waits in itertools.product(QUEUES.values(), WAITS.values()):
        assert not Simulation(Case(2, 4, 1), queues, waits, direction=ReceivesEarly).run()


def test_stages_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hosts ahead of their devices, hardly longer than one stage computes: what is simulated is a pipeline."""
    monkeypatch.setattr(directions, "HOST_TIMES", (0.001,))
    case = Case(4, 16, 3, runs=(6,))
    pipeline = Simulation(case, QUEUES["own-queues"], WAITS["no-waits"])
    assert not pipeline.run()
    computing = 6 * 16 * (simulation.FORWARD_TIME + simulation.BACKWARD_TIME)
    assert computing < pipeline.clock.now < 1.25 * computing


class ReceivesAtOnce(Direction):
    """A receive waits for nothing that is computed: it spins from the moment when both hosts are there."""

    def receive(self, k: int) -> Thread:
        receive = self.launch_receive(k)
        yield self.receiver.step
        self.receiver.device.launch("compute", receive)
        yield self.receiver.step


@pytest.mark.parametrize("staleness", ["least", "uniform"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_receive_at_need_slows_nothing_down(
    monkeypatch: pytest.MonkeyPatch, stages: int, staleness: Staleness
) -> None:
    """And one that is launched as soon as both hosts are there does."""
    monkeypatch.setattr(directions, "HOST_TIMES", (0.001,))
    case = with_staleness(Case(stages, 2 * stages, stages - 1), staleness, 0)._replace(runs=(6,))

    def time(slowdown: float, direction: type[Direction]) -> float:
        total = 0.0
        for seed in range(8):
            again = case._replace(slowdown=slowdown)
            run = Simulation(again, QUEUES["own-queues"], WAITS["no-waits"], seed, direction)
            assert not run.run()
            total += run.clock.now
        return total

    undisturbed = time(0.0, Direction)
    assert time(SLOWDOWN, Direction) == undisturbed
    assert undisturbed < 1.1 * time(0.0, ReceivesAtOnce)
    assert time(SLOWDOWN, ReceivesAtOnce) > 1.1 * undisturbed


# -- devices -----------------------------------------------------------------------------------------------------------


def first_done(queues: str, launch: Callable[[Device], dict[str, Operation]]) -> list[str]:
    """Names of what ends, in this order."""
    clock = Clock(0)
    operations = launch(Device(clock, QUEUES[queues]))
    ended: list[str] = []

    def watch(name: str, operation: Operation) -> Thread:
        yield operation
        ended.append(name)

    for name, operation in operations.items():
        clock.soon(watch(name, operation))
    clock.run()
    return ended


@pytest.mark.parametrize(("queues", "expected"), [("own-queues", ["other", "slow"]), ("one-queue", ["slow", "other"])])
def test_the_head_of_a_queue_blocks_what_is_behind_it(queues: str, expected: list[str]) -> None:
    def launch(device: Device) -> dict[str, Operation]:
        slow = device.launch("a", duration=10.0)
        device.launch("b", after=slow)
        return {"slow": slow, "other": device.launch("c", duration=0.1)}

    assert first_done(queues, launch) == expected


def test_a_kernel_that_has_started_blocks_its_stream_alone() -> None:
    def launch(device: Device) -> dict[str, Operation]:
        alone = device.launch("a", meeting=Meeting(Clock(0), 2))
        other = device.launch("b", duration=0.1)
        behind = device.launch("a", duration=0.1)
        return {"alone": alone, "behind": behind, "other": other, "last": device.launch("b", duration=0.1)}

    assert first_done("own-queues", launch) == ["other", "last"]
    assert first_done("one-queue", launch) == ["other"]


def test_kernels_of_a_message_end_together() -> None:
    def launch(device: Device) -> dict[str, Operation]:
        meeting = Meeting(device.clock, 2)
        send = device.launch("a", meeting=meeting)
        slow = device.launch("b", duration=10.0)
        return {"send": send, "slow": slow, "receive": device.launch("b", meeting=meeting)}

    assert set(first_done("own-queues", launch)[1:]) == {"send", "receive"}
