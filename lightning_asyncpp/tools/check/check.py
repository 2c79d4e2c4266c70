"""Trains a model for a few updates as a pipeline would, and as the plain reference does, and compares the two."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.header import Header, TensorInfo
from lightning_asyncpp.pipeline.in_turns import run_in_turns
from lightning_asyncpp.pipeline.materialize import materialize
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.mini_batch import Update
from lightning_asyncpp.pipeline.model_call import ModelCall
from lightning_asyncpp.pipeline.neighbours import Neighbours
from lightning_asyncpp.pipeline.oracle import train_reference
from lightning_asyncpp.pipeline.partition_choice import Asked, choose_partition
from lightning_asyncpp.pipeline.runner import loss_of
from lightning_asyncpp.pipeline.settings import PipelineSettings, ResolvedSettings, is_whole
from lightning_asyncpp.pipeline.stage import cut
from lightning_asyncpp.pipeline.ticket import TicketOffice
from lightning_asyncpp.pipeline.transport import Transport
from lightning_asyncpp.pipeline.units import meta_problems, model_problems, pipeline_units
from lightning_asyncpp.pipeline.update import clip_coefficient
from lightning_asyncpp.pipeline.user_hooks import UserHooks
from lightning_asyncpp.pytorch.refusals import backward_problems
from lightning_asyncpp.tools.check.calls import compare_calls
from lightning_asyncpp.tools.check.report import CheckReport, difference_in_change
from lightning_asyncpp.tools.check.whole_batch import WholeBatches, compare_whole_batches

StepOf = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Any], Optimizer]


def check_model(
    module: nn.Module,
    batches: Iterable[Any],
    step: StepOf | None = None,
    *,
    stages: int = 2,
    micro_batches: int | None = None,
    lookahead: int | None = None,
    delay: int = 1,
    partition: Asked = "auto",
    updates: int = 4,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    seed: int = 0,
    tolerance: float = 1e-2,
) -> CheckReport:
    """Train a model for a few updates in a pipeline, in this process, and compare it with a single process's training.

    The pipeline is the real one, its engine, its messages and two versions of the weights, with a thread for each
    stage. It is compared with :func:`lightning_asyncpp.pipeline.oracle.train_reference`, which runs the whole model.
    Nothing that is given is changed.

    Args:
        module: a LightningModule, whose ``self.model`` is checked; or, with ``step``, any model.
        batches: a few batches, as ``training_step`` gets them, on the model's device: hooks that prepare batches are
            not called. They are repeated where there are fewer than ``updates``.
        step: (module, micro-batch) -> its loss; it calls the model once. Default: ``module.training_step(batch, 0)``.
        stages: number of stages, P.
        micro_batches: pieces that every batch is cut into; default: ``stages``.
        lookahead: as for the strategy.
        delay: 1 for ``async_pipeline``, 0 for ``sync_pipeline``.
        partition: as for the strategy; nothing is measured, numbers of parameters count instead.
        updates: number of mini-batches.
        optimizer: named parameters -> optimizer; default: SGD with a learning rate of 0.01.
        max_norm: clip the gradient's norm to this.
        seed: of the run.
        tolerance: how much a weight may differ, as a share of the largest change in its tensor. On a CPU nothing
            differs; sums in another order, on a GPU, differ by about 1e-4 of a change in fp32.

    Returns:
        Where the model was cut, what crossed the cuts, and how near the results are.

    Raises:
        ConfigurationError: the model cannot be cut, or trains to something else; with what to look at.
    """
    if problems := _problems(module, step, stages, updates):
        raise ConfigurationError.from_problems(problems)
    prototype = _prototype(module, seed)
    step = step or _training_step
    taken = list(itertools.islice(itertools.cycle(batches), updates))
    if not taken:
        raise ConfigurationError("check_model got no batch: give it one or more")
    settings = PipelineSettings(micro_batches, lookahead, delay=delay, partition=partition).resolved(stages)
    trial = _Trial(prototype, step, taken, settings, optimizer or _default_optimizer, max_norm, seed)
    _compare_calls(trial)
    results = run_in_turns(stages, functools.partial(_run_stage, trial), trial.device)
    expected, expected_losses = _reference(trial)
    report = CheckReport(
        stages=[result.layers for result in results],
        crossings=[result.crossing for result in results[:-1]],
        losses=results[-1].losses,
        differences=_differences(trial, results, expected),
        whole_batches=_compare_whole_batches(trial),
    )
    report.judge(expected_losses, tolerance)
    return report


class _Trial(NamedTuple):
    """What both sides train."""

    module: nn.Module
    step: StepOf
    batches: Sequence[Any]
    settings: ResolvedSettings
    make_optimizer: MakeOptimizer
    max_norm: float | None
    seed: int

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @staticmethod
    def network(module: nn.Module) -> nn.Module:
        """What the step calls: ``self.model`` of a LightningModule."""
        network = _network_of(module)
        if not isinstance(network, nn.Module):
            raise ConfigurationError(f"{type(module).__name__} has no self.model: assign the network to it")
        return network

    def hooks(self, module: nn.Module) -> UserHooks:
        return UserHooks.of(module, model_name=_name_of(self.network(module), module))

    def optimizer(self, module: nn.Module) -> Optimizer:
        return self.make_optimizer(list(module.named_parameters()))


class _StageResult(NamedTuple):
    """What a stage ended with: its layers, its entries of ``state_dict``, on the last one losses, and what it sent."""

    layers: list[str]
    state: dict[str, Tensor]
    losses: list[float]
    crossing: tuple[TensorInfo, ...]


class _WatchedTransport(Transport):
    """Keeps what it was first given to send on."""

    crossing: tuple[TensorInfo, ...] = ()

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        self.crossing = self.crossing or header.tensors
        super().send_activation(header, tensors)


def _problems(module: nn.Module, step: StepOf | None, stages: int, updates: int) -> list[str]:
    """What is wrong with what check_model was given, before anything is run."""
    problems = [
        f"{name}={value!r} must be a whole number, 1 or more"
        for name, value in (("stages", stages), ("updates", updates))
        if not is_whole(value) or value < 1
    ]
    if step is None and not hasattr(module, "training_step"):
        problems.append(
            f"{type(module).__name__} has no training_step: give check_model a step, a function (module, micro_batch)"
            " -> loss that calls the model once"
        )
    if isinstance(module, LightningModule):
        problems += backward_problems(module)
    network = _network_of(module)  # not of a copy, which knows nothing of having been compiled
    return problems + (model_problems(network, _name_of(network, module)) if isinstance(network, nn.Module) else [])


def _network_of(module: nn.Module) -> Any:
    """What the step calls: ``self.model`` of a LightningModule, which may build it later."""
    return getattr(module, "model", None) if hasattr(module, "training_step") else module


def _name_of(network: nn.Module, module: nn.Module) -> str:
    return "the model" if network is module else "self.model"


def _prototype(module: nn.Module, seed: int) -> nn.Module:
    """A copy of the user's module with real weights, which all sides start from."""
    prototype = copy.deepcopy(module)
    if isinstance(prototype, LightningModule):
        prototype.log = prototype.log_dict = _log_nothing  # type: ignore[method-assign]
        prototype.configure_model()
    network = _Trial.network(prototype)
    units = pipeline_units(network)
    if problems := [*model_problems(network, _name_of(network, prototype)), *meta_problems(prototype, units)]:
        raise ConfigurationError.from_problems(problems)
    materialize(units, range(len(units)), seed, torch.device("cpu"))
    return prototype.train()


