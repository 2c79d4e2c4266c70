"""The least staleness: the rules on every shape, how early it is, and lists that break a rule, caught by its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, Slack, StalenessRule, depth, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from tests.core.schedules.schedule_proof import MINI_BATCHES, OfDepth, StageList, check, check_lists
from tests.core.schedules.test_schedule_proof import (
    MOST_MICROBATCHES,
    MOST_STAGES,
    edited,
    moved,
    rules,
    run_to_the_end,
)

SLACKS: tuple[Slack, ...] = (0, 1, 2, "exact")


def least(num_stages: int, lookahead: int, slack: Slack, start: int | None = None) -> list[Schedule]:
    """As settings resolve it: a stage that steps ahead needs the norm of a mini-batch without delay."""
    rule = StalenessRule(1, (0 if slack == "exact" else 1) if start is None else start)
    return [Schedule(stage, num_stages, lookahead, rule, "least", slack) for stage in range(num_stages)]


def extreme(num_stages: int, microbatches: int, num_replicas: int = 1) -> set[int]:
    """The smallest and the largest lookahead, and that with which every hop has one microbatch to hide behind."""
    most = largest_lookahead(num_stages, microbatches, num_replicas)
    return {0, min(num_stages - 1, most), most} if most >= 0 else set()


def keeps_the_rules(microbatches: Iterable[int], stages: Iterable[int], slack: Slack, num_replicas: int) -> None:
    for count, num_stages in itertools.product(microbatches, stages):
        for lookahead in extreme(num_stages, count, num_replicas):
            found = check(least(num_stages, lookahead, slack), count, num_replicas)
            assert found == [], (num_stages, count, lookahead)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("slack", SLACKS)
def test_the_least_staleness_keeps_the_rules(slack: Slack, num_replicas: int) -> None:
    keeps_the_rules((2, 3, 5, 8, 16), range(2, 17, 2), slack, num_replicas)
    keeps_the_rules((64,), (3, 32), slack, num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("slack", SLACKS)
def test_the_least_staleness_of_any_shape_keeps_the_rules(slack: Slack, num_replicas: int) -> None:
    keeps_the_rules(range(1, MOST_MICROBATCHES + 1), range(2, MOST_STAGES + 1), slack, num_replicas)


@pytest.mark.parametrize("slack", SLACKS)
def test_the_settings_make_these_schedules(slack: Slack) -> None:
    for num_stages, extra in itertools.product((2, 3, 4, 8), (0, 1, 7)):
        resolved = PipelineSettings(num_stages + extra, staleness="least", slack=slack).resolved(num_stages)
        assert [resolved.schedule(stage) for stage in range(num_stages)] == least(num_stages, 0, slack)


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("start", [0, 2])
def test_a_synchronous_start_before_the_least_staleness_keeps_the_rules(slack: Slack, start: int) -> None:
    for count, num_stages in itertools.product((2, 4, 5, 9, 16), (2, 3, 5, 8)):
        for lookahead in extreme(num_stages, count):
            assert check(least(num_stages, lookahead, slack, start), count) == [], (num_stages, count, lookahead)


def drained_everywhere(num_stages: int, count: int, slack: Slack) -> None:
    for lookahead, start in itertools.product(extreme(num_stages, count), {0, 1, 2}):
        schedules = least(num_stages, lookahead, slack, start)
        for drained in range(1, (start + 2) * count + 1):
            assert check(schedules, count, 1, {drained}) == [], (num_stages, count, lookahead, start, drained)


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, 5), (3, 4), (5, 6)])
def test_drains_after_any_microbatch_keep_the_rules(slack: Slack, num_stages: int, microbatches: int) -> None:
    drained_everywhere(num_stages, microbatches, slack)


@pytest.mark.slow
@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("num_stages", range(2, 8))
def test_drains_after_any_microbatch_of_many_shapes_keep_the_rules(slack: Slack, num_stages: int) -> None:
    for count in {num_stages, num_stages + 1, 2 * num_stages - 1, 2 * num_stages + 3}:
        drained_everywhere(num_stages, count, slack)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_drains_keep_the_rules(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(2, MOST_STAGES))
    count = data.draw(st.integers(num_stages, MOST_MICROBATCHES))
    lookahead = data.draw(st.integers(0, largest_lookahead(num_stages, count, 1)))
    schedules = least(num_stages, lookahead, data.draw(st.sampled_from(SLACKS)), data.draw(st.integers(0, 2)))
    assert check(schedules, count, 1, data.draw(st.sets(st.integers(1, 4 * count)))) == []


def test_shapes_with_drains_run_to_their_end() -> None:
    """The same without the argument that stages can go in step, and with updates that all have to agree on."""
    for slack, num_stages, count in itertools.product(SLACKS, range(2, 6), range(2, 10)):
        for lookahead in extreme(num_stages, count):
            for drains in ((), (count,), (count + 1, 2 * count - 1)):
                schedules = least(num_stages, lookahead, slack)
                lists = [StageList.of(schedule, count, drains) for schedule in schedules]
                if slack == "exact":
                    run_to_the_end(lists, count)
                else:
                    run_to_the_end([without_updates(stage) for stage in lists], count)


def without_updates(stage: StageList) -> StageList:
    return replace(stage, actions=[action for action in stage.actions if action.kind is not Kind.UPDATE])


# -- how early it is, counted in the lists --------------------------------------------------------------------------


def forwards_before_updates(actions: Sequence[Action], microbatches: int) -> list[int]:
    """How many forwards come between the last backward of each mini-batch and its update, but for the last one."""
    at = {str(action): place for place, action in enumerate(actions)}
    count = sum(action.kind is Kind.UPDATE for action in actions)
    spans = [(at[f"B{(t + 1) * microbatches - 1}"], at[f"U{t}"]) for t in range(count - 1)]
    return [sum(action.kind is Kind.FORWARD for action in actions[begin:end]) for begin, end in spans]


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_an_update_comes_as_soon_as_its_gradient_and_the_slack(slack: int) -> None:
    for num_stages, count in itertools.product(range(2, 9), range(2, 20)):
        for lookahead in extreme(num_stages, count):
            for schedule in least(num_stages, lookahead, slack, start=0):
                most = count - schedule.depth  # as late as with uniform staleness
                waited = forwards_before_updates(schedule.run(MINI_BATCHES, count), count)
                assert waited == [min(slack, most)] * len(waited), (num_stages, count, lookahead, schedule.stage)


def test_with_the_slack_exact_the_first_stage_waits_for_nothing_and_all_update_at_the_same_microbatch() -> None:
    for num_stages, count in itertools.product(range(2, 9), range(2, 20)):
        for lookahead in extreme(num_stages, count):
            schedules = least(num_stages, lookahead, "exact")
            lists = [schedule.run(MINI_BATCHES, count) for schedule in schedules]
            assert set(forwards_before_updates(lists[0], count)) == {0}
            following = [[b.index for a, b in pairwise(actions) if a.kind is Kind.UPDATE][:-1] for actions in lists]
            assert all(places == following[0] for places in following)


def test_holding_back_fewer_than_are_under_way_is_caught_on_any_stage() -> None:
    for num_stages, lookahead in itertools.product(range(2, 9), (0, 1, 3)):
        lists = least(num_stages, lookahead, 0, start=0)
        count = lists[0].depth + 3
        for stage in range(num_stages - 1):
            bare = [OfDepth(s.depth, replace(s.stage_rule, held=s.depth - (s.stage == stage)), False) for s in lists]
            broken = rules(check(bare, count))
            assert {"gradient", "deadlock"} <= broken, (num_stages, lookahead, stage)


def ancestors(num_stages: int, lookahead: int, actions: Sequence[Sequence[Action]]) -> dict[tuple[int, str], set]:
    """What must be done before each action, whatever it lasts: what the stage does before, and messages."""
    before: dict[tuple[int, str], set] = {}
    todo = [list(stage)[::-1] for stage in actions]
    latest: list[tuple[int, str] | None] = [None] * num_stages
    while any(todo):
        for stage, left in enumerate(todo):
            while left:
                peer = stage + (-1 if left[-1].kind is Kind.FORWARD else 1)
                needed = (peer, str(left[-1]))
                if 0 <= peer < num_stages and needed not in before:
                    break
                key = stage, str(left.pop())
                reasons = [r for r in (needed if 0 <= peer < num_stages else None, latest[stage]) if r is not None]
                before[key] = set(reasons).union(*(before[reason] for reason in reasons))
                latest[stage] = key
    return before


@pytest.mark.parametrize(("num_stages", "lookahead"), [(2, 0), (2, 5), (3, 1), (4, 0), (4, 2), (4, 9), (5, 0), (6, 5)])
def test_the_exact_slack_is_the_smallest_with_which_no_stage_waits_for_the_agreement(
    num_stages: int, lookahead: int
) -> None:
    """Whatever actions last, if an update before forward number h adds no wait: that forward comes after the last
    backwards of all stages anyway. Fewer, and there are durations with which some stage waits."""
    most = depth(0, num_stages, lookahead)
    count = most + 2
    schedules = least(num_stages, lookahead, "exact")
    assert [schedule.stage_rule.held for schedule in schedules] == [most] * num_stages
    plain = [[a for a in s.run(4, count) if a.kind is not Kind.UPDATE] for s in schedules]
    before = ancestors(num_stages, lookahead, plain)
    complete = {(stage, f"B{2 * count - 1}") for stage in range(num_stages)}
    for stage in range(num_stages):
        known = [complete <= before[stage, f"F{2 * count + held}"] for held in range(count)]
        assert known == [held >= most for held in range(count)], stage


# -- lists that break a rule ----------------------------------------------------------------------------------------


def off_by_one(step: int) -> type[StalenessRule]:
    class Off(StalenessRule):
        def version(self, mini_batch: int, place: int = 0) -> int:
            return super().version(mini_batch, place + step)

    return Off


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("slack", SLACKS)
def test_a_version_that_is_off_by_a_microbatch_on_one_stage_is_caught(slack: Slack, step: int, stage: int) -> None:
    schedules: list[Schedule | OfDepth] = list(least(4, 1, slack))
    assert check(schedules, 8) == []
    good = schedules[stage]
    off = off_by_one(step)(good.stage_rule.delay, good.stage_rule.synchronous_start, good.stage_rule.held)
    schedules[stage] = OfDepth(good.depth, off, good.agrees_first, stage=stage)
    (found,) = check(schedules, 8)
    place = (good.stage_rule.held or 0) - (step > 0)
    older = good.stage_rule.synchronous_start  # the first mini-batch that runs on two versions is the one after
    named, promised = (older + 1, older) if step > 0 else (older, older + 1)
    where = f"stage {stage} runs microbatch {place} of mini-batch {older + 1}"
    assert found == f"delay: {where} on W_{named}, not on W_{promised}"


# Four stages of depths 4, 3, 2, 0 and eight microbatches, without a synchronous start. With a slack of 1 they hold
# back 5, 4, 3, 1: stage 1 runs ... F10 B7 F11 B8 U0 F12 B9 ...; with "exact" all hold back 4.
MUTATIONS: list[tuple[str, Slack, int, Callable[[list[str]], list[str]], set[str]]] = [
    ("update late", 1, 1, moved("F12", "U0"), {"delay"}),
    ("update early", 1, 1, moved("U0", "F11"), {"early"}),
    ("update before its gradient", 0, 1, moved("U0", "B7"), {"gradient", "deadlock"}),
    ("update late without slack", 0, 1, moved("F11", "U0"), {"delay"}),
    ("update of the last stage late", 0, 3, moved("F8", "U0"), {"delay"}),
    ("update before the others agree", "exact", 2, moved("U0", "F11"), {"early"}),
    ("update before the others can agree", "exact", 0, moved("U0", "B7"), {"gradient", "deadlock"}),
    ("update after a forward on its weights", "exact", 3, moved("F12", "U0"), {"delay"}),
]


@pytest.mark.parametrize(("name", "slack", "stage", "edit", "broken"), MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_an_update_at_another_microbatch_is_caught_by_the_name_of_the_rule(
    name: str, slack: Slack, stage: int, edit: Callable[[list[str]], list[str]], broken: set[str]
) -> None:
    good = [StageList.of(schedule, 8) for schedule in least(4, 1, slack, start=0)]
    assert check_lists(good, 8) == []
    found = check_lists(edited(good, stage, edit), 8)
    assert rules(found) == broken, found


def test_the_lists_of_a_small_pipeline() -> None:
    def words(stage: int, slack: Slack, drains: Collection[int] = ()) -> str:
        return " ".join(map(str, least(2, 0, slack, start=0)[stage].run(3, 3, drains)))

    assert words(0, 0) == "F0 F1 B0 F2 B1 F3 B2 U0 F4 B3 F5 B4 F6 B5 U1 F7 B6 F8 B7 B8 U2"
    assert words(1, 0) == "F0 B0 F1 B1 F2 B2 U0 F3 B3 F4 B4 F5 B5 U1 F6 B6 F7 B7 F8 B8 U2"
    assert words(1, 1) == words(1, "exact") == "F0 B0 F1 B1 F2 B2 F3 B3 U0 F4 B4 F5 B5 F6 B6 U1 F7 B7 F8 B8 U2"
    assert words(0, 0, {4}) == "F0 F1 B0 F2 B1 F3 B2 B3 U0 F4 F5 B4 F6 B5 U1 F7 B6 F8 B7 B8 U2"
    assert words(0, 2) == " ".join(map(str, Schedule(0, 2).run(3, 3))), "as late as with uniform staleness"


def test_a_stage_that_shares_a_parameter_holds_back_as_many_as_the_first_with_it() -> None:
    schedules = [replace(s, shares_with=0 if s.stage == 3 else None) for s in least(4, 0, 0)]
    assert [schedule.stage_rule.held for schedule in schedules] == [3, 2, 1, 3]
    assert check(schedules, 6) == []
    alone = [replace(schedule, shares_with=None) for schedule in schedules[3:]]
    lists = [StageList.of(schedule, 6) for schedule in [*schedules[:3], *alone]]
    assert check_lists(lists, 6) == []
    waits = [*lists[:3], replace(lists[3], shares_with=0)]
    assert check_lists(waits, 6) == [], "no deadlock, but the last stage waits for the first"
