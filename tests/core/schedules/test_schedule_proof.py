"""Schedules of every shape keep the rules, and a list that breaks a rule is reported by the rule's name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule, depth, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from tests.core.schedules.schedule_proof import StageList, check, check_lists

Lists = list[StageList]
# Uniform staleness, a flush after every mini-batch, or least staleness with the given slack.
Rule = Literal["uniform", "flush", 0, 1, 2, "exact"]
SLACKS: tuple[Rule, ...] = (0, 1, 2, "exact")
RULES: tuple[Rule, ...] = ("uniform", "flush", *SLACKS)
UNIFORM = StalenessRule()


@dataclass(frozen=True)
class OfDepth(Schedule):
    """Schedule with a given depth and rule, which do not depend on the stage."""

    depth: int = 0
    stage_rule: StalenessRule = UNIFORM

    @classmethod
    def of(cls, stage: Schedule, **changes: Any) -> OfDepth:
        same = {field.name: getattr(stage, field.name) for field in fields(cls)}
        return cls(**same | changes)


def pipeline(num_stages: int, lookahead: int, rule: Rule = "uniform", start: int | None = None) -> list[Schedule]:
    """Return the schedules that settings give; stages that step ahead need the norm of one mini-batch without delay."""
    steps_ahead = isinstance(rule, int)
    stage_rule = StalenessRule(int(rule != "flush"), int(steps_ahead) if start is None else start)
    if rule in ("uniform", "flush"):
        return [Schedule(stage, num_stages, lookahead, stage_rule) for stage in range(num_stages)]
    return [Schedule(stage, num_stages, lookahead, stage_rule, "least", rule) for stage in range(num_stages)]


def lists_of(schedules: Sequence[Schedule], microbatches: int, drains: Collection[int] = ()) -> Lists:
    return [StageList.of(schedule, microbatches, drains) for schedule in schedules]


def of_depths(depths: Sequence[int], microbatches: int) -> Lists:
    return lists_of([OfDepth(0, 1, depth=depth) for depth in depths], microbatches)


def rules(violations: list[str]) -> set[str]:
    return {violation.partition(":")[0] for violation in violations}


def admitted(rule: Rule, num_stages: int, microbatches: int, num_replicas: int = 1) -> Iterable[int]:
    """Return lookaheads that the settings admit: all up to 3 P with uniform staleness, otherwise a few.

    These are among 0, the largest, and P - 1, with which every hop has one microbatch to hide its latency.
    """
    if rule == "flush":
        return {0, num_stages - 1}
    most = largest_lookahead(num_stages, microbatches, num_replicas)
    if rule == "uniform":
        return range(min(3 * num_stages, most) + 1)
    return {0, min(num_stages - 1, most), most} if most >= 0 and num_stages > 1 else set()


SHAPES = [*itertools.product(range(1, 12), (1, 2, 3, 5, 8, 11)), (3, 64), (32, 33)]
MORE_SHAPES = [*itertools.product(range(1, 14), range(1, 23))]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.slow)], ids=["few", "many"])
def test_shapes_that_are_admitted_keep_the_rules(rule: Rule, num_replicas: int, shapes: list[tuple[int, int]]) -> None:
    for num_stages, count in shapes:
        for lookahead in admitted(rule, num_stages, count, num_replicas):
            found = check(pipeline(num_stages, lookahead, rule), count, num_replicas)
            assert found == [], (num_stages, count, lookahead)


@pytest.mark.parametrize("rule", RULES)
def test_the_settings_make_these_schedules(rule: Rule) -> None:
    for num_stages, extra in itertools.product((2, 3, 4, 8), (0, 1, 7)):
        wanted = PipelineSettings(num_stages + extra, 1 if extra else 0, delay=int(rule != "flush"))
        if rule in SLACKS:
            wanted = replace(wanted, staleness="least", slack=rule)
        resolved = wanted.resolved(num_stages)
        schedules = pipeline(num_stages, 1 if extra else 0, rule)
        assert [resolved.schedule(stage) for stage in range(num_stages)] == schedules


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_refused_breaks_a_rule_on_the_first_stage_alone(num_replicas: int) -> None:
    """Only m = P - 1 microbatches without lookahead, on one replica, are refused although they break no rule."""
    spared = []
    for count, num_stages in itertools.product(range(1, 22), range(2, 12)):
        refused = largest_lookahead(num_stages, count, num_replicas) + 1 if count >= num_stages else 0
        assert PipelineSettings(count, refused, num_replicas).resolve(num_stages * num_replicas)[0] is None
        broken = rules(check(pipeline(num_stages, refused)[:1], count, num_replicas))
        if not broken:
            spared.append((num_stages, count, refused))
        elif num_replicas == 2 and num_stages - 1 + refused == count:
            assert broken == {"room"}
        else:
            assert {"gradient", "versions", "deadlock"} <= broken <= {"gradient", "versions", "deadlock", "room"}
    exceptions = [(p, p - 1, 0) for p in range(2, 12)]
    assert sorted(spared) == (exceptions if num_replicas == 1 else [])


@pytest.mark.parametrize("drained", [0, 5])
def test_the_state_of_a_stage_repeats(drained: int) -> None:
    """Each mini-batch repeats the one before with other indices, so four of them prove the rules for any number."""
    for count in range(5, 30, 3):
        for ahead in range(count + 1):
            for num_stale in {None, ahead, ahead + 2}:
                schedule = OfDepth(0, 1, depth=ahead, stage_rule=StalenessRule(num_stale=num_stale))
                batches = mini_batches_of(schedule.run(6, count, {drained}), count)
                usual = 2 if drained else 1
                assert batches[usual:5] == batches[usual : usual + 1] * (5 - usual)


def mini_batches_of(actions: list[Action], microbatches: int) -> list[list[tuple[Kind, int]]]:
    """Return actions divided at the first forward of each mini-batch, with indices relative to that mini-batch."""
    batches: list[list[tuple[Kind, int]]] = []
    for action in actions:
        if action.kind is Kind.FORWARD and action.index % microbatches == 0:
            batches.append([])
        begin = len(batches) - 1
        batches[-1].append((action.kind, action.index - begin * (1 if action.kind is Kind.UPDATE else microbatches)))
    return batches


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_drains_keep_the_rules(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(2, 6))
    count = data.draw(st.integers(num_stages, 12))
    num_replicas = data.draw(st.integers(1, 2)) if count > num_stages else 1
    lookahead = data.draw(st.integers(0, largest_lookahead(num_stages, count, num_replicas)))
    schedules = pipeline(num_stages, lookahead, data.draw(st.sampled_from(RULES)), data.draw(st.integers(0, 2)))
    assert check(schedules, count, num_replicas, data.draw(st.sets(st.integers(1, 4 * count)))) == []


def ancestors(num_stages: int, lookahead: int, actions: Sequence[Sequence[Action]]) -> dict[tuple[int, str], set]:
    """Return all actions that precede each action, for any durations: earlier on its stage, or linked by messages."""
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


@pytest.mark.parametrize(("num_stages", "lookahead"), [(2, 0), (2, 5), (3, 1), (4, 0), (4, 9), (6, 5)])
def test_the_exact_slack_is_the_smallest_with_which_no_stage_waits_for_the_agreement(
    num_stages: int, lookahead: int
) -> None:
    """An update before forward number h adds no wait, for any durations, if that forward comes after the last backwards
    of all stages anyway. With a smaller h, some stage waits for certain durations."""
    most = depth(0, num_stages, lookahead)
    count = most + 2
    schedules = pipeline(num_stages, lookahead, "exact")
    assert [schedule.stage_rule.num_stale for schedule in schedules] == [most] * num_stages
    plain = [[a for a in s.run(4, count) if a.kind is not Kind.UPDATE] for s in schedules]
    before = ancestors(num_stages, lookahead, plain)
    complete = {(stage, f"B{2 * count - 1}") for stage in range(num_stages)}
    for stage in range(num_stages):
        known = [complete <= before[stage, f"F{2 * count + num_stale}"] for num_stale in range(count)]
        assert known == [num_stale >= most for num_stale in range(count)], stage


# -- lists that break a rule -----------------------------------------------------------------------------------------

Edit = Callable[[list[str]], list[str]]


def edited(stages: Lists, stage: int, edit: Edit) -> Lists:
    """Return the lists after an edit of one stage's list as words, such as ``F9``."""
    words = edit([str(action) for action in stages[stage].actions])
    actions = [Action(Kind(word[0]), int(word[1:])) for word in words]
    return [*stages[:stage], replace(stages[stage], actions=actions), *stages[stage + 1 :]]