def _training_step(module: Any, micro_batch: Any) -> Any:
    """Call it as the Trainer does."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    try:
        return module.training_step(micro_batch, *([0] if takes_index else []))
    except RuntimeError as error:
        if "is not attached to a `Trainer`" not in str(error):
            raise
        raise ConfigurationError(
            "training_step asks for its Trainer, and there is none in a check: give check_model a step, a function"
            " (module, micro_batch) -> loss that calls the model once and needs no Trainer"
        ) from error


def _log_nothing(*_: Any, **__: Any) -> None:
    """What ``self.log`` does in a check."""


def _default_optimizer(named_parameters: Any) -> Optimizer:
    return torch.optim.SGD(named_parameters, lr=0.01)


def _compare_calls(trial: _Trial) -> None:
    """Compare the model's own forward with its layers applied one after the other, on the first micro-batch."""
    module, batch = copy.deepcopy(trial.module), copy.deepcopy(trial.batches[0])
    hooks, network = trial.hooks(module), trial.network(module)
    pieces = hooks.split_batch(batch, trial.settings.micro_batches)
    micro_batch = next(piece for piece in pieces if piece is not None)
    call = ModelCall(network, hooks.model_name)
    args, kwargs = call.capture(lambda: trial.step(module, micro_batch))
    compare_calls(network, args, kwargs, trial.seed, hooks.model_name)


