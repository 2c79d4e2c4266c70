"""Settings of a pipeline, and their resolution for a number of processes; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from typing_extensions import Self

from lightning_asyncpp.core.schedule import (
    Schedule,
    Slack,
    Staleness,
    StalenessRule,
    agrees_first,
    largest_lookahead,
)
from lightning_asyncpp.errors import ConfigurationError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")  # Lightning's names
STALENESS = get_args(Staleness)


def is_whole(value: object) -> bool:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def problems_of_precision(precision: str | None) -> list[str]:
    """Return the problems of Lightning's argument ``precision``."""
    if precision in PRECISIONS:
        return []
    return [
        f"precision={precision!r} is not supported: fp16 needs a loss scale that all stages agree on before the"
        f" backward; use one of {', '.join(PRECISIONS)}"
    ]


def problems_of_weight_dtype(weight_dtype: str | None, precision: str) -> list[str]:
    """Return the problems of ``weight_dtype`` in combination with Lightning's ``precision``."""
    if weight_dtype == "bf16" and precision != "bf16-mixed":
        return [
            f"weight_dtype='bf16' needs precision='bf16-mixed', with which layers accept both bf16 and fp32, but"
            f" precision={precision!r}: set precision='bf16-mixed', or leave weight_dtype out"
        ]
    return []


