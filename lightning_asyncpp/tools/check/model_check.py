"""Trains a model for a few updates as a pipeline would, and as the plain reference does, and compares the two."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_asyncpp.core.batches.user_hooks import loss_of
from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.partition_choice import Asked, choose_partition
from lightning_asyncpp.core.cut.units import pipeline_units, telling
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.model_call import ModelCall
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Slack, Staleness, agrees_first
from lightning_asyncpp.core.settings import PipelineSettings, ResolvedSettings, is_whole
from lightning_asyncpp.core.stage_optimizer import StageOptimizer
from lightning_asyncpp.core.step.own_gradients import refuse_input_gradients
from lightning_asyncpp.core.updates.clipping import clip_by_norm
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.core.wire.header import Header, TensorInfo
from lightning_asyncpp.core.wire.link import Neighbours
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import ConfigurationError, NonFiniteGradientError
from lightning_asyncpp.reference import Held, train_reference
from lightning_asyncpp.tools.check.check_report import CheckReport, WholeBatches, difference_in_change, is_loud
from lightning_asyncpp.tools.check.compared_calls import compare_calls
from lightning_asyncpp.tools.check.in_turns import run_in_turns
from lightning_asyncpp.tools.check.problems import (
    Problems,
    argument_problems,
    can_run,
    configured_problems,
    prepare,
)
from lightning_asyncpp.tools.check.trial import (
    MakeOptimizer,
    StepOf,
    Trial,
    default_optimizer,
    largest_gradients,
    notes_on_hooks,
    training_step,
)
from lightning_asyncpp.tools.check.whole_batch import compare_whole_batches

_NOT_FINITE = (
    "the gradient is not finite, so that nothing can be compared. Look at the batches (NaN in their inputs;"
    " labels that are all -100), at the initial weights, at logarithms, roots and divisions in the step, and at whether"
    " the training diverges (give check_model an optimizer with a lower learning rate, for its own is SGD with 0.01);"
    " torch.autograd.set_detect_anomaly(True) names the operation"
)


def check_model(
    module: nn.Module,
    batches: Iterable[Any],
    step: StepOf | None = None,
    *,
    stages: int = 2,
    micro_batches: int | None = None,
    lookahead: int | None = None,
    delay: int = 1,
    staleness: Staleness | None = None,
    slack: Slack = 0,
    partition: Asked = "auto",
    updates: int = 4,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    seed: int = 0,
    tolerance: float = 1e-2,
) -> CheckReport:
    """Train a model for a few updates in a pipeline, in this process, and compare it with a single process's training.

    The pipeline is the real one, its engine, its messages and two versions of the weights, with a thread for each
    stage. It is compared with :func:`lightning_asyncpp.reference.train_reference`, which runs the whole model.
    Nothing that is given is changed. The module's hooks around batches and updates are called on both sides, as far as
    they need no Trainer; the report names those that are not. Then every batch is run as a whole, too: where its loss
    is not the weighted mean over its micro-batches, or not finite, the report has a finding, and its ``ok`` is False.
    So it is where that could not be compared, or the module's optimizer not looked at; ``left_out`` says why.

    Args:
        module: a LightningModule, whose ``self.model`` is checked; or, with ``step``, any model.
        batches: a few batches, as a loader yields them, on the model's device; the module's own hooks prepare them.
            They are repeated where there are fewer than ``updates``.
        step: (module, micro-batch) -> its loss; it calls the model once. Default: ``module.training_step(batch, 0)``.
        stages: number of stages, P.
        micro_batches: pieces that every batch is cut into; default: ``stages``.
        lookahead: as for the strategy.
        delay: 1 for ``async_pipeline``, 0 for ``sync_pipeline``.
        staleness: as for the strategy.
        slack: as for the strategy.
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
        ConfigurationError: the model cannot be cut, with every problem that was found; or it trains to something else,
            or its gradients are not finite, with what to look at.
    """
    found = Problems(argument_problems(module, step, stages, updates))
    shape: dict[str, Any] = {"micro_batches": micro_batches, "lookahead": lookahead, "partition": partition}
    settings = PipelineSettings.chosen(delay, staleness, slack=slack, **shape)
    resolved = None if found else found.attempt(lambda: settings.resolved(stages))
    taken = list(itertools.islice(itertools.cycle(batches), max(updates, 0) if is_whole(updates) else 0))
    if not taken and not found:
        found.append("check_model got no batch: give it one or more")
    prototype = prepare(module, settings, stages if is_whole(stages) else 0, seed, found)
    of_optimizer, unseen = configured_problems(prototype) if optimizer is None else ([], "")
    found += of_optimizer
    step = step or training_step
    layers_compared = ""
    if resolved is not None and taken and can_run(prototype):
        trial = Trial(prototype, step, taken, resolved, optimizer or default_optimizer, max_norm, seed, set())
        layers_compared = found.attempt_user_code(lambda: _compare_calls(trial)) or ""
    found.raise_any()
    try:
        results = run_in_turns(stages, functools.partial(_run_stage, trial), trial.device)
    except NonFiniteGradientError as error:
        raise ConfigurationError(_NOT_FINITE) from error
    expected = _reference(trial)
    report = CheckReport(
        layers_compared=layers_compared,
        stages=[result.layers for result in results],
        crossings=[result.crossing for result in results[:-1]],
        losses=results[-1].losses,
        differences=_differences(trial, results, expected),
        whole_batches=_compare_whole_batches(trial),
        notes=notes_on_hooks(prototype, trial.left_out),
        beyond_noise=_differences(trial, results, expected, without_noise=True),
        without_weight=results[-1].without_weight,
        optimizer_left_out=unseen,
    )
    report.judge(expected.losses, tolerance)
    return report


class _StageResult(NamedTuple):
    """What a stage ended with: its layers, its entries of ``state_dict``, on the last one losses, what it sent, how
    large its gradients were, and on the last one which mini-batches have no loss, for nothing in them counts."""

    layers: list[str]
    state: dict[str, Tensor]
    losses: list[float]
    crossing: tuple[TensorInfo, ...]
    largest: dict[str, Tensor]
    without_weight: list[int]


class _WatchedTransport(Transport):
    """Keeps what it was first given to send on."""

    crossing: tuple[TensorInfo, ...] = ()

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        self.crossing = self.crossing or header.tensors
        super().send_activation(header, tensors)


def _compare_calls(trial: Trial) -> str:
    """Compare the model's own forward with its layers applied one after the other, on every micro-batch: it may have
    branches that few of them take."""
    said, count = "", 0
    batches = _distinct(trial)
    for index, batch in enumerate(batches):
        module = copy.deepcopy(trial.module)
        hooks, network = trial.hooks(module), trial.network(module)
        batch = trial.calls(module).prepared(copy.deepcopy(batch), index)
        for k, micro_batch in enumerate(trial.pieces(module, batch)):
            call = ModelCall(network, hooks.model_name)
            args, kwargs = call.capture(lambda: trial.step(module, micro_batch))  # noqa: B023  (it is called at once)
            if trial.settings.num_stages > 1:
                refuse_input_gradients(args, kwargs, hooks.model_name)
            where = f"micro-batch {k} of batch {index}"
            said, count = compare_calls(network, args, kwargs, trial.seed, hooks.model_name, where), count + 1
    return f"{said}, with {count} micro-batches of {len(batches)} batch{'' if len(batches) == 1 else 'es'}"


def _distinct(trial: Trial) -> list[Any]:
    """Batches that come again are looked at once."""
    return list({id(batch): batch for batch in trial.batches}.values())


def _compare_whole_batches(trial: Trial) -> WholeBatches:
    """On the weights that training starts from."""
    calls = trial.calls(copy.deepcopy(trial.module))
    prepared = [calls.prepared(copy.deepcopy(batch), index) for index, batch in enumerate(_distinct(trial))]
    return compare_whole_batches(trial, prepared)


def _run_stage(trial: Trial, mesh: Mesh, neighbours: Neighbours) -> _StageResult:
    """Train one stage, as the strategies do."""
    module, batches = copy.deepcopy(trial.module), copy.deepcopy(trial.batches)
    network = trial.network(module)
    counts = choose_partition(network, mesh.stage, mesh.num_stages, trial.settings.partition).counts
    stage = cut(network, mesh.stage, mesh.num_stages, trial.seed, trial.device, module, counts)
    hooks = trial.hooks(module)
    transport = None
    if mesh.num_stages > 1:
        limit = trial.settings.max_message_bytes
        transport = _WatchedTransport(mesh, trial.device, limit, neighbours=neighbours)
    engine = Engine(stage, mesh, trial.settings, trial.seed, trial.device, hooks, transport=transport)
    engine.runner.unequal.stop()  # whole batches are compared, which says more
    with stage.whole_model():
        optimizer, calls = trial.optimizer(module), trial.calls(module)
    own = StageOptimizer(optimizer, stage.parameters.values())
    own.keep_own()
    largest: dict[str, Tensor] = {}

    def apply(update: Update) -> None:
        if trial.max_norm is not None:
            clip_by_norm(engine.weights.parameters.values(), update.message.norm, trial.max_norm)
        calls.before_step(optimizer)
        largest_gradients(dict(engine.weights.parameters), largest)
        own.step(update.hyper_parameters, optimizer.step)
        calls.end(update.mini_batch)

    engine.updates.apply = apply
    losses: list[float] = []
    without_weight: list[int] = []
    for t, batch in enumerate(batches):
        batch = calls.prepared(batch, t)
        calls.start(t)
        output = engine.run(batch, lambda micro_batch, _: trial.step(module, micro_batch))
        loss = output.mean_loss(hooks.loss_reduction) if mesh.is_last else None
        losses.append(float("nan") if loss is None else float(loss))
        without_weight += [t] if loss is None else []
        engine.close(own.hyper_parameters())
        engine.apply_due()
    engine.drain()
    engine.release()
    layers = telling([unit.name for unit in stage.units])
    crossing = () if transport is None else transport.crossing
    return _StageResult(layers, stage.state_dict(), losses, crossing, largest, without_weight)


class _Expected(NamedTuple):
    """What a single process ends with: ``state_dict``, losses, and how large its gradients were."""

    state: dict[str, Tensor]
    losses: list[float]
    largest: dict[str, Tensor]


def _reference(trial: Trial) -> _Expected:
    """Train the whole model by the plain rule."""
    module, batches = copy.deepcopy(trial.module), copy.deepcopy(trial.batches)
    hooks, calls, optimizer = trial.hooks(module), trial.calls(module), trial.optimizer(module)
    network = trial.network(module)
    largest: dict[str, Tensor] = {}
    current = 0

    def mean_loss(micro_batch: Any) -> Tensor:
        loss = loss_of(trial.step(module, micro_batch))
        return loss / hooks.micro_batch_weight(micro_batch) if hooks.loss_reduction == "sum" else loss

    def started() -> Iterator[list[Any]]:
        nonlocal current
        for current, batch in enumerate(batches):
            batch = calls.prepared(batch, current)
            calls.start(current)
            yield [batch]

    def before(*_: Any) -> None:
        calls.before_step(optimizer)
        largest_gradients(dict(network.named_parameters()), largest)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.end(current))
    losses = train_reference(
        network, mean_loss, started(), optimizer,
        micro_batches=trial.settings.micro_batches, delay=trial.settings.delay, max_norm=trial.max_norm,
        weight=hooks.micro_batch_weight, split=hooks.split_batch, held=_held_back(trial.settings, network),
        exact_norm=agrees_first(trial.settings.staleness, trial.settings.slack),
        synchronous_start=trial.settings.synchronous_start, seed=trial.seed,
    )  # fmt: skip
    return _Expected(network.state_dict(), losses, largest)


def _held_back(settings: ResolvedSettings, network: nn.Module) -> list[Held]:
    """Parameters of each stage, and how many micro-batches it holds back; those that hold back all are left out."""
    units = pipeline_units(network)
    counts = choose_partition(network, 0, settings.num_stages, settings.partition).counts
    whole, following = WholeModel.of(units, counts)[0], iter(units)
    own = [[p for unit in itertools.islice(following, count) for p in unit.module.parameters()] for count in counts]
    held = [whole.schedule(settings, stage).stage_rule.held for stage in range(settings.num_stages)]
    return [(parameters, number) for parameters, number in zip(own, held) if number is not None]


def _differences(
    trial: Trial, results: Sequence[_StageResult], expected: _Expected, without_noise: bool = False
) -> dict[str, float]:
    """How weights and buffers differ; also without elements whose gradient is nothing but rounding."""
    initial = trial.network(trial.module).state_dict()
    scale = max((float(g.max()) for g in expected.largest.values() if g.numel()), default=0.0)
    differences = {}
    for result in results:
        for name, tensor in result.state.items():
            a, b, start = tensor, expected.state[name], initial[name]
            if without_noise and name in result.largest and name in expected.largest:
                loud = is_loud(result.largest[name], expected.largest[name], scale)
                a, b, start = (t.to(loud.device)[loud] for t in (a, b, start))
            differences[name] = difference_in_change(a, b, start)
    return {name: difference for name, difference in differences.items() if difference}
