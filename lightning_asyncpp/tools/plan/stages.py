"""All stages of a recipe's pipeline, looked at one after the other on tensors without memory; of two alike, at one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.elsewhere import OtherStage
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.partition_choice import Asked, choose_partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import Unit, collective_problems, ownership_problems, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models.moe import Experts
from lightning_asyncpp.tools.plan.fake_tensors import Meter, NeedsValueError, empty_like, fake_tensors, without_memory
from lightning_asyncpp.tools.plan.gpu_kernels import as_on_gpu, kernels_of_gpu
from lightning_asyncpp.tools.plan.in_flight import Memory, StageSchedule, peak_of
from lightning_asyncpp.tools.plan.planned_recipe import Recipe, quiet, resized
from lightning_asyncpp.tools.plan.stage_run import Profile, StageJob, profile

_BY_SIZES = "by numbers of parameters"
_MEASURED = (
    "a training cuts this model by times that it measures with example_input_array, this plan by numbers of parameters,"
    " {}: stages, memory and times may differ; plan the cut that a training logs with"
    " --trainer.strategy.init_args.partition"
)
_HOLDERS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        units: of the whole model.
        partition: number of them on each stage, and how that was chosen.
        whole: what all stages know of it.
        note: how a training may cut it otherwise; empty if it does not.
    """

    units: tuple[Unit, ...]
    partition: Partition
    whole: WholeModel
    note: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of units on each stage."""
        return self.partition.counts

    def first(self, stage: int) -> int:
        """Position of the first unit of a stage."""
        return sum(self.counts[:stage])

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """The units of a stage."""
        return self.units[self.first(stage) : self.first(stage + 1)]


def cut_of(recipe: Recipe, num_stages: int, asked: Asked) -> Cut:
    """Where the strategy cuts the recipe's model; where it would measure, by numbers of parameters, and it says so.

    Args:
        recipe: with the whole model.
        num_stages: P.
        asked: the strategy's argument ``partition``.

    Raises:
        ConfigurationError: it cannot; all reasons are named.
    """
    units = pipeline_units(recipe.model)
    partition = choose_partition(recipe.model, 0, num_stages, asked)
    whole, problems = WholeModel.of(units, partition.counts)
    problems = ownership_problems(recipe.module, units) + problems + collective_problems(units)
    if problems:
        raise ConfigurationError.from_problems(problems)
    measured = partition.source == _BY_SIZES and recipe.module.example_input_array is not None
    return Cut(tuple(units), partition, whole, _MEASURED.format(list(partition.counts)) if measured else "")


class Stages:
    """The stages of a recipe.

    Args:
        recipe: what is planned.
        settings: its pipeline; stages, replicas, delay and dtypes of it hold for everything that is asked.
        on_gpu: stand for the kernels of a GPU, or take those of the CPU.
    """

    def __init__(self, recipe: Recipe, settings: ResolvedSettings, on_gpu: bool) -> None:
        self.recipe, self.settings, self.on_gpu = recipe, settings, on_gpu
        self.cut = cut_of(recipe, settings.num_stages, settings.partition)
        hooks = UserHooks.of(recipe.module, forward_context=recipe.trainer.precision_plugin.forward_context)
        self._split = hooks.split_batch
        self._hooks = replace(hooks, micro_batch_weight=lambda _: 1.0)
        self._known: dict[Any, list[Profile]] = {}
        with recipe.trainer.precision_plugin.forward_context():
            for module in recipe.model.modules():
                if isinstance(module, Experts):  # they try a kernel first, and look at what it computes
                    module.use_grouped(torch.device("cpu"))

    def profiles(self, micro_batches: int, batch_size: int) -> list[list[Profile]]:
        """Of each stage, what every micro-batch of a batch takes; those that are empty are left out."""
        slots = [slot for slot in self._slots(micro_batches, batch_size) if slot is not None]
        return [list(of_stage) for of_stage in zip(*map(self._of_slot, slots))]

    def memory(self, micro_batches: int, lookahead: int, batch_size: int) -> list[Memory]:
        """What is alive on each stage when it is most."""
        found = self.profiles(micro_batches, batch_size)
        batch = sum(t.nbytes for slot in self._slots(micro_batches, batch_size) for t in tensors_of(slot))
        last = self.settings.num_stages - 1
        return [
            peak_of(self.schedule(stage, micro_batches, lookahead), slots, batch if stage in (0, last) else 0)
            for stage, slots in enumerate(found)
        ]

    def schedule(self, stage: int, micro_batches: int, lookahead: int) -> StageSchedule:
        """How a stage is run once a synchronous start is over."""
        schedule = self.cut.whole.schedule(replace(self.settings, lookahead=lookahead), stage)
        schedule = replace(schedule, pipeline_rule=StalenessRule(self.settings.delay))
        return StageSchedule(schedule, micro_batches, self.recipe.accumulated, not self.on_gpu)

    def _slots(self, micro_batches: int, batch_size: int) -> list[Any]:
        batch = resized(self.recipe.batch, self.recipe.batch_size, batch_size)
        slots: list[Any] = self._split(batch, micro_batches)
        return slots

    def _of_slot(self, slot: Any) -> list[Profile]:
        key = tuple((tuple(t.shape), t.dtype) for t in tensors_of(slot))
        if key not in self._known:
            with preserved_generators(torch.device("cpu")), kernels_of_gpu(self.on_gpu), quiet():
                self._known[key] = self._run(slot)
        return self._known[key]

    def _run(self, slot: Any) -> list[Profile]:
        earlier = next(iter(self._known.values()), None)
        found: list[Profile] = []
        for index in range(self.settings.num_stages):
            if (twin := self._twin(index)) is not None and found[twin - 1].sent == found[index - 1].sent:
                found.append(found[twin])
                continue
            with fake_tensors(), Meter() as meter, self._stage(index) as stage:
                job = self._job(stage, map_tensors(empty_like, slot), found[-1].sent if found else None)
                found.append(profile(job, meter, earlier[index] if earlier else None))
        return found

    def _twin(self, index: int) -> int | None:
        """An earlier stage in the middle that has layers like this one's, and shares no weight with another stage."""
        tied = {stage for tie in self.cut.whole.ties for stage in tie.stages}
        if index == self.settings.num_stages - 1 or index in tied:
            return None
        own = self.cut.units_of(index)
        return next((o for o in range(1, index) if o not in tied and alike(self.cut.units_of(o), own)), None)

    def _job(self, stage: Stage, slot: Any, arriving: Header | None) -> StageJob:
        rule = stage.whole.schedule(self.settings, stage.index).stage_rule
        return StageJob(
            stage, self.settings.data_parallel_size, rule.num_versions, self.settings.compute_dtype,
            slot if stage.is_first or stage.is_last else None, arriving, self._hooks, self._step(),
            self._make_optimizer, rule.staleness(self.settings.micro_batches * self.recipe.accumulated),
        )  # fmt: skip

    def _step(self) -> Callable[[Any, float], Any]:
        """The user's training step, as Lightning calls it; where it looks at values, the model's output is the loss."""
        module, model = self.recipe.module, self.recipe.model
        kinds = [p.kind for p in inspect.signature(module.training_step).parameters.values()]
        positional = [k for k in kinds if k in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
        # As Lightning does: whatever the second argument is called, it is the batch's index.
        index = (0,) if len(positional) > 1 or Parameter.VAR_POSITIONAL in kinds else ()

        def step(micro_batch: Any, weight: float) -> Any:
            outputs: list[Any] = []
            hook = model.register_forward_hook(lambda _, args, output: outputs.append(output))
            try:
                return module.training_step(micro_batch, *index)
            except NeedsValueError:
                if not outputs:
                    raise
                self.recipe.notes.append(
                    "training_step looks at values: of its memory, the model's output alone counts"
                )
                return torch.stack([t.float().sum() for t in tensors_of(outputs[0]) if t.requires_grad]).sum()
            finally:
                hook.remove()

        return step

    def _make_optimizer(self) -> Optimizer:
        optimizer = self.recipe.make_optimizer()
        if self.on_gpu:
            as_on_gpu(optimizer)
        return optimizer

    @contextmanager
    def _stage(self, index: int) -> Iterator[Stage]:
        """The model cut to one stage, without memory; afterwards it is whole again."""
        cut, model = self.cut, self.recipe.model
        first = cut.first(index)
        own = range(first, first + cut.counts[index])
        stage_of_unit = [stage for stage, count in enumerate(cut.counts) for _ in range(count)]
        try:
            for position, unit in enumerate(cut.units):
                for name in unit.submodules if position not in own else ():
                    _replace(model, name, OtherStage(name, stage_of_unit[position], len(cut.counts), cut.whole))
            units = list(cut.units_of(index))
            for unit in units:  # what they share with others
                for name, module in unit.submodules.items():
                    _replace(model, name, module)
            with without_memory([unit.module for unit in units]):
                yield Stage(model, index, len(cut.counts), units, first, cut.whole)
        finally:
            for unit in cut.units:
                for name, module in unit.submodules.items():
                    _replace(model, name, module)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def alike(first: Sequence[Unit], second: Sequence[Unit]) -> bool:
    """Whether layers of the same classes stand there in the same order, alike in everything that they hold.

    What cannot be compared counts as different.
    """
    if len(first) != len(second) or any(a.function is not b.function for a, b in zip(first, second)):
        return False
    return _described(first) == _described(second) and all(
        _same_attributes(a, b)
        for one, other in zip(first, second)
        for a, b in zip(one.module.modules(), other.module.modules())
    )


def _described(units: Sequence[Unit]) -> list[Any]:
    """Names and classes of all layers, shapes of what they hold, and which of it is the same tensor."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for unit in units:
        for name, module in unit.module.named_modules(remove_duplicate=False):
            found.append((name, type(module), module.training))
        held = [*unit.module.named_parameters(remove_duplicate=False), *unit.module.named_buffers()]
        for name, tensor in held:
            number = numbers.setdefault(id(tensor), len(numbers))
            found.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number))
    return found


def _same_attributes(first: nn.Module, second: nn.Module) -> bool:
    mine, others = ({k: v for k, v in vars(m).items() if k not in _HOLDERS} for m in (first, second))
    return mine.keys() == others.keys() and all(_same(mine[key], others[key]) for key in mine)


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # comparing is the user's code
        return False
