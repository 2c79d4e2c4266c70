"""What a plan says that the schedule keeps alive, against what the engine holds: action by action, counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings, ResolvedSettings
from lightning_asyncpp.core.wire.link import Neighbours
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.tools.check.in_turns import run_in_turns
from lightning_asyncpp.tools.plan.fake_tensors import Reading
from lightning_asyncpp.tools.plan.in_flight import StageSchedule, _Walk
from lightning_asyncpp.tools.plan.stage_run import Profile

CPU, WIDTH, MINI_BATCHES = torch.device("cpu"), 5, 6
SET = Profile(gradients=1, forward=Reading(1, 1), backward=Reading(0, 1), backward_again=Reading(-1, 1))


class Held(NamedTuple):
    """What a stage has just before something runs."""

    during: str
    versions: int
    gradients: int
    in_flight: int


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass
class Noting(_Walk):
    """Keeps every moment, not the fullest alone."""

    moments: list[Held] = field(default_factory=list)

    def _note(self, working: int, during: str) -> None:
        rule, sets = self.stage.schedule.stage_rule, [*self.sums.values(), *self.pending]
        self.moments.append(Held(during, rule.num_versions, sum(sets), len(self.in_flight)))


def planned(settings: ResolvedSettings, stage: int) -> list[list[Held]]:
    """Of each mini-batch of a stage, moment by moment."""
    schedule = settings.schedule(stage)
    walk = Noting(StageSchedule(schedule, settings.micro_batches), [SET] * settings.micro_batches, 0)
    found = []
    for _ in range(MINI_BATCHES):
        walk.run_mini_batch()
        found.append(walk.moments)
        walk.moments = []
    return found


# -- the engine -------------------------------------------------------------------------------------------------------


class Kept(torch.autograd.Function):
    """Something that lives as long as the graph of a forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: weakref.WeakSet) -> Tensor:
        ctx.token = Token()
        alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        return (*gradients, None)


class Token:
    """A micro-batch in flight."""


class Layer(nn.Linear):
    """A stage."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        return Kept.apply(super().forward(x), self.alive)  # type: ignore[no-untyped-call,no-any-return]


@dataclass
class Counter:
    """Counts what an engine has, whoever holds it."""

    engine: Engine
    layer: Layer
    moments: list[Held] = field(default_factory=list)
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)

    def attach(self) -> None:
        """Look before every action."""
        engine: Any = self.engine
        for leaf in self.leaves():
            leaf.register_post_accumulate_grad_hook(self.see)
        engine._forward = self.looking("forward", engine._forward)
        engine._backward = self.looking("backward", engine._backward)

    def leaves(self) -> list[Tensor]:
        """The matrix of this stage, in every version."""
        return [leaf for slot in self.engine.weights._slots for leaf in slot.values()]

    def see(self, leaf: Tensor) -> None:
        """A gradient was made, or added to."""
        assert leaf.grad is not None
        self.gradients.append(weakref.ref(leaf.grad))

    def looking(self, during: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any) -> Any:
            self.look(during)
            return act(*arguments)

        return looked

    def look(self, during: str) -> None:
        versions = {leaf.data_ptr() for leaf in self.leaves()}
        assert self.layer.weight.data_ptr() in versions, "the parameter is one of them"
        alive = {g.data_ptr() for reference in self.gradients if (g := reference()) is not None}
        self.moments.append(Held(during, len(versions), len(alive), len(self.layer.alive)))


def held(settings: ResolvedSettings, mesh: Mesh, neighbours: Neighbours) -> list[list[Held]]:
    """The same, of an engine that trains."""
    model = nn.Sequential(*(Layer() for _ in range(mesh.num_stages)))
    stage = cut(model, mesh.stage, mesh.num_stages, 0, CPU, counts=(1,) * mesh.num_stages)
    transport = Transport(mesh, CPU, 2**20, neighbours=neighbours)
    engine = Engine(stage, mesh, settings, 0, CPU, UserHooks(), transport=transport)
    layer: Any = stage.units[0].module
    counter = Counter(engine, layer)
    counter.attach()
    optimizer = torch.optim.SGD(stage.parameters.values(), lr=0.1)

    def apply(_: Any) -> None:
        counter.look("update")
        optimizer.step()

    engine.updates.apply = apply
    found = []
    for _ in range(MINI_BATCHES):
        engine.run(torch.ones(2 * settings.micro_batches, WIDTH), lambda batch, _: stage.model(batch).square().mean())
        engine.close()
        engine.apply_due()
        found.append(counter.moments)
        counter.moments = []
    engine.drain()
    return found


ARGUMENTS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "uniform, lookahead": {"lookahead": 2},
    "synchronous": {"delay": 0},
    "least": {"staleness": "least"},
    "least, slack 1": {"staleness": "least", "slack": 1},
    "least, slack 2": {"staleness": "least", "slack": 2},
    "least, slack exact": {"staleness": "least", "slack": "exact"},
    "least, lookahead": {"staleness": "least", "lookahead": 2},
    "least, all": {"staleness": "least", "slack": 9},
}
SETS = {  # of gradients, at most: on the stages before the last one, and there
    "synchronous": (1, 1), "fresh": (2, 1), "least": (1, 1), "least, lookahead": (1, 1), "least, slack exact": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_engine_holds_what_was_planned(name: str, num_stages: int) -> None:
    """From the second mini-batch on: the very first micro-batch is run to its end on all stages."""
    settings = PipelineSettings(micro_batches=6, **ARGUMENTS[name]).resolved(num_stages)
    taken = run_in_turns(num_stages, lambda mesh, neighbours: held(settings, mesh, neighbours), CPU)
    for stage, moments in enumerate(taken):
        assert moments[1:] == planned(settings, stage)[1:], f"stage {stage}"
    most = [max(moment.gradients for moment in moments[-1]) for moments in taken]
    assert (most[0], most[-1]) == SETS.get(name, (2, 2))
