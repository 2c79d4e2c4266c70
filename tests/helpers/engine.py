"""Functions that run a case through the engine (in worker processes) or the oracle, and compare the results."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpp.auxiliary import StatisticsLayer
from lightning_asyncpp.core import checkpoint as state
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.local_session import LocalSession
from lightning_asyncpp.core.microbatch import BatchOutput, UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.tree import tensors_of
from lightning_asyncpp.core.updates.update import StepInput, Update
from lightning_asyncpp.reference import StaleCount, train_reference
from tests.helpers.cases import Case
from tests.helpers.random_cases import draw, is_exact

if TYPE_CHECKING:
    from tests.helpers.pool import EnginePools

warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


def run_local(case: Case, num_stages: int) -> dict[str, Any]:
    """Run a case with all stages in this process; return its results as those of one stage with the whole model."""
    return run_case(case, Mesh(1, 1, 0), num_stages)


def run_case(case: Case, mesh: Mesh, local_stages: int | None = None) -> dict[str, Any]:
    """Run a case on this rank; return this stage's final weights, its losses, its norms and its statistics."""
    training = Training(case, mesh, local_stages)
    for mini_batch in case.mini_batches:
        last = mini_batch[-1]
        outputs = []
        for i in mini_batch:
            outputs.append(training.engine.run(case.batch(i, mesh.replica), case.step(training.model)))
            if i in case.drains and i != last:
                training.drain()
        training.complete(outputs)
        if last in case.drains:
            training.drain()
        if last in case.evaluates:
            training.evaluate(last)
        if last in case.resumes:
            training = training.resumed()
    training.drain()
    return training.results()


class Training:
    """Training of a case with a strategy's session; ``local_stages``: number of stages, if all are in this process."""

    def __init__(self, case: Case, mesh: Mesh, local_stages: int | None = None) -> None:
        self.case, self.mesh, self.local_stages = case, mesh, local_stages
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.statistics: list[dict[str, float]] = []
        settings = PipelineSettings(
            microbatches=case.microbatches, lookahead=case.lookahead, data_parallel_size=case.data_parallel_size,
            delay=case.delay, nonfinite_gradients="skip" if case.nan_at is not None else "stop",
            staleness=case.staleness, slack=case.slack, synchronous_start=case.start if case.delay else 0,
            weight_dtype="bf16" if case.bf16 else None,
        )  # fmt: skip
        self.session = session = (
            PipelineSession(settings) if local_stages is None else LocalSession(settings, local_stages)
        )
        session.mesh = mesh
        self.model = case.make_model()
        counts, device = tuple(case.counts(local_stages or mesh.num_stages)), torch.device(case.device)
        self.stage = session.cut(self.model, case.seed, device, Partition(counts, "as given"))
        if case.checkpointing:
            _checkpoint_units(self.stage)
        hooks = UserHooks(microbatch_weight=case.weight, forward_context=case.context)
        self.engine: Engine = session.start(hooks, device, training=True)
        with self.stage.whole_model():
            self.optimizer = case.make_optimizer(list(self.model.named_parameters()))
        self.scheduler = case.make_scheduler(self.optimizer)
        session.attach(self.optimizer, self._step)

    def complete(self, outputs: list[BatchOutput]) -> None:
        """Complete the mini-batch, and record its loss on the last stage."""
        if self.mesh.is_last:
            known = [(loss, _weight_of_numbers(o)) for o in outputs if (loss := o.mean_loss()) is not None]
            counted = [(float(loss), weight) for loss, weight in known if weight]  # other losses are NaN
            total = sum(weight for _, weight in counted)
            self.losses.append(sum(loss * weight for loss, weight in counted) / max(total, 1e-9))
        self._take(self.session.complete(note=self.engine.mini_batch))
        check_what_is_kept(self.engine, outputs)
        if self.scheduler is not None:
            self.scheduler.step()

    def drain(self) -> None:
        """Drain as before a validation, when the layers are already in evaluation mode."""
        before = torch.get_rng_state()
        self.model.eval()
        self._take(self.session.drain())
        self.model.train()
        assert torch.equal(torch.get_rng_state(), before)

    def evaluate(self, index: int) -> Tensor | None:
        """Drain, evaluate a batch, and return its mean loss on the last stage."""
        self.drain()
        with torch.no_grad():
            output = self.engine.evaluate(self.case.batch(index, self.mesh.replica), self.case.step(self.model))
        return output.mean_loss() if self.mesh.is_last else None

    def resumed(self) -> Training:
        """Return a new training that resumes from the state that a checkpoint of this one holds."""
        self.drain()
        saved = {
            "weights": state.gathered(self.session, state.stage_model_state(self.session, self.stage.state_dict())),
            "pipeline": state.gathered(self.session, state.stage_pipeline_state(self.session)),
            "optimizer": state.gathered(self.session, self.session.stage_optimizer.state_dict()),
        }  # fmt: skip
        saved = self._from_first_rank(saved)
        self.session.close()
        other = Training(self.case, self.mesh, self.local_stages)
        other.model.load_state_dict({name: saved["weights"][name] for name in other.model.state_dict()})
        state.load_pipeline_state(other.session, saved["pipeline"])
        other.session.stage_optimizer.load_state_dict(saved["optimizer"])
        if other.scheduler is not None and self.scheduler is not None:
            other.scheduler.load_state_dict(self.scheduler.state_dict())
        other.losses, other.norms, other.statistics = self.losses, self.norms, self.statistics
        return other

    def results(self) -> dict[str, Any]:
        return {
            **tensors_on(self.stage, self.mesh),
            "losses": self.losses, "norms": self.norms, "statistics": self.statistics,
        }  # fmt: skip

    def _step(self, step: StepInput) -> None:
        assert step.note == step.mini_batch
        if self.case.max_norm is not None:
            self.session.clip(self.case.max_norm)
        self.optimizer.step()

    def _take(self, updates: list[Update]) -> None:
        layout = self.stage.whole.statistics
        for update in updates:
            if update.totals.finite and update.totals.weight:
                self.norms.append(update.totals.norm)
                self.statistics.append(layout.metrics(update.totals.statistics))

    def _from_first_rank(self, saved: Any) -> Any:
        """Return the first rank's ``saved``, as written to a file and read again."""
        file = io.BytesIO()
        torch.save(saved, file)
        content = [file.getvalue()]
        if self.mesh.groups is not None:
            dist.broadcast_object_list(content, 0, group=self.mesh.groups.host)
        return torch.load(io.BytesIO(content[0]), weights_only=True)


