"""How many updates old the gradient of each parameter is: constant, PipeDream's, least, or with a fresh last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_asyncpp.core.schedule import Slack, agrees_first, held_back
from lightning_asyncpp.core.settings import is_whole, problems_of_partition, problems_of_slack
from lightning_asyncpp.errors import ConfigurationError

Delay = int | Literal["pipedream", "least"]
StageOf = Callable[[str], int]
KINDS = ("pipedream", "least")
POLICIES = ("stop", "skip")
NORMS = ("before", "own", "exact")


@dataclass(frozen=True)
class DelaySettings:
    """What the user may choose about the delay that is emulated; arguments of ``delayed_gradient``.

    Args:
        delay: updates between the weights of a gradient and the weights that it is applied to: a number d for all
            parameters (1 is PipeDream-2BW); ``"pipedream"``: P-1-s for stage s, as in the original PipeDream (Narayanan
            et al., SOSP 2019), which stashes the weights of the forward for the backward; ``"fresh_last_stage"``: 0
            for the last stage and 1 for the others; ``"least"``, with ``micro_batches``: 1 for those micro-batches of
            a mini-batch that a pipeline with ``staleness="least"`` runs on the older weights, 0 for the others.
        stages: number of stages P of the last three.
        slack: with ``"least"``, as for the pipeline strategies: micro-batches more than must, or ``"exact"``.
        lookahead: with ``"least"``, extra micro-batches that the pipeline has in flight.
        stage_of: parameter name -> stage, 0 first; default: runs of equal numbers of parameters, in their order, or
            with ``micro_batches`` as a pipeline cuts ``self.model``, if it can.
        micro_batches: cut every batch into so many micro-batches and compute as a pipeline does; ``None``: whole
            batches, in Lightning's arithmetic.
        nonfinite_gradients: ``"stop"`` raises, ``"skip"`` leaves weights and optimizer as they are.
        last_stage_norm: with ``"fresh_last_stage"`` and ``micro_batches``, what the last stage is clipped by: the norm
            of the mini-batch ``"before"``, as in the pipeline (``None`` means it too), of its ``"own"`` gradients, or
            the ``"exact"`` one, for comparison.
        synchronous_start: number N of mini-batches at the beginning without delay; then W_N counts as W_0.
        partition: with ``micro_batches``, how a pipeline cuts the model into ``stages``: as for the pipeline
            strategies.
    """

    delay: Delay = 1
    stages: int | None = None
    slack: Slack = 0
    lookahead: int = 0
    stage_of: StageOf | None = None
    micro_batches: int | None = None
    nonfinite_gradients: Literal["stop", "skip"] = "stop"
    last_stage_norm: Literal["before", "own", "exact"] | None = None
    synchronous_start: int = 0
    partition: Literal["auto", "uniform"] | list[int] = "auto"

    def problems(self) -> list[str]:
        """What is wrong with the settings, each with its mend."""
        if problems := self._type_problems():
            return problems
        problems = self._delay_problems()
        if self.micro_batches is not None and self.micro_batches < 1:
            problems.append(f"micro_batches={self.micro_batches} must be at least 1, or None for whole batches")
        problems += self._problems_of_least()
        if self.steps_ahead and self.nonfinite_gradients == "skip":
            mend = ", or slack='exact'" if self.delay == "least" else ""
            problems.append(
                f"delay={self.delay!r} steps stages before it is known whether the gradients of the others are finite,"
                f" so nonfinite_gradients='skip' could not leave their updates out; use 'stop'{mend}"
            )
        if self.nonfinite_gradients not in POLICIES:
            problems.append(f"nonfinite_gradients={self.nonfinite_gradients!r} must be 'stop' or 'skip'")
        return problems + self._norm_problems() + self._partition_problems()

    @property
    def steps_ahead(self) -> bool:
        """Whether a pipeline would step stages before the norm of the gradient is known."""
        return self.delay == "least" and not agrees_first(self.delay, self.slack)

    @property
    def start(self) -> int:
        """Number of mini-batches at the beginning without delay; one at least where the norm before is needed."""
        as_a_pipeline = self.steps_ahead and self.micro_batches is not None
        return max(self.synchronous_start, 1) if as_a_pipeline else self.synchronous_start

    @property
    def cuts_as_a_pipeline(self) -> bool:
        """Whether delays go by stages as a pipeline has them, if the model can be cut."""
        return isinstance(self.delay, str) and self.stage_of is None and self.micro_batches is not None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to emulate: optimizers may then evaluate their closure as often as they like."""
        return self.delay == 0 and self.micro_batches is None and self.nonfinite_gradients == "stop"

    def of_parameters(self, names: Sequence[str], of_pipeline: Mapping[str, int] | None = None) -> list[int]:
        """Delays of the parameters ``names``, which are in the model's order.

        Args:
            names: of the parameters.
            of_pipeline: parameter name -> stage of a pipeline, where there is one.

        Raises:
            ConfigurationError: there are fewer parameters than stages, or ``stage_of`` returns no stage.
        """
        if isinstance(self.delay, int):
            return [self.delay] * len(names)
        assert self.stages is not None
        last, stages = self.stages - 1, self._stages(names, of_pipeline)
        if self.delay == "pipedream":
            return [last - stage for stage in stages]
        return [min(held, 1) for held in self.held(names, of_pipeline)]

    def held(self, names: Sequence[str], of_pipeline: Mapping[str, int] | None = None) -> list[int]:
        """How many micro-batches of a mini-batch run on the older weights, of each parameter; with ``"least"``.

        Args:
            names: of the parameters, in the model's order.
            of_pipeline: parameter name -> the stage of a pipeline that has its gradient last.
        """
        assert self.stages is not None
        held = [held_back(stage, self.stages, self.lookahead, "least", self.slack) for stage in range(self.stages)]
        return [held[stage] or 0 for stage in self._stages(names, of_pipeline)]

    def _stages(self, names: Sequence[str], of_pipeline: Mapping[str, int] | None) -> list[int]:
        """Of each parameter; what the step uses outside of the model that is cut, it uses on the last stage."""
        assert self.stages is not None
        if of_pipeline is not None:
            return [of_pipeline.get(name, self.stages - 1) for name in names]
        return self._stages_of(names)

    def _type_problems(self) -> list[str]:
        problems = []
        for name in ("delay", "stages", "micro_batches", "synchronous_start", "lookahead"):
            value = getattr(self, name)
            is_optional = value is None and name in ("stages", "micro_batches")
            may_be_other = isinstance(value, str) if name == "delay" else is_optional
            if not is_whole(value) and not may_be_other:
                more = f" or one of {', '.join(KINDS)}" if name == "delay" else ""
                problems.append(f"{name}={value!r} must be a whole number{more}")
        function: Any = self.stage_of
        if function is not None and not callable(function):
            problems.append(f"stage_of={function!r} must be a function from a parameter's name to its stage")
        return problems

    def _delay_problems(self) -> list[str]:
        by_stage = isinstance(self.delay, str)
        problems = []
        if by_stage and self.delay not in KINDS:
            problems.append(f"delay={self.delay!r} must be a number of updates or one of {', '.join(KINDS)}")
        if isinstance(self.delay, int) and self.delay < 0:
            problems.append(f"delay={self.delay} must be 0 or more: a gradient cannot come before its weights")
        if self.synchronous_start < 0:
            problems.append(f"synchronous_start={self.synchronous_start} must be 0 or more, in mini-batches")
        if by_stage and (self.stages is None or self.stages < 1):
            problems.append(f"delay={self.delay!r} needs stages, the number of pipeline stages; got {self.stages}")
        if not by_stage and (self.stages is not None or self.stage_of is not None):
            given = "stages" if self.stages is not None else "stage_of"
            problems.append(
                f"{given} has no meaning with delay={self.delay}, the same for all parameters: leave it out, or use one"
                f" of {', '.join(KINDS)}"
            )
        return problems

    def _problems_of_least(self) -> list[str]:
        if self.delay != "least":
            given = {name: getattr(self, name) for name in ("slack", "lookahead") if getattr(self, name) != 0}
            return [
                f"{name}={value!r} has a meaning only with delay='least'; leave it out" for name, value in given.items()
            ]
        problems = problems_of_slack(self.slack)
        if self.lookahead < 0:
            problems.append(f"lookahead={self.lookahead} must be 0 or more")
        if self.micro_batches is None:
            problems.append("delay='least' tells micro-batches apart: it needs micro_batches, as the pipeline has them")
        elif self.stages is not None and self.micro_batches < self.stages:
            problems.append(
                f"micro_batches={self.micro_batches} is smaller than stages={self.stages}: a pipeline without a flush"
                f" has work for every stage; use micro_batches >= {self.stages}"
            )
        return problems

    def _norm_problems(self) -> list[str]:
        norm = self.last_stage_norm
        if norm is None:
            return []
        if norm not in NORMS:
            return [f"last_stage_norm={norm!r} must be one of {', '.join(NORMS)}, or None for the pipeline's"]
        return []

    def _partition_problems(self) -> list[str]:
        if self.partition == "auto" or self.cuts_as_a_pipeline:
            return problems_of_partition(self.partition, self.stages)
        return [
            f"partition={self.partition!r} has a meaning only where delays go by stages as a pipeline cuts them: with"
            f" delay={' or '.join(map(repr, KINDS))} and micro_batches, and without stage_of; leave it out"
        ]

    def _stages_of(self, names: Sequence[str]) -> list[int]:
        assert self.stages is not None
        if self.stage_of is None:
            if len(names) < self.stages:
                raise ConfigurationError(
                    f"stages={self.stages} is more than the module has parameters ({len(names)}): no stage may be empty"
                )
            return _equal_runs(len(names), self.stages)
        stages = [self.stage_of(name) for name in names]
        wrong = {name: stage for name, stage in zip(names, stages) if stage not in range(self.stages)}
        if wrong:
            name, stage = next(iter(wrong.items()))
            raise ConfigurationError(
                f"stage_of({name!r}) returned {stage!r}: stages are numbered from 0 to {self.stages - 1}"
            )
        return stages


def _equal_runs(count: int, parts: int) -> list[int]:
    """Part of each of ``count`` things: the first ``count % parts`` parts hold one more."""
    size, longer = divmod(count, parts)
    return [part for part in range(parts) for _ in range(size + (part < longer))]
