"""Chains of runs drawn at random: a whole one, and others that go on from each other's checkpoints as other pipelines.

What is drawn follows docs/guides/checkpoints.md: no chain here may be refused; the page says what comes of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.core.cut.units import has_parameters, pipeline_units
from lightning_asyncpp.core.schedule import largest_lookahead
from tests.core.cases import make_model
from tests.trainer.checkpoint.random_data import SAVES, Data, data
from tests.trainer.checkpoint.resumable import DrawnNet
from tests.trainer.runs import BASES, CORRECTIONS, Run

Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Leg:
    """A run of a chain.

    Attributes:
        stages: of the pipeline, in every replica.
        run: all but where it saves, and what it goes on from.
        at: step of the checkpoint that it goes on from, of the leg before it; 0: it begins.
        reference: another run from the same checkpoint that must do the same, where the leg is not the rest of the
            one before it.
        after_cut: the run before it ends with step ``at``, and it goes on from what that one saves at its end.
    """

    stages: int
    run: Run
    at: int = 0
    reference: Leg | None = None
    after_cut: bool = False

    @property
    def processes(self) -> int:
        return self.stages * int(self.run.options.get("data_parallel_size", 1))


@dataclass(frozen=True)
class Chain:
    """Runs that go on from each other; the first one is whole.

    Attributes:
        loader: how the training data is read, in words.
        legs: the runs.
        twin: what does the same as the first leg, by another strategy.
    """

    loader: str
    legs: tuple[Leg, ...]
    twin: Leg | None = None


@st.composite
def chains(draw: st.DrawFn, workers: bool = False) -> Chain:
    """Of pipelines.

    Args:
        draw: hypothesis' own.
        workers: whether loaders may have worker processes.
    """
    pick = _picker(draw)
    delay, replicas = pick([1, 1, 1, 0]), pick([1, 1, 1, 1, 2])
    drawn = data(pick, workers, replicas)
    by_stage = _by_stage(pick) if delay else {}
    base = _base(pick, drawn, by_stage, tied=replicas == 1)
    pipelines = Pipelines(pick, base, delay, replicas, by_stage)
    pipelines.draw_masters()
    legs = [pipelines.leg()]
    ats = _steps(pick, drawn)
    turning = pick([None, None, *range(len(ats))])
    for number, at in enumerate(ats):
        legs.append(pipelines.turned(at) if number == turning else pipelines.leg(at))
    return Chain(drawn.loader, tuple(_saving(pick, drawn, legs)))


@st.composite
def emulated_chains(draw: st.DrawFn) -> Chain:
    """Of a pipeline in one process, with one in several as its twin."""
    pick = _picker(draw)
    drawn = data(pick, False, 1)
    delay = pick([1, 1, 1, 0])
    by_stage = _by_stage(pick) if delay else {}
    base = _base(pick, drawn, by_stage, tied=True)
    pipelines = Pipelines(pick, base, delay, 1, by_stage)
    twin = pipelines.leg()
    same = {name: twin.run.options[name] for name in ("micro_batches", "partition")}
    options = {"stages": twin.stages, "delay": delay, "staleness": "uniform", **same, **by_stage}
    if by_stage:
        options["lookahead"] = twin.run.options["lookahead"]  # it is part of the rule
    emulated = replace(base, strategy="delayed", options=options)
    legs = [Leg(1, emulated, at) for at in (0, *_steps(pick, drawn))]
    return Chain(drawn.loader, tuple(_saving(pick, drawn, legs)), _saving(pick, drawn, [twin])[0])


class Pipelines:
    """Pipelines that a chain goes through, each drawn from those that may go on from the one before it."""

    def __init__(self, pick: Pick, base: Run, delay: int, replicas: int, by_stage: dict[str, Any]) -> None:
        """Begin with any."""
        self._pick, self._base, self._replicas = pick, base, replicas
        self.delay, self.by_stage = delay, by_stage
        self._cut: list[int] | None = None  # of stages that differ in staleness, which stay where they are
        self.micro_batches = self._draw_micro_batches()
        self._masters: dict[str, str] = {}

    def draw_masters(self) -> None:
        """Perhaps keep weights in bf16 beside masters; a pipeline in one process cannot."""
        if self._base.trainer["precision"] == "bf16-mixed" and self._pick([False, True]):
            self._masters = {"weight_dtype": "bf16"}

    def leg(self, at: int = 0, stages: int | None = None) -> Leg:
        """Anything that does the same as before."""
        if self._cut is not None:
            stages = len(self._cut)
        stages = self._pick(self._possible_stages()) if stages is None else stages
        options = {
            "micro_batches": self.micro_batches, "data_parallel_size": self._replicas,
            "partition": self._draw_partition(stages), "state_dict_type": self._pick(["full", "sharded"]),
            "async_checkpoints": self._pick([False, True]), **self._masters,
        }  # fmt: skip
        if self.delay:
            most = largest_lookahead(stages, self.micro_batches, self._replicas)
            options |= {"lookahead": self._pick([None, *range(most + 1)]), **self.by_stage}
            if self.by_stage.get("staleness") == "least":  # it is part of the rule
                options["lookahead"] = min(1, most) if self.by_stage["slack"] == 1 else 0
        return Leg(stages, replace(self._base, strategy="async" if self.delay else "sync", options=options), at)

    def turned(self, at: int) -> Leg:
        """A leg with what changes the trajectory, and a reference with other stages for what comes of it."""
        possible = ["micro-batches", "synchronous" if self.delay else "asynchronous"]
        turn = self._pick([*possible, "uniform"] if self.by_stage else possible)
        if turn == "micro-batches":
            self.micro_batches = self._draw_micro_batches()
        elif turn == "synchronous":
            self.delay, self.by_stage, self._cut = 0, {}, None
        elif turn == "asynchronous":
            self.delay = 1
        else:
            self.by_stage, self._cut = {}, None
        return replace(self.leg(at), reference=self.leg(at))

    def _draw_micro_batches(self) -> int:
        least = len(self._cut) if self._cut is not None else 1 + bool(self.by_stage)
        return int(self._pick(range(least + (self._replicas > 1), 6)))

    def _possible_stages(self) -> list[int]:
        most = 4 // self._replicas
        if self.delay:
            most = min(most, self.micro_batches - (self._replicas > 1))
        return list(range(1 + bool(self.by_stage), most + 1))

    def _draw_partition(self, stages: int) -> Any:
        if self._cut is not None:
            return self._cut
        cut = _draw_cut(self._pick, stages, _heavy(self._base))
        if self.by_stage:
            self._cut = cut
        return cut if self.by_stage else self._pick(["auto", "uniform", cut, cut])


def _picker(draw: st.DrawFn) -> Pick:
    rng = draw(st.randoms(use_true_random=True))  # else one example in two is much like the one before it
    return lambda options: rng.choice(list(options))


def _by_stage(pick: Pick) -> dict[str, Any]:
    """Perhaps let stages differ in staleness."""
    least = {"staleness": "least", "slack": pick([0, 1, 2, "exact"])}
    return dict(pick([{}, {}, least, least]))


def _base(pick: Pick, drawn: Data, by_stage: dict[str, Any], tied: bool) -> Run:
    """What stays the same through a chain."""
    corrections = list(CORRECTIONS)
    optimizer = pick(list(BASES))
    model = {"spare": pick([False, True]), "tied": tied and pick([False, True]), "routed": pick([False, True])}
    clipping = pick([{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}])
    return Run(
        functools.partial(DrawnNet, random_input=pick([False, True]), **model),
        optimizer=optimizer, correction=pick(["", "feedback", "feedback", *corrections]), scheduler=drawn.scheduler,
        dropout=pick([0.0, 0.2]), samples=drawn.samples, batch_size=drawn.batch_size, val_samples=drawn.val_samples,
        shuffle=drawn.parted, seed=pick([5, 6, 7]),
        trainer=drawn.trainer | clipping | {
            "precision": pick(["32-true", "32-true", "bf16-mixed"]), "enable_checkpointing": True, "logger": "list",
        },
    )  # fmt: skip


def _steps(pick: Pick, drawn: Data) -> list[int]:
    """Where one to three resumes go on, one after the other."""
    steps = sorted({pick(drawn.saved_steps) for _ in range(pick([1, 2, 3]))})
    # A run that goes on before a validation may save in that validation, before it has read anything.
    if drawn.saves == "steps" and (twice := pick([None, *(at for at in steps if at in drawn.validated_steps)])):
        steps.append(twice)
    return sorted(steps)


def _saving(pick: Pick, drawn: Data, legs: Sequence[Leg]) -> list[Leg]:
    """The legs, each saving at least the checkpoint that the next one goes on from."""
    saving = []
    for number, leg in enumerate(legs):
        when = _when(pick, drawn, leg.at, [following.at for following in legs[number + 1 :]])
        callback = (ModelCheckpoint, {"save_top_k": -1, "filename": "{step}", **when})
        cut = _may_be_after_cut(drawn, legs, number) and pick([False, False, True])
        saving.append(replace(leg, run=replace(leg.run, callbacks=(callback,)), after_cut=cut))
    return saving


def _may_be_after_cut(drawn: Data, legs: Sequence[Leg], number: int) -> bool:
    """Not if the next one begins at the same step, before a validation: a run that is cut short ends with that."""
    leg, others = legs[number], (*legs[:number], *legs[number + 1 :])
    return leg.reference is None and leg.at in drawn.inner_steps and all(leg.at != other.at for other in others)


def _when(pick: Pick, drawn: Data, begins: int, later: Sequence[int]) -> dict[str, Any]:
    """Arguments of the callback by which a run saves at least after the first of the steps where later ones begin."""
    if drawn.saves != "steps":
        return SAVES[drawn.saves]
    if not later:
        return {"every_n_train_steps": 1}
    wanted = later[0]
    validated = wanted in drawn.validated_steps and wanted not in later[1:]  # which begin before the validation
    if wanted == begins or (validated and pick([False, False, True])):
        return SAVES["validations"]
    return {"every_n_train_steps": pick([n for n in range(1, wanted + 1) if wanted % n == 0])}


def _draw_cut(pick: Pick, stages: int, heavy: Sequence[bool]) -> list[int]:
    """Any cut of which every stage has parameters."""
    places = [place for place, has in enumerate(heavy) if has]
    chosen: list[int] = []
    for stage in range(1, stages):  # number, among the layers with parameters, of the first one of each later stage
        chosen.append(pick(range(chosen[-1] + 1 if chosen else 1, len(places) - (stages - 1 - stage))))
    starts = [0, *(pick(range(places[number - 1] + 1, places[number] + 1)) for number in chosen)]
    return [end - start for start, end in zip(starts, [*starts[1:], len(heavy)])]


def _heavy(run: Run) -> list[bool]:
    assert isinstance(run.module, functools.partial)
    options = {name: run.module.keywords[name] for name in ("spare", "tied", "routed")}
    return [has_parameters(unit) for unit in pipeline_units(make_model(**options))]
