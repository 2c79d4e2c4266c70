"""The schedules as lists, and a simulator that executes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule, depth, largest_lookahead

Pipeline = tuple[int, int, int, int]  # stages, microbatches, lookahead, delay


def pipelines(most_stages: int) -> Iterator[Pipeline]:
    for num_stages in range(1, most_stages + 1):
        for microbatches in range(num_stages, 2 * num_stages + 2):
            for lookahead in range(largest_lookahead(num_stages, microbatches, 1) + 1):
                yield num_stages, microbatches, lookahead, 1
        for microbatches in range(1, 2 * num_stages + 2):
            yield num_stages, microbatches, 0, 0


def lists_of(pipeline: Pipeline, mini_batches: int) -> list[list[Action]]:
    num_stages, microbatches, lookahead, delay = pipeline
    schedules = [Schedule(stage, num_stages, lookahead, StalenessRule(delay)) for stage in range(num_stages)]
    return [schedule.run(mini_batches, microbatches) for schedule in schedules]


@dataclass
class Simulation:
    """Executes all lists with unbounded sends and blocking receives, in unit-free time.

    A forward waits for the forward of the stage before, a backward for the backward of the stage after, and for the
    message, which takes a hop; updates take no time and wait for nobody.
    """

    lists: list[list[Action]]
    forward: float = 1.0
    backward: float = 2.0
    hop: float = 0.0
    done_at: dict[tuple[int, str], float] = field(default_factory=dict)
    busy: list[list[tuple[float, float]]] = field(default_factory=list)

    def run(self) -> Simulation:
        """Until every list is done; fails where no stage can go on."""
        self.busy = [[] for _ in self.lists]
        clock, position = [0.0] * len(self.lists), [0] * len(self.lists)
        while any(at < len(actions) for at, actions in zip(position, self.lists)):
            progressed = False
            for stage, actions in enumerate(self.lists):
                while position[stage] < len(actions) and self._ready(stage, actions[position[stage]]):
                    clock[stage] = self._execute(stage, actions[position[stage]], clock[stage])
                    position[stage] += 1
                    progressed = True
            assert progressed, f"deadlock at {[str(a[i]) for a, i in zip(self.lists, position) if i < len(a)]}"
        return self

    def idle(self, stage: int, start: float, end: float) -> float:
        """Share of the time between two moments in which a stage does nothing."""
        return 1 - sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.busy[stage]) / (end - start)

    def _needed(self, stage: int, action: Action) -> tuple[int, str] | None:
        peer = {Kind.FORWARD: stage - 1, Kind.BACKWARD: stage + 1}.get(action.kind, -1)
        return (peer, str(action)) if 0 <= peer < len(self.lists) else None

    def _ready(self, stage: int, action: Action) -> bool:
        needed = self._needed(stage, action)
        return needed is None or needed in self.done_at

    def _execute(self, stage: int, action: Action, now: float) -> float:
        needed = self._needed(stage, action)
        start = max(now, self.done_at[needed] + self.hop) if needed else now
        end = start + {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}.get(action.kind, 0.0)
        if action.kind is not Kind.UPDATE:
            self.busy[stage].append((start, end))
        self.done_at[stage, str(action)] = end
        return end


def test_actions_read_as_in_the_drawings() -> None:
    assert [str(Action(kind, 3)) for kind in Kind] == ["F3", "B3", "U3"]
    assert " ".join(map(str, Schedule(0, 2).run(2, 2))) == "F0 F1 B0 F2 B1 F3 B2 U0 B3 U1"
    assert " ".join(map(str, Schedule(1, 2).run(2, 2))) == "F0 B0 F1 B1 F2 B2 F3 B3 U0 U1"
    assert " ".join(map(str, Schedule(0, 2, 0, StalenessRule(0)).run(2, 2))) == "F0 F1 B0 B1 U0 F2 F3 B2 B3 U1"


@pytest.mark.parametrize(
    ("drained", "actions"),
    [
        (2, "F0 F1 B0 B1 U0 F2 F3 B2 F4 B3 F5 B4 U1 B5 U2"),
        (3, "F0 F1 B0 F2 B1 B2 U0 F3 F4 B3 F5 B4 U1 B5 U2"),
        (4, "F0 F1 B0 F2 B1 F3 B2 U0 B3 U1 F4 F5 B4 B5 U2"),
    ],
)
def test_a_drain_applies_the_updates_of_complete_mini_batches(drained: int, actions: str) -> None:
    assert " ".join(map(str, Schedule(0, 2).run(3, 2, {drained}))) == actions


@pytest.mark.parametrize("pipeline", [*pipelines(4)], ids=str)
def test_every_microbatch_goes_forward_and_backward_once_and_in_order(pipeline: Pipeline) -> None:
    mini_batches, count = 4, 4 * pipeline[1]
    for actions in lists_of(pipeline, mini_batches):
        for kind, end in ((Kind.FORWARD, count), (Kind.BACKWARD, count), (Kind.UPDATE, mini_batches)):
            assert [action.index for action in actions if action.kind is kind] == list(range(end))
        at = {str(action): position for position, action in enumerate(actions)}
        assert all(at[f"F{k}"] < at[f"B{k}"] for k in range(count))


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_stage_waits_forever(num_stages: int) -> None:
    for pipeline in pipelines(num_stages):
        if pipeline[0] == num_stages:
            Simulation(lists_of(pipeline, 4)).run()


def test_the_simulator_notices_a_deadlock() -> None:
    """Stages that run equally far ahead in opposite orders wait for each other."""
    backward_first = [Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 0)]
    with pytest.raises(AssertionError, match="deadlock"):
        Simulation([backward_first, [Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)]]).run()


@pytest.mark.parametrize("pipeline", [*pipelines(4)], ids=str)
def test_gradients_are_one_update_old_and_two_versions_suffice(pipeline: Pipeline) -> None:
    num_stages, microbatches, lookahead, delay = pipeline
    for stage, actions in enumerate(lists_of(pipeline, 5)):
        schedule = Schedule(stage, num_stages, lookahead, StalenessRule(delay))
        updates, in_flight = 0, {}
        for action in actions:
            mini_batch = action.index if action.kind is Kind.UPDATE else action.index // microbatches
            version = schedule.stage_rule.version(mini_batch)
            if action.kind is Kind.FORWARD:
                assert updates - delay <= version <= updates, "the weights of a forward are not alive"
                in_flight[action.index] = version
            elif action.kind is Kind.BACKWARD:
                assert in_flight.pop(action.index) >= updates - delay, "weights were overwritten before their backward"
            else:
                assert updates == mini_batch, "updates out of order"
                assert updates - version == (delay if mini_batch >= delay else 0)
                assert not any(k // microbatches <= mini_batch for k in in_flight), "its gradient is not complete"
                updates += 1
        assert updates == 5


@given(st.integers(1, 40), st.integers(0, 40))
def test_hops_share_the_lookahead_evenly(num_stages: int, lookahead: int) -> None:
    depths = [depth(stage, num_stages, lookahead) for stage in range(num_stages)]
    assert depths[-1] == 0
    assert num_stages == 1 or depths[0] == num_stages - 1 + lookahead
    hops = [before - after for before, after in itertools.pairwise(depths)]
    assert min(hops, default=1) >= 1
    runs = [[sum(hops[i : i + n]) for i in range(len(hops) - n + 1)] for n in range(1, num_stages)]
    assert all(max(sums) - min(sums) <= 1 for sums in runs), "runs of equally many hops"


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 3))
def test_the_largest_lookahead_fills_a_mini_batch_and_no_more(num_stages: int, extra: int, num_replicas: int) -> None:
    microbatches = num_stages + extra
    room = microbatches - (num_replicas > 1)
    most = largest_lookahead(num_stages, microbatches, num_replicas)
    assert num_stages == 1 or depth(0, num_stages, most) == room


@settings(max_examples=50)
@given(st.data())
def test_batches_and_drains_at_any_moment_keep_the_order(data: st.DataObject) -> None:
    """What the engine does: one batch at a time, drained now and then."""
    num_stages = data.draw(st.integers(1, 5))
    microbatches = data.draw(st.integers(num_stages, 2 * num_stages))
    schedule = Schedule(data.draw(st.integers(0, num_stages - 1)), num_stages)
    backwards, oldest = [], 0
    for batch in range(4):
        actions = list(schedule.batch(batch * microbatches, microbatches, oldest))
        end = (batch + 1) * microbatches
        if data.draw(st.booleans()):
            actions += schedule.drain(oldest + sum(a.kind is Kind.BACKWARD for a in actions), end)
        backwards += [a.index for a in actions if a.kind is Kind.BACKWARD]
        oldest = len(backwards)
        assert end - oldest <= schedule.depth
    assert backwards == list(range(oldest))


@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, 2), (4, 4), (4, 6), (8, 8), (8, 16)])
def test_no_bubble_without_a_flush(num_stages: int, microbatches: int) -> None:
    mini_batches = 6
    simulation = Simulation(lists_of((num_stages, microbatches, 0, 1), mini_batches)).run()
    start, end = 3.0 * microbatches * 2, 3.0 * microbatches * (mini_batches - 2)
    assert max(simulation.idle(stage, start, end) for stage in range(num_stages)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("num_stages", "microbatches", "hop", "times"),
    [  # hops in forwards and backwards; lookahead -> time over the ideal, as research/notes/lookahead.md has it
        (4, 16, 1.0, {0: 2.5, 3: 1.43, 6: 1.0}),
        (4, 16, 2.0, {0: 4.0, 3: 2.28, 12: 1.0}),
    ],
)
def test_lookahead_hides_hops(num_stages: int, microbatches: int, hop: float, times: dict[int, float]) -> None:
    mini_batches, per_microbatch = 24, 3.0
    for lookahead, expected in times.items():
        lists = lists_of((num_stages, microbatches, lookahead, 1), mini_batches)
        done = Simulation(lists, hop=hop * per_microbatch).run().done_at
        first, last = (done[0, f"B{t * microbatches - 1}"] for t in (8, mini_batches - 4))
        ideal = (mini_batches - 12) * microbatches * per_microbatch
        assert (last - first) / ideal == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, 2), (4, 4), (4, 6), (8, 8), (8, 16)])
def test_a_flush_costs_the_known_bubble(num_stages: int, microbatches: int) -> None:
    # One mini-batch: a stage works 3 m of 3 (m + P - 1) units. Mini-batches overlap nowhere, all stages end together
    # only at the first stage, which therefore tells the length of each.
    mini_batches = 5
    simulation = Simulation(lists_of((num_stages, microbatches, 0, 0), mini_batches)).run()
    end = max(b for stage in simulation.busy for _, b in stage)
    bubble = (num_stages - 1) / (microbatches + num_stages - 1)
    assert simulation.idle(0, 0.0, end) == pytest.approx(bubble)


def test_a_synchronous_start_flushes_and_then_both_first_mini_batches_run_on_its_weights() -> None:
    schedule = Schedule(0, 2, 0, StalenessRule(1, 2))
    actions = "F0 F1 B0 B1 U0 F2 F3 B2 B3 U1 F4 F5 B4 F6 B5 F7 B6 U2 B7 U3"
    assert " ".join(map(str, schedule.run(4, 2))) == actions
    assert [schedule.stage_rule.version(t) for t in range(6)] == [0, 1, 2, 2, 3, 4]
    assert [schedule.pipeline_rule.updates_behind(t) for t in range(4)] == [0, 0, 1, 1]
