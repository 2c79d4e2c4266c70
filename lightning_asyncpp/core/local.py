"""P stages in one process, all on one whole model, with messages in memory.

Every stage has a :class:`~lightning_asyncpp.core.engine.StageEngine`, a schedule and weight versions, as in a separate
process. Stages take turns: each runs its next action when the action's inputs have arrived. Nothing blocks, so
the order is the same in every run, errors have the stack trace of the code that raised them, and a deadlock raises an
error at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.ties import Tie
from lightning_asyncpp.core.engine import Actions, Engine, StageEngine
from lightning_asyncpp.core.local_messages import LocalMesh, LocalTransport, Mailbox
from lightning_asyncpp.core.microbatch import BatchOutput, Step, UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import stage_runner
from lightning_asyncpp.core.schedule import Action, Kind
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.weights import WeightVersions

T = TypeVar("T")


class LocalPipeline(Engine):
    """All stages of a pipeline, of which callers see the whole model.

    Args:
        whole: the whole model as one stage, for evaluation and for names.
        stages: the same model as P stages.
        settings: resolved settings for P stages.
        seed: seed of the run.
        device: device of all stages.
        hooks: user's hooks for microbatches and the loss.
    """

    weights: AllWeights

    def __init__(
        self,
        whole: Stage,
        stages: Sequence[Stage],
        settings: ResolvedSettings,
        seed: int,
        device: torch.device,
        hooks: UserHooks,
    ) -> None:
        self._ties = share(stages)
        self._mailbox = Mailbox(len(stages))
        self._turns = _Turns(whole.root, len(stages))

        def engine(stage: Stage) -> StageEngine:
            mesh = LocalMesh(self._mailbox, len(stages), stage.index)
            transport = LocalTransport(self._mailbox, stage.index, device) if len(stages) > 1 else None
            return StageEngine(stage, mesh, settings, seed, device, hooks, transport=transport)

        engines, mesh = [engine(stage) for stage in stages], Mesh(1, 1, 0)
        weights = AllWeights([engine.weights for engine in engines], self._ties, whole.uses)
        super().__init__(engines, mesh, stage_runner(whole, mesh, None, hooks, seed, device), weights)

    def run(self, batch: Any, step: Step, after_update: Callable[[], object] = lambda: None) -> BatchOutput:
        """Run a training batch on all stages; see :meth:`Engine.run`."""
        self.weights.adopt()  # hooks may have changed weights
        with self._turns.drawing():
            return super().run(batch, step, after_update)

    # -- turns ----------------------------------------------------------------------------------------------------

    def _run_all(self, actions: Callable[[StageEngine], Actions[T]]) -> list[T]:
        """Run the actions of all stages, each when its inputs have arrived; return each stage's result.

        Raises:
            RuntimeError: every stage waits for another stage.
        """
        of_stages = [actions(stage) for stage in self.stages]
        results: dict[int, T] = {}
        waiting: dict[int, Action] = {}

        def advance(number: int) -> None:
            action = waiting.pop(number, None)
            self._turns.take(number)
            try:
                waiting[number] = next(of_stages[number])
            except StopIteration as end:
                results[number] = end.value
            if action is not None and action.kind is Kind.UPDATE:
                self.weights.follow_owners(number)

        with self._turns:
            for number in range(len(of_stages)):
                advance(number)
            while waiting:
                before = dict(waiting)
                for number in sorted(waiting, reverse=True):
                    while number in waiting and self._is_ready(number, waiting[number]):
                        advance(number)
                if waiting == before:
                    waits = ", ".join(f"stage {number}: {action}" for number, action in waiting.items())
                    raise RuntimeError(f"every stage waits for another stage ({waits}): the schedule has a deadlock")
        return [results[number] for number in range(len(of_stages))]

    def _is_ready(self, number: int, action: Action) -> bool:
        """Return whether a stage can run an action without waiting."""
        stage, mailbox = self.stages[number], self._mailbox
        if action.kind is Kind.FORWARD:
            return stage.mesh.is_first or bool(mailbox.activations[number])
        if action.kind is Kind.BACKWARD:
            # A microbatch without a gradient waits, too: later stages must complete shared weights' gradients first.
            return stage.mesh.is_last or self.stages[number + 1].next_backward > action.index
        mini_batch = next((m for m in stage.updates.pending if m.index == action.index), None)
        if mini_batch is None:
            return True  # a drain has applied the update
        if any(
            number in tie.stages[1:] and self.stages[tie.stages[0]].weights.newest <= action.index for tie in self._ties
        ):
            return False  # the owner must apply this update first, since the stage copies the owner's weights
        for other in reversed(self.stages):
            other.updates.progress()
        if mini_batch.tied is not None and not mini_batch.tied.has_whole_sums():
            return False
        steps_ahead = stage.schedule.steps_ahead(action.index) and not mini_batch.stepped
        return steps_ahead or len(self.stages) == 1 or action.index in mailbox.totals


def _python_draws() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_python_draws(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class _Turns:
    """Module attributes and random states of each stage, so that user code runs as if each stage had its own process.

    An attribute that is assigned to the module during a stage's turn belongs to that stage. An attribute that is
    assigned between turns belongs to all stages. Outside of turns the module has the attributes of the last stage.
    Within a batch, every stage has its own copy of the states of Python's and NumPy's generators, all equal at the
    start of the batch, so that the first and the last stage draw the same numbers.

    Args:
        module: the user's module.
        stages: number of stages.
    """

    def __init__(self, module: nn.Module, stages: int) -> None:
        self._present = vars(module)
        self._shown = dict(self._present)  # attributes after the last turn
        self._of_stages = [dict(self._present) for _ in range(stages)]  # the running stage's entry is outdated
        self._draws: list[tuple[Any, Any]] = []
        self._now = self._last = stages - 1

    def __enter__(self) -> None:
        changed = {k: v for k, v in self._present.items() if k not in self._shown or v is not self._shown[k]}
        gone = self._shown.keys() - self._present.keys()
        for attributes in self._of_stages if changed or gone else ():
            attributes.update(changed)
            for name in gone & attributes.keys():
                del attributes[name]

    def __exit__(self, *_: object) -> None:
        self.take(self._last)
        self._shown = dict(self._present)

    def take(self, number: int) -> None:
        """Switch to a stage."""
        if number == self._now:
            return
        self._of_stages[self._now] = dict(self._present)
        self._present.update(self._of_stages[number])
        for name in self._present.keys() - self._of_stages[number].keys():
            del self._present[name]
        if self._draws:
            self._draws[self._now] = _python_draws()
            _set_python_draws(self._draws[number])
        self._now = number

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Start all stages from the generators' present states; at the end, keep the last stage's states."""
        before = _python_draws()
        self._draws = [before] * len(self._of_stages)
        try:
            yield
        except BaseException:
            _set_python_draws(before)
            raise
        finally:
            self._draws = []