def swapped(one: str, other: str) -> Edit:
    return lambda words: [{one: other, other: one}.get(word, word) for word in words]


def moved(*words_before: str) -> Edit:
    """Return an edit that moves the first word of each pair before the second."""

    def edit(words: list[str]) -> list[str]:
        for word, before in zip(words_before[::2], words_before[1::2]):
            words = without(word)(words)
            words.insert(words.index(before), word)
        return words

    return edit


def without(word: str) -> Edit:
    return lambda words: [other for other in words if other != word]


# Four stages, eight microbatches. With uniform staleness the depths are 4, 3, 2, 0, and from mini-batch 1 on, stage 1
# runs F8 B5 F9 B6 ... F15 B12 U0 F16 B13. With least staleness the depths are 4, 3, 1, 0. With a slack of 1, the stages
# have 5, 4, 2, 1 stale microbatches, and stage 1 runs ... F10 B7 F11 B8 U0 F12 B9 ...; with "exact", each stage has 4.
MUTATIONS: list[tuple[str, Rule, int, Edit, set[str]]] = [
    ("two forwards swapped", "uniform", 1, swapped("F9", "F10"), {"order"}),
    ("backward before its forward", "uniform", 3, swapped("F9", "B9"), {"order"}),
    ("forward left out", "uniform", 1, without("F9"), {"order", "deadlock"}),
    ("backward one forward early", "uniform", 1, moved("B9", "F12"), {"depth"}),
    ("backward one forward late", "uniform", 1, moved("B9", "B10"), {"in flight", "depth"}),
    ("update early", "uniform", 0, moved("U1", "B15"), {"gradient", "versions", "deadlock"}),
    ("update a forward late", "uniform", 2, moved("U0", "B14"), {"delay"}),
    ("update early with slack", 1, 1, moved("U0", "F11"), {"early"}),
    ("update before its gradient", 0, 1, moved("U0", "B7"), {"gradient", "deadlock"}),
    ("update before the others agree", "exact", 2, moved("U0", "F11"), {"early"}),
    ("update after a forward on its weights", "exact", 3, moved("F12", "U0"), {"delay"}),
]


