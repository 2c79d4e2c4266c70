"""The rules of the schedule on the lists of every shape; and lists that break a rule are caught by its name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from tests.core.schedules.schedule_proof import OfDepth, StageList, check, check_lists

MOST_STAGES, MOST_MICROBATCHES = 32, 64
Lists = list[StageList]


def pipeline(num_stages: int, lookahead: int, delay: int = 1) -> list[Schedule]:
    return [Schedule(stage, num_stages, lookahead, StalenessRule(delay)) for stage in range(num_stages)]


def starting(schedules: list[Schedule], start: int) -> list[Schedule]:
    """The same with a synchronous start."""
    return [replace(schedule, pipeline_rule=StalenessRule(1, start)) for schedule in schedules]


def lists_of(num_stages: int, microbatches: int, lookahead: int = 0, drains: Collection[int] = ()) -> Lists:
    return [StageList.of(schedule, microbatches, drains) for schedule in pipeline(num_stages, lookahead)]


def rules(violations: list[str]) -> set[str]:
    return {violation.partition(":")[0] for violation in violations}


def admitted(num_stages: int, microbatches: int, num_replicas: int = 1) -> Iterator[int]:
    """Lookaheads that the settings admit, up to 3 P."""
    for lookahead in range(min(3 * num_stages, microbatches) + 1):
        wanted = PipelineSettings(microbatches, lookahead, num_replicas)
        if wanted.resolve(num_stages * num_replicas)[0] is not None:
            yield lookahead


FEW = range(1, 21)
MANY = pytest.param(range(21, MOST_MICROBATCHES + 1), marks=pytest.mark.slow)


@pytest.mark.parametrize("microbatches", [FEW, MANY], ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_shape_that_is_admitted_keeps_the_rules(microbatches: range, num_replicas: int) -> None:
    for count, num_stages in itertools.product(microbatches, range(1, MOST_STAGES + 1)):
        for lookahead in admitted(num_stages, count, num_replicas):
            assert check(pipeline(num_stages, lookahead), count, num_replicas) == [], (num_stages, count, lookahead)


@pytest.mark.parametrize("microbatches", [FEW, MANY], ids=str)
def test_every_shape_with_a_flush_keeps_the_rules(microbatches: range) -> None:
    for count, num_stages in itertools.product(microbatches, range(1, MOST_STAGES + 1)):
        for lookahead in {0, num_stages - 1}:
            assert check(pipeline(num_stages, lookahead, delay=0), count, 2) == [], (num_stages, count, lookahead)


@pytest.mark.slow
def test_every_shape_with_a_flush_and_any_lookahead_keeps_the_rules() -> None:
    for count, num_stages in itertools.product(range(1, MOST_MICROBATCHES + 1), range(1, MOST_STAGES + 1)):
        for lookahead in range(num_stages):
            assert check(pipeline(num_stages, lookahead, delay=0), count, 2) == [], (num_stages, count, lookahead)


def test_a_synchronous_start_keeps_the_rules() -> None:
    for count, num_stages in itertools.product(range(2, MOST_MICROBATCHES + 1, 13), range(2, MOST_STAGES + 1, 3)):
        for lookahead in {0, largest_lookahead(num_stages, count, 1)} if count >= num_stages else set():
            for start in (1, 2, 3):
                schedules = starting(pipeline(num_stages, lookahead), start)
                assert check(schedules, count) == [], (num_stages, count, lookahead, start)


@pytest.mark.parametrize("drained", [1, 4, 5, 8, 9, 11])
def test_drains_about_the_end_of_a_synchronous_start_keep_the_rules(drained: int) -> None:
    schedules = starting(pipeline(4, 1), 2)
    assert check(schedules, 5, 1, {drained}) == []


def test_a_synchronous_start_that_ends_too_late_or_keeps_the_delay_is_caught() -> None:
    class Early(StalenessRule):
        def version(self, mini_batch: int, place: int = 0) -> int:
            return max(mini_batch - self.delay, 0)

    early = Schedule(0, 1, pipeline_rule=Early(1, 2))
    assert check([early], 2)[0] == "delay: stage 0 runs microbatch 0 of mini-batch 1 on W_0, not on W_1"
    too_far_ahead = starting(pipeline(4, 2), 4)
    assert {"versions", "gradient"} <= rules(check(too_far_ahead, 4)), "what comes after a long start is looked at"
    without_flush = [replace(stage, synchronous_start=2) for stage in lists_of(3, 3)]
    assert {"delay", "deadlock"} <= rules(check_lists(without_flush, 3))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_refused_breaks_a_rule_on_the_first_stage_alone(num_replicas: int) -> None:
    """Beyond the largest lookahead, with one exception, which is refused although no rule forbids it."""
    spared = []
    for count, num_stages in itertools.product(range(1, MOST_MICROBATCHES + 1), range(2, MOST_STAGES + 1)):
        refused = largest_lookahead(num_stages, count, num_replicas) + 1 if count >= num_stages else 0
        assert PipelineSettings(count, refused, num_replicas).resolve(num_stages * num_replicas)[0] is None
        broken = rules(check(pipeline(num_stages, refused)[:1], count, num_replicas))
        if not broken:
            spared.append((num_stages, count, refused))
        elif num_replicas == 2 and num_stages - 1 + refused == count:
            assert broken == {"room"}
        else:
            assert {"gradient", "versions", "deadlock"} <= broken <= {"gradient", "versions", "deadlock", "room"}
    exceptions = [(p, p - 1, 0) for p in range(2, MOST_STAGES + 1)]
    assert sorted(spared) == (exceptions if num_replicas == 1 else [])


def test_one_microbatch_less_than_stages_would_keep_the_rules() -> None:
    """The refusal of m = P - 1 protects none: d(0) = P - 1 = m as with m = P and a lookahead of 1."""
    for num_stages in range(2, MOST_STAGES + 1):
        assert check(pipeline(num_stages, 0), num_stages - 1) == []
        assert PipelineSettings(num_stages - 1, 0).resolve(num_stages)[0] is None


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("start", [0, 2])
def test_a_list_depends_on_depth_and_rule_alone(delay: int, start: int) -> None:
    for num_stages, microbatches in itertools.product(range(1, 9), range(1, 12)):
        for plain in pipeline(num_stages, num_stages // 2, delay):
            for staleness in ("uniform", "least"):
                schedule = replace(plain, pipeline_rule=StalenessRule(delay, start), staleness=staleness)
                bare = OfDepth(schedule.depth, schedule.stage_rule)
                assert bare.run(4, microbatches) == schedule.run(4, microbatches)


@pytest.mark.parametrize("drained", [0, 5])
def test_the_state_of_a_stage_repeats(drained: int) -> None:
    """Why four mini-batches tell about any number of them: each mini-batch is the one before with other numbers."""
    for count in range(5, 30, 3):
        for depth in range(count + 1):
            for held in {None, depth, depth + 2}:
                schedule = OfDepth(depth, StalenessRule(held=held))
                batches = mini_batches_of(schedule.run(6, count, {drained}), count)
                usual = 2 if drained else 1
                assert batches[usual:5] == batches[usual : usual + 1] * (5 - usual)


def mini_batches_of(actions: list[Action], microbatches: int) -> list[list[tuple[Kind, int]]]:
    """Actions from the first forward of each mini-batch on, counted from that mini-batch."""
    batches: list[list[tuple[Kind, int]]] = []
    for action in actions:
        if action.kind is Kind.FORWARD and action.index % microbatches == 0:
            batches.append([])
        begin = len(batches) - 1
        batches[-1].append((action.kind, action.index - begin * (1 if action.kind is Kind.UPDATE else microbatches)))
    return batches


def chains(microbatches: int) -> Iterator[list[OfDepth]]:
    """Pipelines whose stages and pairs of neighbours are those of every admitted shape.

    Depths of neighbours differ by 1, as without lookahead, by 2, as with P - 1, or by more; up to the microbatches.
    """
    for hop in (1, 2, 3, 5):
        for first in range(1, hop + 1):
            depths = (0, *range(first, microbatches + 1, hop))
            yield [OfDepth(depth, StalenessRule()) for depth in reversed(depths)]


def drained_after_every_microbatch(microbatches: Collection[int]) -> None:
    for count in microbatches:
        for schedules, drained in itertools.product(chains(count), range(1, 2 * count + 1)):
            assert check(schedules, count, 1, {drained}) == [], (count, drained)
            with_room = [schedule for schedule in schedules if schedule.depth < count]
            assert check(with_room, count, 2, {drained}) == [], (count, drained)


def test_drains_after_any_microbatch_keep_the_rules() -> None:
    drained_after_every_microbatch(range(1, 15))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", range(15, MOST_MICROBATCHES + 1))
def test_drains_after_any_microbatch_of_any_shape_keep_the_rules(microbatches: int) -> None:
    drained_after_every_microbatch([microbatches])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_drains_keep_the_rules(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, MOST_STAGES))
    count = data.draw(st.integers(num_stages, MOST_MICROBATCHES))
    lookahead = data.draw(st.integers(0, largest_lookahead(num_stages, count, 1)))
    delay = data.draw(st.integers(0, 1))
    drains = data.draw(st.sets(st.integers(1, 4 * count)))
    assert check(pipeline(num_stages, lookahead, delay), count, 1, drains) == []


@pytest.mark.parametrize("delay", [0, 1])
def test_drains_at_boundaries_keep_the_rules(delay: int) -> None:
    for count, num_stages in itertools.product(range(1, MOST_MICROBATCHES + 1, 13), range(1, MOST_STAGES + 1, 2)):
        for lookahead in admitted(num_stages, count) if delay else [0]:
            for drains in ({count}, {2 * count}, {count, 2 * count, 3 * count}):
                assert check(pipeline(num_stages, lookahead, delay), count, 1, drains) == []


def test_shapes_with_drains_run_to_their_end() -> None:
    """The same without the argument that stages can go in step: by running the lists."""
    generator = random.Random(0)
    for num_stages, count in itertools.product(range(1, 7), range(1, 14)):
        for lookahead in admitted(num_stages, count):
            drains = generator.sample(range(1, 4 * count + 1), generator.randint(0, 3))
            run_to_the_end(lists_of(num_stages, count, lookahead, drains), count)


def run_to_the_end(stages: Lists, microbatches: int) -> None:
    """Run lists with messages in queues, every stage as far as it gets."""
    todo = [list(stage.actions)[::-1] for stage in stages]
    forwards, backwards = ([0] * (len(stages) + 1) for _ in range(2))
    forwards[-1], backwards[len(stages)] = 10**9, 10**9
    left = -1
    while left != (left := sum(map(len, todo))):
        for stage, actions in enumerate(todo):
            while actions:
                kind, k = actions[-1].kind, actions[-1].index
                if kind is Kind.FORWARD and forwards[stage - 1] > k:
                    forwards[stage] += 1
                elif kind is Kind.BACKWARD and backwards[stage + 1] > k:
                    backwards[stage] += 1
                elif kind is not Kind.UPDATE or min(backwards) < (k + 1) * microbatches:
                    break
                actions.pop()
    assert left == 0


def edited(stages: Lists, stage: int, edit: Callable[[list[str]], list[str]]) -> Lists:
    """Lists of which one is changed, as words."""
    words = edit([str(action) for action in stages[stage].actions])
    actions = [Action(Kind(word[0]), int(word[1:])) for word in words]
    return [*stages[:stage], replace(stages[stage], actions=actions), *stages[stage + 1 :]]


def swapped(one: str, other: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [{one: other, other: one}.get(word, word) for word in words]


def moved(*words_before: str) -> Callable[[list[str]], list[str]]:
    """Each first word of a pair moved before the second."""

    def edit(words: list[str]) -> list[str]:
        for word, before in zip(words_before[::2], words_before[1::2]):
            words = without(word)(words)
            words.insert(words.index(before), word)
        return words

    return edit


def without(word: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [other for other in words if other != word]


# Four stages of depths 4, 3, 2, 0, eight microbatches. Stage 1 in mini-batch 1: F8 B5 F9 B6 ... F15 B12 U0 F16 B13.
MUTATIONS: list[tuple[str, int, Callable[[list[str]], list[str]], set[str]]] = [
    ("two forwards swapped", 1, swapped("F9", "F10"), {"order"}),
    ("two backwards swapped", 1, swapped("B9", "B10"), {"order"}),
    ("backward before its forward", 3, swapped("F9", "B9"), {"order"}),
    ("forward left out", 1, without("F9"), {"order", "deadlock"}),
    ("backward left out", 1, without("B9"), {"order", "deadlock"}),
    ("backward twice", 1, lambda words: [*words, "B31"], {"order"}),
    ("backward one forward early", 1, moved("B9", "F12"), {"depth"}),
    ("two backwards early", 1, moved("B8", "F11", "B9", "F11"), {"depth", "deadlock"}),
    ("backward one forward late", 1, moved("B9", "B10"), {"in flight", "depth"}),
    ("first update early", 0, moved("U0", "B7"), {"gradient", "deadlock"}),
    ("update early", 0, moved("U1", "B15"), {"gradient", "versions", "deadlock"}),
    ("update a mini-batch early", 3, swapped("U1", "U0"), {"order"}),
    ("update a forward late", 2, moved("U0", "B14"), {"delay"}),
    ("update a mini-batch late", 2, moved("U0", "U1"), {"delay"}),
    ("update left out", 2, without("U1"), {"order", "delay"}),
]


@pytest.mark.parametrize(("name", "stage", "edit", "broken"), MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_a_changed_list_is_caught_by_the_name_of_the_rule(
    name: str, stage: int, edit: Callable[[list[str]], list[str]], broken: set[str]
) -> None:
    good = of_depths([4, 3, 2, 0], 8)
    assert check_lists(good, 8, 2) == []
    found = check_lists(edited(good, stage, edit), 8)
    assert broken <= rules(found), found


def test_a_lookahead_too_large_breaks_versions_gradients_and_ends_in_a_deadlock() -> None:
    found = check(pipeline(4, 2), 4)
    assert rules(found) == {"gradient", "versions", "deadlock"}
    assert found[0] == "gradient: stage 0: U0 before B3"
    assert check(pipeline(4, 2), 5) == []
    assert rules(check(pipeline(4, 2), 5, num_replicas=2)) == {"room"}


def of_depths(depths: list[int], microbatches: int) -> Lists:
    return [StageList.of(Schedule(0, depth + 1), microbatches) for depth in depths]


def test_equal_depths_lock_neighbours_and_growing_ones_are_a_deadlock() -> None:
    assert check_lists(of_depths([3, 2, 1, 0], 6), 6) == []
    assert check_lists(of_depths([6, 3, 2, 0], 6), 6) == []
    locked = check_lists(of_depths([3, 2, 2, 0], 6), 6)
    assert locked == ["depth: B0 has as many forwards before it on stage 2 as on stage 1"]
    assert rules(check_lists(of_depths([3, 1, 2, 0], 6), 6)) == {"depth", "deadlock"}


def test_a_drain_that_one_stage_leaves_out_is_a_deadlock() -> None:
    drained = lists_of(3, 5, 1, {7})
    assert check_lists(drained, 5) == []
    assert "deadlock" in rules(check_lists([drained[0], *lists_of(3, 5, 1)[1:]], 5))


def test_another_delay_is_caught() -> None:
    class Older(StalenessRule):
        def version(self, mini_batch: int, place: int = 0) -> int:
            return max(mini_batch - 2, 0)

    found = check([Schedule(0, 1, pipeline_rule=Older())], 2)
    assert found[0] == "delay: stage 0 runs microbatch 0 of mini-batch 2 on W_0, not on W_1"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_lists_without_a_violation_run_to_their_end(data: st.DataObject) -> None:
    """Whatever was changed: what the check does not object to does not block."""
    num_stages, count = data.draw(st.integers(2, 4)), data.draw(st.integers(4, 6))
    stages = lists_of(num_stages, count, data.draw(st.integers(0, 1)))
    for _ in range(data.draw(st.integers(1, 3))):
        stage = data.draw(st.integers(0, num_stages - 1))
        at = data.draw(st.integers(1, len(stages[stage].actions) - 1))
        words = list(stages[stage].actions)
        words[at - 1], words[at] = words[at], words[at - 1]
        stages[stage] = replace(stages[stage], actions=words)
    if not check_lists(stages, count):
        run_to_the_end(stages, count)