def problems_of_partition(partition: object, num_stages: int | None = None) -> list[str]:
    """Return the problems of the argument ``partition`` that do not depend on the model.

    Args:
        partition: ``"auto"``, ``"uniform"`` or the number of layers of each stage.
        num_stages: number of stages, if known.
    """
    if isinstance(partition, str) and partition in ("auto", "uniform"):
        return []
    if not isinstance(partition, (list, tuple)) or not partition or not all(map(is_whole, partition)):
        return [
            f"partition={partition!r} must be 'auto', 'uniform', or a list with the number of layers of each stage,"
            " such as [3, 4]"
        ]
    counts = list(partition)
    if empty := [stage for stage, count in enumerate(counts) if count < 1]:
        return [
            f"partition={counts} gives stage {empty[0]} no layer ({counts[empty[0]]}): each number must be at least 1"
        ]
    if num_stages is not None and len(counts) != num_stages:
        return [
            f"partition={counts} is for {len(counts)} stages, but there are {num_stages} (devices over"
            f" data_parallel_size): give {num_stages} numbers"
        ]
    return []


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of a pipeline, which the strategies document.

    Attributes:
        delay: maximum age of a gradient in updates; 0 means a flush per mini-batch. The strategy's name sets it, or the
            argument ``delay`` of ``delayed_gradient``.
        staleness: as in the strategies, except for its default; see :meth:`chosen`.
    """

    microbatches: int | None = None
    lookahead: int | None = None
    data_parallel_size: int = 1
    staleness: Staleness = "uniform"
    slack: Slack = 0
    synchronous_start: int = 0
    weight_dtype: Literal["bf16"] | None = None
    partition: Literal["auto", "uniform"] | Sequence[int] = "auto"
    nonfinite_gradients: Literal["stop", "skip"] = "stop"
    delay: int = 1

    @classmethod
    def chosen(cls, delay: int, staleness: Staleness | None = None, **others: Any) -> PipelineSettings:
        """Return a strategy's settings; ``staleness`` is ``"least"`` by default, or ``"uniform"`` without delay."""
        if staleness is None:
            staleness = "least" if delay else "uniform"
        return PipelineSettings(delay=delay, staleness=staleness, **others)

    def problems(self) -> list[str]:
        """Return the problems that do not depend on the number of processes, each with a remedy."""
        types = self._type_problems()
        plain = PipelineSettings()
        right = replace(self, **{name: getattr(plain, name) for name in types})
        return [*types.values(), *right._problems_alone()]

    def resolve(self, world_size: int) -> tuple[ResolvedSettings | None, list[str]]:
        """Resolve the settings for ``world_size`` processes; return (settings, []), or (None, problems)."""
        if types := self._type_problems():
            return None, list(types.values())
        problems = self._problems_alone()
        if self.data_parallel_size >= 1 and world_size % self.data_parallel_size:
            problems.append(
                f"devices={world_size} is not divisible by data_parallel_size={self.data_parallel_size}:"
                " every replica needs the same number of stages; change one of the two"
            )
        if problems:
            return None, problems
        num_stages = world_size // self.data_parallel_size
        if self.delay and self._is_synchronous(num_stages):
            return self.with_delay(0).resolve(world_size)
        microbatches = self._resolved_microbatches(num_stages)
        lookahead = self._resolved_lookahead(num_stages, microbatches)
        problems = problems_of_partition(self.partition, num_stages)
        problems += self._problems_of_schedule(num_stages, microbatches, lookahead)
        if problems:
            return None, problems
        start = self.synchronous_start if agrees_first(self.staleness, self.slack) else max(1, self.synchronous_start)
        found = {
            "num_stages": num_stages, "microbatches": microbatches, "lookahead": lookahead, "synchronous_start": start,
        }  # fmt: skip
        return ResolvedSettings(**vars(self) | found), []

    def resolved(self, world_size: int) -> ResolvedSettings:
        """Resolve the settings, and raise ConfigurationError with all problems; see :meth:`resolve`."""
        resolved, problems = self.resolve(world_size)
        if resolved is None:
            raise ConfigurationError.from_problems(problems)
        return resolved

    def with_delay(self, delay: int) -> Self:
        """Return the settings with another delay, such as 0 for the synchronous counterpart."""
        if delay:
            return replace(self, delay=delay)
        return replace(self, delay=0, staleness="uniform", slack=0, synchronous_start=0)

    def _type_problems(self) -> dict[str, str]:
        optional = ("microbatches", "lookahead")
        whole = (*optional, "data_parallel_size", "delay", "synchronous_start")
        values = {name: getattr(self, name) for name in whole}
        return {
            name: f"{name}={value!r} must be a whole number"
            for name, value in values.items()
            if not is_whole(value) and not (value is None and name in optional)
        }

    def _problems_alone(self) -> list[str]:
        problems = []
        if self.microbatches is not None and self.microbatches < 1:
            problems.append(f"microbatches={self.microbatches} must be at least 1")
        if self.lookahead is not None and self.lookahead < 0:
            problems.append(f"lookahead={self.lookahead} must be 0 or more")
        if self.data_parallel_size < 1:
            problems.append(f"data_parallel_size={self.data_parallel_size} must be at least 1")
        if self.nonfinite_gradients not in ("stop", "skip"):
            problems.append(f"nonfinite_gradients={self.nonfinite_gradients!r} must be 'stop' or 'skip'")
        problems += problems_of_partition(self.partition)
        if self.delay not in (0, 1):
            problems.append(f"delay={self.delay} must be 0 or 1")
        problems += self._problems_of_staleness()
        if self.weight_dtype not in (None, "bf16"):
            problems.append(f"weight_dtype={self.weight_dtype!r} must be 'bf16', or None for the parameters' dtype")
        return problems

    def _problems_of_staleness(self) -> list[str]:
        if self.staleness not in STALENESS:
            return [f"staleness={self.staleness!r} must be {' or '.join(map(repr, STALENESS))}"]
        if self.staleness != "uniform" and self.delay == 0:
            return [f"staleness={self.staleness!r} has no meaning without a delay: no gradient is old; leave it out"]
        if self.slack != "exact" and not (is_whole(self.slack) and self.slack >= 0):
            return [f"slack={self.slack!r} must be a number of microbatches, 0 or more, or 'exact'"]
        if self.slack and self.delay == 0:
            return [f"slack={self.slack!r} has no meaning without a delay: leave it out"]
        if self.slack and self.staleness != "least":
            return [f"slack={self.slack!r} has a meaning only with staleness='least': set this, or leave slack out"]
        if self.synchronous_start < 0:
            return [f"synchronous_start={self.synchronous_start} must be a number of updates, 0 or more"]
        if self.synchronous_start and self.delay == 0:
            return [f"synchronous_start={self.synchronous_start} has no meaning without a delay: leave it out"]
        return []

    def _resolved_microbatches(self, num_stages: int) -> int:
        if self.microbatches is not None:
            return self.microbatches
        return 2 * num_stages if num_stages > 1 else 1

    def _resolved_lookahead(self, num_stages: int, microbatches: int) -> int:
        if self.lookahead is not None:
            return self.lookahead
        if self.delay == 0 or self.staleness == "least":
            return 0
        return max(0, min(1, num_stages - 1, largest_lookahead(num_stages, microbatches, self.data_parallel_size)))

    def _is_synchronous(self, num_stages: int) -> bool:
        """Return whether no gradient is stale: without a delay, or on a single stage with ``"least"``."""
        return self.delay == 0 or (self.staleness == "least" and num_stages == 1)

    def _problems_of_schedule(self, num_stages: int, microbatches: int, lookahead: int) -> list[str]:
        if self._is_synchronous(num_stages):
            return []
        if microbatches < num_stages:
            return [
                f"microbatches={microbatches} is smaller than the number of stages ({num_stages}): without a flush"
                f" every stage needs work; use microbatches >= {num_stages}, or strategy 'sync_pipeline'"
            ]
        most = largest_lookahead(num_stages, microbatches, self.data_parallel_size)
        if lookahead > most:
            return [
                f"lookahead={lookahead} does not fit {microbatches} microbatches over {num_stages} stages and"
                f" {self.data_parallel_size} replica(s): the largest is {most};"
                f" lower it, or use microbatches >= {microbatches + lookahead - most}"
            ]
        if self.nonfinite_gradients == "skip" and not agrees_first(self.staleness, self.slack):
            return [
                "with staleness='least' (the default) a stage steps before it is known whether other stages' gradients"
                " are finite, so nonfinite_gradients='skip' could not skip its update;"
                " use 'stop', slack='exact' or staleness='uniform'"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(PipelineSettings):
    """Settings resolved for a number of processes, with all defaults filled in.

    Attributes:
        num_stages: number of stages P.
        synchronous_start: number of initial mini-batches without delay, at least 1 if stages clip with the previous
            mini-batch's norm.
    """

    num_stages: int
    microbatches: int = field()  # no default
    lookahead: int = field()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of weights made from masters (fp32 weights that the optimizer updates); None without masters."""
        return torch.bfloat16 if self.weight_dtype == "bf16" else None

    def describe(self, schedules: Sequence[Schedule] | None = None) -> str:
        """Return a description for the log: microbatches, and age of gradients.

        Args:
            schedules: schedules of all stages; default: schedules for a model without shared parameters.
        """
        schedules = schedules or [self.schedule(stage) for stage in range(self.num_stages)]
        oldest = max(schedule.stage_rule.staleness(self.microbatches) for schedule in schedules)
        share = "each gradient" if oldest == 1 else f"up to {oldest:.0%} of each gradient"
        start = f" after {self.synchronous_start} updates" if self.synchronous_start > 1 else ""
        age = f"{share} is one update old{start}" if oldest else "no gradient is old"
        return f"{self.microbatches} microbatches; {age}"

    def schedule(self, stage: int, shares_with: int | None = None) -> Schedule:
        """Return the schedule of a stage.

        Args:
            stage: index of the stage.
            shares_with: first stage linked to this one by shared parameters, perhaps this one; None without such.
        """
        rule = StalenessRule(self.delay, self.synchronous_start)
        return Schedule(stage, self.num_stages, self.lookahead, rule, self.staleness, self.slack, shares_with)
