"""The gradient of a mini-batch in one process, summed over micro-batches in the order and arithmetic of a pipeline.

A parameter that several layers share has a gradient for each of them: a pipeline sums them apart and then adds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected, collecting
from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.batches.batch_output import BatchOutput
from lightning_asyncpp.core.batches.micro_batch import checked_weight
from lightning_asyncpp.core.batches.unequal_targets import UnequalTargets
from lightning_asyncpp.core.batches.user_hooks import Step, UserHooks, loss_of
from lightning_asyncpp.core.cut.units import Unit, layer_by_layer, pipeline_units
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.randomness import derive, preserved_generators, seed_generators
from lightning_asyncpp.core.updates.clipping import gradient_norm
from lightning_asyncpp.core.updates.reduction import plan_buckets
from lightning_asyncpp.core.weights import sum_of
from lightning_asyncpp.errors import ConfigurationError

_Place = tuple[nn.Module, str, nn.Parameter]


class MicroBatchGradient:
    """Sums w_k * gradient_k over micro-batches k and divides by the sum of w_k at the update, as a pipeline does.

    Random numbers are the pipeline's: the step draws from (seed, replica, k), and where ``model`` is made of layers
    that a pipeline could cut between, every layer from (seed, layer, replica, k).

    Args:
        parameters: name -> parameter, of all that may ever be trained.
        model: what the step calls; None if it is no single module.
        hooks: how the user cuts and weighs batches.
        count: micro-batches per batch, m.
        seed: the run's seed.
        device: where they are.
        replica: index of this process among the data-parallel ones.
        replicas: how many there are; they reduce over the default process group.

    Attributes:
        places: how many micro-batches of the mini-batch have run, or were empty.
        go_to: called with the place of a micro-batch in its mini-batch, before it runs.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module | None,
        hooks: UserHooks,
        count: int,
        seed: int,
        device: torch.device,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.parameters, self.model, self.hooks, self.count = dict(parameters), model, hooks, count
        self.seed, self.device, self.replica, self.replicas = seed, device, replica, replicas
        self.next_micro_batch = self.places = 0
        self.go_to: Callable[[int], None] = lambda place: None
        self.weight = 0.0
        self.counted = Collected()
        self.nan_places: list[Reading] = []  # of its batches, the first micro-batch whose loss is NaN, from 1; or 0
        self._unequal = UnequalTargets(hooks, listens=replica == 0, network=model)
        self._sums: dict[str, Tensor | None] = {}
        self._further_uses: list[tuple[str, Tensor | None]] = []  # name, sum of a later unit that shares a parameter
        self._norms: dict[str, float] = {}
        self._complete = False

    @property
    def pending(self) -> bool:
        """Whether batches ran whose gradient no update has used yet."""
        return self._complete or bool(self._sums)

    def run(self, batch: Any, step: Step) -> BatchOutput:
        """Add a batch: forward and backward of its micro-batches; :meth:`restore` shows the sum in ``grad`` afterwards.

        Args:
            batch: the batch; it is cut into micro-batches.
            step: called with a micro-batch and its weight; returns its loss, or a mapping with it under ``"loss"``.

        Raises:
            ConfigurationError: the batch was not cut into that many, or there is no loss to differentiate.
        """
        slots = self.hooks.split_batch(batch, self.count)
        if len(slots) != self.count:
            raise ConfigurationError(f"split_batch(batch, {self.count}) returned {len(slots)} micro-batches")
        self._unequal.look(slots)
        # Somebody's zero_grad() may come between two batches that share an update.
        for name, parameter in self.parameters.items():
            parameter.grad = self._sums.get(name)
        results, weights = [], []
        name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        with preserved_generators(self.device), uses_apart(self.model) as further_uses:
            for (_, use), (_, gradient) in zip(further_uses, self._further_uses):
                use.grad = gradient
            for k, slot in enumerate(slots, self.next_micro_batch):
                weight = 0.0 if slot is None else checked_weight(self.hooks.micro_batch_weight(slot))
                if weight:
                    self.go_to(self.places + k - self.next_micro_batch)
                    for parameter, use in further_uses:
                        use.data = parameter.data
                    results.append(self._run_micro_batch(k, slot, weight, step))
                    weights.append(weight)
            self._further_uses = [(name_of[id(parameter)], use.grad) for parameter, use in further_uses]
        self.next_micro_batch += len(slots)
        self.places += len(slots)
        self.weight += sum(weights)
        self._sums = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None  # a zero_grad() in place would take the sum away
        output = BatchOutput(results, weights)
        if (nan := output.nan_losses()) is not None:
            self.nan_places.append(Reading([nan[1]]))
        return output

    def restore(self) -> None:
        """Put the sum back into the parameters' ``grad``, whoever cleared it."""
        for name, gradient in self._sums.items():
            self.parameters[name].grad = gradient

    def complete(self) -> None:
        """Reduce over the replicas and divide by the sum of the weights; the parameters' ``grad`` holds the result."""
        if self._complete:
            return
        gradients = {name: gradient for name, gradient in self._sums.items() if self.parameters[name].requires_grad}
        further: dict[str, list[Tensor]] = {}
        for name, gradient in reversed(self._further_uses):
            further.setdefault(name, []).extend([] if gradient is None else [gradient])
        for name, others in further.items():  # the last layer's first, as stages add them
            own = gradients[name]
            gradients[name] = sum_of(others if own is None else [*others, own])
        sparse = [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]
        if sparse:
            raise ConfigurationError(
                f"sparse gradients ({', '.join(sparse[:5])}) cannot be summed as a pipeline does: make them dense"
                " (sparse=False), or leave micro_batches out"
            )
        if self.replicas > 1:
            gradients = self._reduced(gradients)
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self._norms = dict(zip(present, foreach.norms(list(present.values()), torch.float64).tolist()))
        if self.weight:
            foreach.divide_(list(present.values()), self.weight)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        self._complete = True

    def norm(self, names: Collection[str] | None = None) -> float:
        """2-norm of the mean gradient, once it is complete: fp64 sums, rounded to fp32.

        Args:
            names: of the parameters whose gradients count; default: all.
        """
        squares = math.fsum(n * n for name, n in self._norms.items() if names is None or name in names)
        return gradient_norm(squares, self.weight)

    @property
    def finite(self) -> bool:
        """Whether every element of the gradient is, once it is complete."""
        return math.isfinite(math.fsum(norm * norm for norm in self._norms.values()))

    def drop(self) -> None:
        """Throw away the gradient so far: it belongs to no update."""
        if self.pending:
            self.clear()

    def clear(self) -> None:
        """Begin the next mini-batch."""
        self._sums, self.weight, self.places, self._complete = {}, 0.0, 0, False
        self._further_uses, self.counted, self.nan_places = [], Collected(), []

    def _run_micro_batch(self, k: int, slot: Any, weight: float, step: Step) -> Any:
        with _units_seeded(self.model, lambda unit: derive(self.seed, "layer", unit, self.replica, k), self.device):
            seed_generators(derive(self.seed, "train", self.replica, k), self.device)
            with self.hooks.forward_context(), collecting() as said:
                result = step(slot, weight)
                for layer, counts in said.take_statistics().items():
                    self.counted.add(layer, counts)
        loss = loss_of(result)
        if not loss.requires_grad:
            if not any(parameter.requires_grad for parameter in self.parameters.values()):
                raise ConfigurationError(
                    "no parameter of the module requires a gradient: all of it is frozen and there is nothing to train"
                )
            raise ConfigurationError(
                "the loss that training_step returned does not depend on the module's parameters: it has no gradient;"
                " compute it without detach() or no_grad()"
            )
        seed_generators(derive(self.seed, "backward", 0, self.replica, k), self.device)
        weighed = [loss if self.hooks.loss_reduction == "sum" else loss * weight]
        torch.autograd.backward(weighed + [auxiliary * weight for auxiliary in said.losses])
        return result

    def _reduced(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        weight = torch.tensor([self.weight], dtype=torch.float64, device=self.device)
        dist.all_reduce(weight)
        self.weight = float(weight)
        reduced: dict[str, Tensor | None] = {}
        for bucket in plan_buckets({name: self.parameters[name] for name in gradients}):
            flat = bucket.pack(gradients)
            dist.all_reduce(flat)
            reduced.update(bucket.unpack(flat))
        return {name: reduced[name] for name in gradients}


@contextmanager
def uses_apart(model: nn.Module | None) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Let every unit that shares a trainable parameter with one before it run with another one with the same memory.

    A module of several units gets that of each in turn, one outside of them that of the last unit that began to run.

    Args:
        model: what a pipeline would cut; of one that it could not, or None, nothing is changed.

    Yields:
        (parameter, the other one) in the order of units.
    """
    units = _units(model)
    uses, in_use = _others(units)
    if model is None or not uses:
        yield []
        return
    shared = {parameter for parameter, _ in uses}
    inside = {module for unit in units for module in unit.module.modules()}
    places = [place for place in _places(model) if place[2] in shared]
    turns: dict[nn.Module, list[list[_Place]]] = {}  # one module may be several units
    for unit, now in zip(units, in_use):
        own = set(unit.module.modules())
        turn = [(m, name, now.get(p, p)) for m, name, p in places if m in own or m not in inside]
        turns.setdefault(unit.module, []).append(turn)
    hooks = [module.register_forward_pre_hook(_taking(itertools.cycle(in_turn))) for module, in_turn in turns.items()]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()
        _put(places)


@contextmanager
def _units_seeded(model: nn.Module | None, seed_of: Callable[[int], int], device: torch.device) -> Iterator[None]:
    """Seed the generators before every unit of ``model``, and put them back where they were after the model."""
    hooks, outside = [], []

    def enter(*_: Any) -> None:
        outside.append(preserved_generators(device))
        outside[-1].__enter__()

    def leave(*_: Any) -> None:
        outside.pop().__exit__(None, None, None)

    def seed(in_turn: Iterator[int]) -> Callable[..., None]:
        return lambda *_: seed_generators(seed_of(next(in_turn)), device)

    units = _units(model)
    if model is not None and units:
        hooks.append(model.register_forward_pre_hook(enter))
        places: dict[nn.Module, list[int]] = {}  # one module may be several units
        for index, unit in enumerate(units):
            places.setdefault(unit.module, []).append(index)
        hooks += [m.register_forward_pre_hook(seed(itertools.cycle(indices))) for m, indices in places.items()]
        hooks.append(model.register_forward_hook(leave))
    try:
        with layer_by_layer(model) if model is not None and units else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _others(
    units: list[Unit],
) -> tuple[list[tuple[nn.Parameter, nn.Parameter]], list[dict[nn.Parameter, nn.Parameter]]]:
    """The further parameters; and for every unit, what stands for each parameter while it runs."""
    uses: list[tuple[nn.Parameter, nn.Parameter]] = []
    in_use: list[dict[nn.Parameter, nn.Parameter]] = []
    now: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units:
        own = dict.fromkeys(unit.module.parameters())
        others = {p: nn.Parameter(p.data) for p in own if p in now and p.requires_grad}
        uses += others.items()
        now = {**now, **{p: p for p in own}, **others}
        in_use.append(now)
    return uses, in_use


def _places(model: nn.Module) -> list[_Place]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _taking(in_turn: Iterator[list[_Place]]) -> Callable[..., None]:
    return lambda *_: _put(next(in_turn))


def _put(places: list[_Place]) -> None:
    for module, name, parameter in places:
        setattr(module, name, parameter)


def _units(model: nn.Module | None) -> list[Unit]:
    """Those that a pipeline could cut between; none if it cannot be cut: then layers draw from the step's generator."""
    try:
        return pipeline_units(model) if model is not None else []
    except ConfigurationError:
        return []
