"""All stages of a recipe's pipeline, profiled one after the other."""

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
from lightning_asyncpp.tools.plan.fake_tensors import Meter, empty_like, fake_tensors, without_memory
from lightning_asyncpp.tools.plan.gpu_kernels import as_on_gpu, kernels_of_gpu
from lightning_asyncpp.tools.plan.memory import Memory, peak_of
from lightning_asyncpp.tools.plan.profile import Profile, StageUnderTest
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
        self._micro_batch = hooks.split_batch(recipe.batch, settings.micro_batches)[0]  # the largest
        self.per_update = settings.micro_batches * recipe.accumulated
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
        batch = sum(tensor.nbytes for tensor in tensors_of(self.recipe.batch))
        replicas, last = self.settings.data_parallel_size, self.settings.num_stages - 1
        return [
            peak_of(
                self.schedule(stage), profile, self.per_update, batch if stage in (0, last) else 0, replicas,
                not self.on_gpu,
            )
            for stage, profile in enumerate(self.profiles)
        ]  # fmt: skip

    def _profiles(self) -> list[Profile]:
        """Run each stage once, of those that are alike the first."""
        tied = {stage for tie in self._whole.ties for stage in tie.stages}
        known: dict[Any, Profile] = {}
        found: list[Profile] = []
        with preserved_generators(torch.device("cpu")), kernels_of_gpu(self.on_gpu), quiet():
            for index in range(self.settings.num_stages):
                arriving, ends = found[-1].sent if found else None, index in (0, self.settings.num_stages - 1)
                own = index if ends or index in tied else described(self.units_of(index))
                key = repr((own, arriving))
                if key not in known:
                    known[key] = self._profile(index, arriving)
                found.append(known[key])
        return found

    def _profile(self, index: int, arriving: Header | None) -> Profile:
        with fake_tensors(), Meter() as meter, self._stage(index) as stage:
            batch = map_tensors(empty_like, self._micro_batch) if stage.is_first or stage.is_last else None
            return StageUnderTest(
                stage, meter, self.schedule(index).stage_rule, self.per_update, self.settings.compute_dtype, batch,
                arriving, self._hooks, self._step(), self._make_optimizer,
            ).profile()  # fmt: skip

    def _step(self) -> Callable[[Any, float | None], Any]:
        """Return the user's training step, called as Lightning calls it."""
        step = self.recipe.module.training_step
        kinds = [p.kind for p in inspect.signature(step).parameters.values()]
        positional = [k for k in kinds if k in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
        # Whatever the second argument is called, it is the batch's index.
        index = (0,) if len(positional) > 1 or Parameter.VAR_POSITIONAL in kinds else ()
        return lambda micro_batch, weight: step(micro_batch, *index)

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
        for name, tensor in (*unit.module.named_parameters(remove_duplicate=False), *unit.module.named_buffers()):
            number = numbers.setdefault(id(tensor), len(numbers))
            found.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number))
    return found
