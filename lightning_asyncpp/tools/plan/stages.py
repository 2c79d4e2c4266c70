"""All stages of a recipe's pipeline, profiled one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.elsewhere import second_names, uses_of
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import Unit, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.stage_optimizer import StageOptimizer
from lightning_asyncpp.core.wire.header import Header
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models.moe import Experts
from lightning_asyncpp.tools.plan.fake_tensors import FAKE, Meter, empty_like
from lightning_asyncpp.tools.plan.gpu_kernels import as_on_gpu, kernels_of_gpu
from lightning_asyncpp.tools.plan.memory import Memory, peak_of
from lightning_asyncpp.tools.plan.profile import Profile, StageUnderTest
from lightning_asyncpp.tools.plan.recipe import Recipe


class Stages:
    """The stages of a recipe, profiled.

    Args:
        recipe: what is planned.
        settings: its pipeline.
        on_gpu: stand for the kernels of a GPU, or take those of the CPU.

    Attributes:
        partition: how many layers each stage has, and how that was chosen.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """

    def __init__(self, recipe: Recipe, settings: ResolvedSettings, on_gpu: bool) -> None:
        self.recipe, self.settings, self.on_gpu = recipe, settings, on_gpu
        self._units = pipeline_units(recipe.model)
        self.partition = choose_partition(recipe.model, 0, settings.num_stages, settings.partition)
        self._whole, problems = WholeModel.of(self._units, self.partition.counts)
        if problems:
            raise ConfigurationError.from_problems(problems)
        hooks = UserHooks.of(recipe.module, forward_context=recipe.trainer.precision_plugin.forward_context)
        self._hooks = replace(hooks, micro_batch_weight=lambda _: 1.0)
        self._micro_batch = hooks.split_batch(recipe.batch, settings.micro_batches)[0]  # the largest
        self.per_update = settings.micro_batches * recipe.accumulated
        with recipe.trainer.precision_plugin.forward_context():
            for module in recipe.model.modules():
                if isinstance(module, Experts):  # they try a kernel first, and look at what it computes
                    module.use_grouped(torch.device("cpu"))
        self.profiles = self._profiles()

    def units_of(self, stage: int) -> list[Unit]:
        """Return the layers of a stage."""
        first = sum(self.partition.counts[:stage])
        return list(self._units[first : first + self.partition.counts[stage]])

    def schedule(self, stage: int) -> Schedule:
        """Return the schedule of a stage."""
        return self._whole.schedule(self.settings, stage)

    def memory(self) -> list[Memory]:
        """Return what is alive on each stage when it is most."""
        batch = sum(tensor.nbytes for tensor in tensors_of(self.recipe.batch))
        replicas, last = self.settings.data_parallel_size, self.settings.num_stages - 1
        return [
            peak_of(self.schedule(stage), profile, self.per_update, batch if stage in (0, last) else 0, replicas)
            for stage, profile in enumerate(self.profiles)
        ]

    def _profiles(self) -> list[Profile]:
        """Run each stage once, of those that are alike the first."""
        tied = {stage for tie in self._whole.ties for stage in tie.stages}
        known: dict[Any, Profile] = {}
        found: list[Profile] = []
        with preserved_generators(torch.device("cpu")), kernels_of_gpu(self.on_gpu):
            for index in range(self.settings.num_stages):
                arriving = found[-1].sent if found else None
                is_unlike = index in tied or index in (0, self.settings.num_stages - 1)
                key = repr((index if is_unlike else described(self.units_of(index)), arriving))
                if key not in known:
                    known[key] = self._profile(index, arriving)
                found.append(known[key])
        return found

    def _profile(self, index: int, arriving: Header | None) -> Profile:
        module, own = self.recipe.module, self.units_of(index)
        first, outside = sum(self.partition.counts[:index]), second_names(module, own, uses_of(own))
        model, num_stages = self.recipe.model, self.settings.num_stages
        stage = Stage(model, index, num_stages, own, first, self._whole, module, outside)
        batch = map_tensors(empty_like, self._micro_batch) if stage.is_first or stage.is_last else None
        with FAKE, Meter((*module.parameters(), *module.buffers())) as meter:
            return StageUnderTest(
                stage, meter, self.schedule(index).stage_rule.num_versions, self.settings.compute_dtype, batch,
                arriving, self._hooks, self._step(), self._optimizer(stage),
            ).profile()  # fmt: skip

    def _step(self) -> Callable[[Any, float | None], Any]:
        """Return the user's training step, called as Lightning calls it."""
        step = self.recipe.module.training_step
        index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return lambda micro_batch, weight: step(micro_batch, *index)

    def _optimizer(self, stage: Stage) -> Optimizer:
        """Return the recipe's, with the parameters of a stage alone."""
        optimizer = self.recipe.make_optimizer()
        if self.on_gpu:
            as_on_gpu(optimizer)
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay(self.schedule(stage.index).stage_rule.staleness(self.per_update))
        StageOptimizer(optimizer, stage.parameters.values()).keep_own()
        return optimizer


def described(units: list[Unit]) -> list[Any]:
    """Return what decides on memory and time: layers as they print, their modes, shapes, and what they share."""
    layers = nn.ModuleList(unit.module for unit in units)
    tensors = (*layers.named_parameters(), *layers.named_buffers())  # shared ones once
    return [
        [unit.function for unit in units],
        layers,
        [module.training for module in layers.modules()],
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    ]
