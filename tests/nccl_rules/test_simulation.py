"""No order of waits, and no way in which streams share hardware queues, makes a pipeline hang; what would is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest

from lightning_asyncpp.core.schedule import Slack, Staleness, largest_lookahead
from tests.nccl_rules import directions, simulation
from tests.nccl_rules.devices import Operation, Queues, Thread
from tests.nccl_rules.directions import Direction, Process, Waits
from tests.nccl_rules.simulation import REPLICAS, STREAMS, Case, Host, Simulation

MOST_STAGES, MOST_MICROBATCHES = 8, 16
SLOWDOWN = 0.35  # of matrix products beside a kernel that spins on one multiprocessor of an H200
WAITS: dict[str, Waits] = {
    "no-waits": lambda random, k: False,
    "waits-everywhere": lambda random, k: True,
    "random-waits": lambda random, k: random.random() < 0.1,
    "waits-together": lambda random, k: k % 5 == 3,
}
QUEUES: dict[str, Queues] = {"own-queues": lambda stream: stream, "one-queue": lambda stream: "shared"}
RULES: list[tuple[Staleness, Slack]] = [("uniform", 0), ("least", 0), ("least", 1), ("least", 2), ("least", "exact")]


def sharing(pair: tuple[str, ...]) -> Queues:
    return lambda stream: "shared" if stream in pair else stream


PAIRS = {"-".join(pair): sharing(pair) for pair in itertools.combinations(STREAMS, 2)}


def cases(stages: int, rule: tuple[Staleness, Slack], replicas: int = 1) -> Iterator[Case]:
    """All numbers of microbatches, with no lookahead, P - 1 and the largest."""
    for microbatches in range(stages, MOST_MICROBATCHES + 1):
        most = largest_lookahead(stages, microbatches, replicas)
        for lookahead in sorted({0, min(stages - 1, most), most}):
            yield with_staleness(Case(stages, microbatches, lookahead, replicas=replicas), *rule)


def with_staleness(case: Case, staleness: Staleness, slack: Slack) -> Case:
    """As settings resolve it: a stage that steps ahead needs the norm of a mini-batch without delay."""
    start = int(staleness == "least" and slack != "exact")
    return case._replace(staleness=staleness, slack=slack, synchronous_start=start, runs=(3, *case.runs[1:]))


# -- the protocol ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_it_does_not_hang(stages: int, replicas: int) -> None:
    """Every case with other waits, queues and staleness: the slow test has all waits in all cases."""
    random = Random(10 * stages + replicas)
    for _ in range(2):
        for case in cases(stages, ("uniform", 0), replicas):
            queues, waits = random.choice([*QUEUES.values(), *PAIRS.values()]), random.choice([*WAITS.values()])
            case = with_staleness(case, *random.choice(RULES))._replace(slowdown=SLOWDOWN)
            assert not Simulation(case, queues, waits, random.randrange(100)).run(), case


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_does_not_hang_with_any_queues(rule: tuple[Staleness, Slack], waits: str, replicas: int) -> None:
    for number, stages in enumerate((4, 6, MOST_STAGES)):
        turns = itertools.islice(itertools.cycle((QUEUES | PAIRS).values()), number, None)
        for case, queues in zip(cases(stages, rule, replicas), turns):
            case = case._replace(slowdown=SLOWDOWN)
            assert not Simulation(case, queues, WAITS[waits], stages).run(), case


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 600), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_cases_do_not_hang(seeds: range) -> None:
    """Any drains and staleness, up to three replicas, and any streams that share queues."""
    for seed in seeds:
        random = Random(seed)
        stages, replicas = random.randint(2, MOST_STAGES), random.choice((1, 1, 2, 3))
        microbatches = random.randint(stages, MOST_MICROBATCHES)
        lookahead = random.randint(0, largest_lookahead(stages, microbatches, replicas))
        runs = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
        case = with_staleness(Case(stages, microbatches, lookahead, runs, replicas), *random.choice(RULES))
        number = random.randint(1, len(STREAMS))
        queue_of = {stream: str(random.randrange(number)) for stream in (*STREAMS, REPLICAS)}
        waits = waits_at_random(random.choice((0.001, 0.03, 0.3)))
        assert not Simulation(case._replace(runs=runs), queue_of.__getitem__, waits, seed).run(), case


def waits_at_random(share: float) -> Waits:
    return lambda random, k: random.random() < share


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


@pytest.mark.parametrize("case", [Case(3, 3, 0), Case(4, 8, 3)], ids=["3", "4"])
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


class ReceivesAtOnce(Direction):
    """A receive waits for nothing that is computed: it spins from the moment when both hosts are there."""

    def receive(self, k: int) -> Thread:
        receive = self.launch_receive(k)
        yield self.receiver.step
        self.receiver.device.launch("compute", receive)
        yield self.receiver.step


def time(case: Case, direction: type[Direction] = Direction) -> float:
    """With hosts ahead of their devices, over several seeds."""
    total = 0.0
    for seed in range(8):
        run = Simulation(case, QUEUES["own-queues"], WAITS["no-waits"], seed, direction)
        assert not run.run()
        total += run.clock.now
    return total / 8


@pytest.mark.parametrize(("stages", "staleness"), [(2, "uniform"), (3, "least"), (5, "uniform")])
def test_a_receive_at_need_slows_nothing_down(
    monkeypatch: pytest.MonkeyPatch, stages: int, staleness: Staleness
) -> None:
    """And one that is launched as soon as both hosts are there does; what is simulated is a pipeline."""
    monkeypatch.setattr(directions, "HOST_TIMES", (0.001,))
    case = with_staleness(Case(stages, 2 * stages, stages - 1), staleness, 0)._replace(runs=(6,))
    slow = case._replace(slowdown=SLOWDOWN)
    undisturbed, computing = time(case), simulation.FORWARD_TIME + simulation.BACKWARD_TIME
    assert computing < undisturbed / (6 * 2 * stages) < 1.6 * computing
    assert time(slow) == undisturbed < 1.1 * time(case, ReceivesAtOnce)
    assert time(slow, ReceivesAtOnce) > 1.1 * undisturbed
