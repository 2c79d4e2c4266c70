"""All stages of a recipe's pipeline, profiled one after the other; of two alike in the middle, one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.elsewhere import OtherStage
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import Unit, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models.moe import Experts
from lightning_asyncpp.tools.plan.fake_tensors import Meter, NeedsValueError, empty_like, fake_tensors, without_memory
from lightning_asyncpp.tools.plan.gpu_kernels import as_on_gpu, kernels_of_gpu
from lightning_asyncpp.tools.plan.memory import Memory, StageRun, peak_of
from lightning_asyncpp.tools.plan.profile import Profile, StageJob, profile
from lightning_asyncpp.tools.plan.recipe import Recipe, quiet

_BY_SIZES = "by numbers of parameters"
_MEASURED = (
    "a training cuts this model by times that it measures with example_input_array, this plan by numbers of parameters,"
    " {}: to plan the cut that a training logs, pass it as --trainer.strategy.init_args.partition"
)


class Stages:
    """The stages of a recipe, profiled.

    Args:
        recipe: what is planned.
        settings: its pipeline.
        on_gpu: stand for the kernels of a GPU, or take those of the CPU.

    Attributes:
        units: layers of the whole model that are cut between.
        partition: how many of them each stage has, and how that was chosen.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """

    def __init__(self, recipe: Recipe, settings: ResolvedSettings, on_gpu: bool) -> None:
        self.recipe, self.settings, self.on_gpu = recipe, settings, on_gpu
        self.units = pipeline_units(recipe.model)
        self.partition = choose_partition(recipe.model, 0, settings.num_stages, settings.partition)
        self._whole, problems = WholeModel.of(self.units, self.partition.counts)
        if problems:
            raise ConfigurationError.from_problems(problems)
        hooks = UserHooks.of(recipe.module, forward_context=recipe.trainer.precision_plugin.forward_context)
        self._hooks = replace(hooks, micro_batch_weight=lambda _: 1.0)
        self._slots: list[Any] = hooks.split_batch(recipe.batch, settings.micro_batches)
        if self.partition.source == _BY_SIZES and recipe.module.example_input_array is not None:
            recipe.notes.append(_MEASURED.format(list(self.partition.counts)))
        with recipe.trainer.precision_plugin.forward_context():
            for module in recipe.model.modules():
                if isinstance(module, Experts):  # they try a kernel first, and look at what it computes
                    module.use_grouped(torch.device("cpu"))
        self.profiles = self._profiles()

    def units_of(self, stage: int) -> list[Unit]:
        """Return the layers of a stage."""
        first = sum(self.partition.counts[:stage])
        return list(self.units[first : first + self.partition.counts[stage]])

    def schedule(self, stage: int) -> Schedule:
        """Return the schedule of a stage."""
        return self._whole.schedule(self.settings, stage)

    def memory(self) -> list[Memory]:
        """Return what is alive on each stage when it is most."""
        batch = sum(tensor.nbytes for slot in self._slots for tensor in tensors_of(slot))
        settings, last = self.settings, self.settings.num_stages - 1
        runs = [
            StageRun(
                self.schedule(stage), settings.micro_batches, self.recipe.accumulated, settings.data_parallel_size,
                not self.on_gpu,
            )
            for stage in range(settings.num_stages)
        ]  # fmt: skip
        return [
            peak_of(run, profiles, batch if stage in (0, last) else 0)
            for stage, (run, profiles) in enumerate(zip(runs, self.profiles))
        ]

    def _profiles(self) -> list[list[Profile]]:
        """Return of each stage what every microbatch of a batch takes; those that are empty are left out."""
        known: dict[Any, list[Profile]] = {}
        keys = []
        for slot in (slot for slot in self._slots if slot is not None):
            keys.append(tuple((tuple(t.shape), t.dtype) for t in tensors_of(slot)))
            if keys[-1] not in known:
                with preserved_generators(torch.device("cpu")), kernels_of_gpu(self.on_gpu), quiet():
                    known[keys[-1]] = self._profile(slot)
        return [list(of_stage) for of_stage in zip(*(known[key] for key in keys))]

    def _profile(self, slot: Any) -> list[Profile]:
        found: list[Profile] = []
        for index in range(self.settings.num_stages):
            if (twin := self._twin(index)) is not None and found[twin - 1].sent == found[index - 1].sent:
                found.append(found[twin])
                continue
            with fake_tensors(), Meter() as meter, self._stage(index) as stage:
                job = self._job(stage, map_tensors(empty_like, slot), found[-1].sent if found else None)
                found.append(profile(job, meter))
        return found

    def _twin(self, index: int) -> int | None:
        """Return an earlier stage in the middle with layers like this one's, neither sharing weights with others."""
        tied = {stage for tie in self._whole.ties for stage in tie.stages}
        if index == self.settings.num_stages - 1 or index in tied:
            return None
        own = described(self.units_of(index))
        return next((o for o in range(1, index) if o not in tied and described(self.units_of(o)) == own), None)

    def _job(self, stage: Stage, slot: Any, arriving: Header | None) -> StageJob:
        rule = self.schedule(stage.index).stage_rule
        return StageJob(
            stage, rule.num_versions, self.settings.compute_dtype, slot if stage.is_first or stage.is_last else None,
            arriving, self._hooks, self._step(), self._make_optimizer,
            rule.staleness(self.settings.micro_batches * self.recipe.accumulated),
        )  # fmt: skip

    def _step(self) -> Callable[[Any, float], Any]:
        """Return the user's training step, as Lightning calls it; of one that looks at values the model's output."""
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
                self.recipe.notes.append("training_step looks at values: of its memory the model's output alone counts")
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
        """Cut the model to one stage, without memory; afterwards it is whole again."""
        counts, model = self.partition.counts, self.recipe.model
        own, first = self.units_of(index), sum(counts[:index])
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        try:
            for unit, stage in zip(self.units, stage_of):
                for name in unit.submodules if stage != index else ():
                    _replace(model, name, OtherStage(name, stage, len(counts), self._whole))
            for unit in own:  # what they share with others
                for name, module in unit.submodules.items():
                    _replace(model, name, module)
            with without_memory([unit.module for unit in own]):
                yield Stage(model, index, len(counts), own, first, self._whole)
        finally:
            for unit in self.units:
                for name, module in unit.submodules.items():
                    _replace(model, name, module)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def described(units: Sequence[Unit]) -> list[Any]:
    """Return what decides on memory and time: layers as they print, shapes, and which tensors are the same."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for unit in units:
        found.append((unit.function, repr(unit.module), unit.module.training))
        held = [*unit.module.named_parameters(remove_duplicate=False), *unit.module.named_buffers()]
        for name, tensor in held:
            number = numbers.setdefault(id(tensor), len(numbers))
            found.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number))
    return found