class AllWeights:
    """Weight versions of all stages, by their names in the whole model.

    Versions and masters are explained in :mod:`lightning_asyncpp.core.weights`. The first stage that has a shared
    parameter owns it: only the owner's optimizer step changes the parameter, and later stages copy it.

    Args:
        stages: weights of each stage, in order.
        ties: trained parameters that several stages share.
        uses: name of a shared parameter in a later layer -> its name in the first layer that has it.
    """

    def __init__(self, stages: Sequence[WeightVersions], ties: Sequence[Tie], uses: Mapping[str, str]) -> None:
        self._all, self._ties, self._shared_uses = stages, ties, uses
        self._copies = {copy for tie in ties for copy in zip(tie.stages[1:], tie.names[1:])}
        self.parameters = self._merged(lambda weights: weights.parameters)
        self.buffers = self._merged(lambda weights: weights.buffers)

    @property
    def newest(self) -> int:
        """Newest version that all stages have."""
        return min(weights.newest for weights in self._all)

    def of_stage(self, number: int, values: Mapping[str, T]) -> dict[str, T]:
        """Select the values of a stage's parameters and buffers from the values of the whole model."""
        names = {tie.name_on(number): tie.names[0] for tie in self._ties if number in tie.stages}
        own = self._all[number]
        wanted = {name: names.get(name, name) for name in (*own.parameters, *own.buffers)}
        return {name: values[at] for name, at in wanted.items() if at in values}

    def for_evaluation(self) -> dict[str, Tensor] | None:
        """Return the leaf tensors of the newest version; None if they are the module's parameters."""
        if not self._all[0].has_masters:
            return None
        found = self._merged(lambda weights: weights.leaves(weights.newest))
        return found | {use: found[name] for use, name in self._shared_uses.items() if name in found}

    def older(self) -> dict[str, Tensor]:
        """Return the weights of the version before the newest, from the stages that have two versions."""
        return self._merged(lambda weights: weights.older())

    def masters(self) -> dict[str, Tensor]:
        """Return the masters by name; empty without masters."""
        return self._merged(lambda weights: weights.masters())

    def restore(self, newest: int, older: Mapping[str, Tensor] = {}, masters: Mapping[str, Tensor] = {}) -> None:
        """Set version ``newest`` from the parameters, the version before it from ``older``, and then the masters."""
        for tie in self._ties:  # only the owners' parameters were loaded
            loaded = self._all[tie.stages[0]].parameters[tie.names[0]]
            for stage, name in zip(tie.stages[1:], tie.names[1:]):
                self._all[stage].parameters[name].data.copy_(loaded.data)
        for number, weights in enumerate(self._all):
            weights.restore(newest, self.of_stage(number, older), self.of_stage(number, masters))

    def adopt(self, unseen: bool = False) -> None:
        """Copy changes of the parameters since the last update into the newest version."""
        for weights in self._all:
            weights.adopt(unseen)
        for number in range(len(self._all)):
            self.follow_owners(number)

    def follow_owners(self, number: int) -> None:
        """Copy the owners' newest values into a stage's copies of shared parameters."""
        own = self._all[number]
        for tie in self._ties:
            owner = self._all[tie.stages[0]]
            if number in tie.stages[1:] and own.newest == owner.newest:
                name, owners_name = tie.name_on(number), tie.names[0]
                own.leaves(own.newest)[name].data.copy_(owner.leaves(owner.newest)[owners_name].data)
                if own.has_masters:
                    own.parameters[name].data.copy_(owner.parameters[owners_name].data)

    def release_masters(self) -> None:
        """Replace masters in the module by the newest weights; see :meth:`WeightVersions.release_masters`."""
        for weights in self._all:
            weights.release_masters()

    def to_host(self) -> None:
        """Move all versions to the host."""
        for weights in self._all:
            weights.to_host()

    def _merged(self, values_of: Callable[[WeightVersions], Mapping[str, T]]) -> dict[str, T]:
        return {
            name: value
            for number, weights in enumerate(self._all)
            for name, value in values_of(weights).items()
            if (number, name) not in self._copies
        }


def share(stages: Sequence[Stage]) -> list[Tie]:
    """Give each later stage a copy of every trained parameter that it shares with an earlier stage; return the ties.

    The stages step at different times, so they cannot share the memory of their versions.
    """
    ties = [tie for tie in stages[0].whole.ties if stages[tie.stages[0]].parameters[tie.names[0]].requires_grad]
    for tie in ties:
        for stage, name in zip(tie.stages[1:], tie.names[1:]):
            stages[stage].parameters[name] = nn.Parameter(stages[stage].parameters[name].detach().clone())
    return ties