def tensors_on(stage: Any, mesh: Mesh) -> dict[str, Any]:
    """Return a stage's place and tensors; its copies of an earlier stage's tensors are separate, by the names there."""
    names = {tie.name_on(mesh.stage): tie.names[0] for tie in stage.whole.ties if mesh.stage in tie.stages[1:]}
    trained = {name: p for name, p in stage.parameters.items() if p.requires_grad}
    tensors = {name: p.detach().cpu().clone() for name, p in {**trained, **stage.buffers}.items()}
    return {
        "weights": {name: tensor for name, tensor in tensors.items() if name not in names},
        "copies": {names[name]: tensor for name, tensor in tensors.items() if name in names},
        "replica": mesh.replica, "stage": mesh.stage,
    }  # fmt: skip


def _weight_of_numbers(output: BatchOutput) -> float:
    """Return the total weight of the microbatches whose loss is not NaN."""
    return sum(weight for loss, weight in zip(output.results, output.weights) if not loss.isnan())


def check_what_is_kept(engine: Engine, outputs: list[BatchOutput]) -> None:
    """Check that graphs, sends and gradients are freed after use, not at the next drain or the end of the batch."""
    results = [tensor for output in outputs for tensor in tensors_of(output.results)]
    assert not any(tensor.requires_grad for tensor in results)
    assert all(len(part.updates._sending) <= 3 for part in engine.stages)  # shared gradients that are being sent
    stepped = [mini_batch for part in engine.stages for mini_batch in part.updates.pending if mini_batch.stepped]
    assert not any(gradient is not None for mini_batch in stepped for gradient in mini_batch.gradients.values())
    assert not any(mini_batch.reduction._sent for mini_batch in stepped if mini_batch.reduction is not None)