@pytest.mark.parametrize(("name", "rule", "stage", "edit", "broken"), MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_a_changed_list_is_caught_by_the_name_of_the_rule(
    name: str, rule: Rule, stage: int, edit: Edit, broken: set[str]
) -> None:
    good = of_depths([4, 3, 2, 0], 8) if rule == "uniform" else lists_of(pipeline(4, 1, rule, start=0), 8)
    assert check_lists(good, 8) == []
    found = rules(check_lists(edited(good, stage, edit), 8))
    assert broken <= found if rule == "uniform" else broken == found


def named(version: Callable[[StalenessRule, int, int], int]) -> type[StalenessRule]:
    """Return a class of rules whose versions are those that a function returns."""

    class Other(StalenessRule):
        def version(self, mini_batch: int, place: int = 0) -> int:
            return version(self, mini_batch, place)

    return Other


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("slack", SLACKS)
def test_a_version_that_is_off_by_a_microbatch_on_one_stage_is_caught(slack: Rule, step: int, stage: int) -> None:
    schedules = pipeline(4, 1, slack)
    good = schedules[stage]
    off = named(lambda rule, t, place: StalenessRule.version(rule, t, place + step))
    rule = off(good.stage_rule.delay, good.stage_rule.synchronous_start, good.stage_rule.num_stale)
    schedules[stage] = OfDepth.of(good, stage_rule=rule)
    (found,) = check(schedules, 8)
    place = (good.stage_rule.num_stale or 0) - (step > 0)
    assert found.startswith(f"delay: stage {stage} runs microbatch {place} of mini-batch {rule.synchronous_start + 1}")


def test_another_delay_is_caught() -> None:
    older = Schedule(0, 1, pipeline_rule=named(lambda rule, t, place: max(t - 2, 0))())
    assert check([older], 2)[0] == "delay: stage 0 runs microbatch 0 of mini-batch 2 on W_0, not on W_1"
    early = Schedule(0, 1, pipeline_rule=named(lambda rule, t, place: max(t - rule.delay, 0))(1, 2))
    assert check([early], 2)[0] == "delay: stage 0 runs microbatch 0 of mini-batch 1 on W_0, not on W_1"


def test_a_synchronous_start_without_a_flush_is_caught() -> None:
    without_flush = [replace(stage, synchronous_start=2) for stage in lists_of(pipeline(3, 0), 3)]
    assert {"delay", "deadlock"} <= rules(check_lists(without_flush, 3))
    too_far_ahead = pipeline(4, 2, start=4)
    assert {"versions", "gradient"} <= rules(check(too_far_ahead, 4)), "what comes after a long start is looked at"


def test_a_drain_that_one_stage_leaves_out_is_a_deadlock() -> None:
    drained, undrained = (lists_of(pipeline(3, 1), 5, drains) for drains in ({7}, ()))
    assert "deadlock" in rules(check_lists([drained[0], *undrained[1:]], 5))


def test_a_stage_that_shares_a_parameter_holds_back_as_many_as_the_first_with_it() -> None:
    schedules = [replace(s, shares_with=0 if s.stage == 3 else None) for s in pipeline(4, 0, 0)]
    assert [schedule.stage_rule.num_stale for schedule in schedules] == [3, 2, 1, 3]
    assert check(schedules, 6) == []
    waits = lists_of([*schedules[:3], replace(schedules[3], shares_with=None)], 6)
    waits[3] = replace(waits[3], shares_with=0)
    assert check_lists(waits, 6) == [], "no deadlock, but the last stage waits for the first"