def _compare_whole_batches(trial: _Trial) -> WholeBatches:
    """On the weights that training starts from; batches that come again are compared once."""
    distinct = list({id(batch): batch for batch in trial.batches}.values())
    parts, seed, device = trial.settings.micro_batches, trial.seed, trial.device
    return compare_whole_batches(trial.module, trial.step, trial.hooks, distinct, parts, seed, device)


def _run_stage(trial: _Trial, mesh: Mesh, neighbours: Neighbours) -> _StageResult:
    """Train one stage, as the strategies do."""
    module, batches = copy.deepcopy(trial.module), copy.deepcopy(trial.batches)
    network = trial.network(module)
    counts = choose_partition(network, mesh.stage, mesh.num_stages, trial.settings.settings.partition).counts
    stage = cut(network, mesh.stage, mesh.num_stages, trial.seed, trial.device, module, counts)
    hooks = trial.hooks(module)
    transport = None
    if mesh.num_stages > 1:
        limit = trial.settings.settings.max_message_bytes
        transport = _WatchedTransport(mesh, trial.device, limit, neighbours=neighbours)
    engine = Engine(stage, mesh, trial.settings, trial.seed, trial.device, hooks, transport=transport)
    optimizer = trial.optimizer(module)
    office = TicketOffice(optimizer)

    def apply(update: Update) -> None:
        if trial.max_norm is not None:
            factor = clip_coefficient(update.message.norm, trial.max_norm)
            for parameter in engine.weights.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        with office.redeemed(update.ticket):
            optimizer.step()

    losses = []
    for batch in batches:
        output = engine.run(batch, lambda micro_batch, _: trial.step(module, micro_batch))
        loss = output.mean_loss(hooks.loss_reduction) if mesh.is_last else None
        losses.append(float("nan") if loss is None else float(loss))
        engine.close(office.file())
        engine.apply_due(apply)
    engine.drain(apply)
    engine.release()
    layers = [unit.name for unit in stage.units]
    return _StageResult(layers, stage.state_dict(), losses, () if transport is None else transport.crossing)


def _reference(trial: _Trial) -> tuple[dict[str, Tensor], list[float]]:
    """Train the whole model by the plain rule."""
    module, batches = copy.deepcopy(trial.module), copy.deepcopy(trial.batches)
    hooks = trial.hooks(module)

    def mean_loss(micro_batch: Any) -> Tensor:
        loss = loss_of(trial.step(module, micro_batch))
        return loss / hooks.micro_batch_weight(micro_batch) if hooks.loss_reduction == "sum" else loss

    losses = train_reference(
        trial.network(module), mean_loss, [[batch] for batch in batches], trial.optimizer(module),
        micro_batches=trial.settings.micro_batches, delay=trial.settings.delay, max_norm=trial.max_norm,
        weight=hooks.micro_batch_weight, split=hooks.split_batch, seed=trial.seed,
    )  # fmt: skip
    return trial.network(module).state_dict(), losses


def _differences(trial: _Trial, results: Sequence[_StageResult], expected: dict[str, Tensor]) -> dict[str, float]:
    initial = trial.network(trial.module).state_dict()
    differences = {
        name: difference_in_change(tensor, expected[name], initial[name])
        for result in results
        for name, tensor in result.state.items()
    }
    return {name: difference for name, difference in differences.items() if difference}