def run_oracle(case: Case, num_stages: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """Run a case through the oracle in this process; return its weights and losses.

    Replicas simply add microbatches. The number of stages and their cut matter only if stages differ in staleness.
    """
    assert case.data_parallel_size == 1 or (not case.dropout and not case.random_input)
    model = case.make_model()
    optimizer = case.make_base(list(model.named_parameters()))
    scheduler = case.make_scheduler(optimizer)
    batches = [
        [case.batch(i, r) for i in indices for r in range(case.data_parallel_size)] for indices in case.mini_batches
    ]

    steps_ahead = case.staleness == "least" and case.slack != "exact"
    start = max(case.start, 1) if steps_ahead else case.start  # the first mini-batch has no earlier norm to clip by

    def step(microbatch: dict[str, Tensor]) -> Tensor:
        with case.context():
            return case.step(model)(microbatch)

    losses = train_reference(
        model, step, batches, optimizer,
        microbatches=case.microbatches, delay=case.delay, max_norm=case.max_norm,
        error_feedback=case.error_feedback if case.delay else None,
        after_update=scheduler.step if scheduler is not None else None,
        weight=case.weight, skip_nonfinite=case.nan_at is not None, seed=case.seed,
        stale_counts=stale_counts_of(case, model, num_stages), replicas=case.data_parallel_size,
        exact_norm=case.slack == "exact",
        synchronous_start=start, weight_dtype=torch.bfloat16 if case.bf16 else None,
    )  # fmt: skip
    return {name: tensor.detach().cpu().clone() for name, tensor in versioned_tensors(model).items()}, losses


def ahead(stage: int, case: Case, num_stages: int) -> int:
    """Return by how many microbatches forwards run ahead, computed independently of the schedule's own rule."""
    behind, more, left = num_stages - 1 - stage, 1, case.lookahead or 0
    while num_stages > 1 and left >= num_stages - 1:  # one more microbatch on every hop
        more, left = more + 1, left - (num_stages - 1)
    return behind * more + behind * (left + 1) // num_stages


def stale_counts_of(case: Case, model: nn.Module, num_stages: int) -> list[StaleCount]:
    """Return each stage's parameters and its number of stale microbatches; nothing for uniform staleness."""
    if case.staleness == "uniform":
        return []
    stage_of = [stage for stage, count in enumerate(case.counts(num_stages)) for _ in range(count)]
    units, first = pipeline_units(model), first_of_those_that_share(case, num_stages)
    found: list[StaleCount] = []
    for stage in range(num_stages):
        own = [p for unit, of in zip(units, stage_of, strict=True) if of == stage for p in unit.module.parameters()]
        least = (
            ahead(0, case, num_stages) if case.slack == "exact" else ahead(first[stage], case, num_stages) + case.slack
        )
        found.append((own, least))
    return found


def first_of_those_that_share(case: Case, num_stages: int) -> list[int]:
    """Return for each stage the first stage to which a chain of shared parameters links it, or itself."""
    stage_of = [stage for stage, count in enumerate(case.counts(num_stages)) for _ in range(count)]
    holders: dict[int, set[int]] = {}
    for unit, stage in zip(pipeline_units(case.make_model()), stage_of, strict=True):
        for parameter in unit.module.parameters():
            holders.setdefault(id(parameter), set()).add(stage)
    first = list(range(num_stages))
    for _ in first:  # enough rounds for the longest chain
        for stages in holders.values():
            least = min(first[stage] for stage in stages)
            first = [least if stage in stages else number for stage, number in enumerate(first)]
    return first


def versioned_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training changes: name -> trainable parameter, or versioned buffer of a layer with statistics."""
    tensors: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, layer in model.named_modules():
        if isinstance(layer, StatisticsLayer):
            tensors |= {f"{name}.{key}": getattr(layer, key) for key in layer.versioned_buffers}
    return tensors


def _checkpoint_units(stage: Any) -> None:
    for unit in stage.units:
        forward = unit.module.forward
        unit.module.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)


Results = list[dict[str, Any]]


def weights_of(results: Results, replica: int = 0) -> dict[str, np.ndarray]:
    """Return the weights of all stages of a replica."""
    weights: dict[str, np.ndarray] = {}
    for result in results:
        if result["replica"] == replica:
            weights |= {name: np.asarray(value) for name, value in result["weights"].items()}
    return weights


def assert_same_weights(results: Results, expected: Mapping[str, Any], tolerance: float = 0.0) -> None:
    """Check that weights are the expected ones, bitwise or up to ``tolerance``, and that each is on one stage.

    Replicas, and copies of weights that stages share, have the same bits.
    """
    weights = weights_of(results)
    assert sorted(weights) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], np.asarray(value), rtol=0, atol=tolerance, err_msg=name)
    for result in results:
        for name, value in [*result["weights"].items(), *result["copies"].items()]:
            assert np.array_equal(np.asarray(value), weights[name], equal_nan=True), f"{name} differs between ranks"
    replicas = len({result["replica"] for result in results})
    assert sum(len(result["weights"]) for result in results) == replicas * len(expected)


def assert_same_losses(results: Results, expected: list[float]) -> None:
    """Compare the losses of mini-batches with counted samples on the last stage, which is on rank 0."""
    assert all(not result["losses"] for result in results if result["stage"] != results[0]["stage"])
    losses = [loss if loss else float("nan") for loss in results[0]["losses"]]  # a batch without weight has no loss
    assert losses == pytest.approx(expected, rel=1e-6, nan_ok=True)


def assert_ranks_agree(results: Results) -> None:
    """Check that all ranks clip by and log the same norms, and log the same statistics."""
    for kind in ("norms", "statistics"):
        assert all(result.get(kind) == results[0].get(kind) for result in results), kind


def check_random_case(pools: EnginePools, seed: int) -> None:
    num_stages, case = draw(seed)
    results = pools.run(case, num_stages)
    # Replicas read the same data, and (g + g) / (w + w) is exactly g / w.
    expected, _ = run_oracle(replace(case, data_parallel_size=1), num_stages)
    exact = is_exact(pipeline_units(case.make_model()), case.counts(num_stages), case.data_parallel_size)
    assert_same_weights(results, expected, 0.0 if exact else 2e-3)
    assert_ranks_agree(results)
