"""Running a case through the engine (in a worker process) and through the oracle."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.mini_batch import Update
from lightning_asyncpp.pipeline.oracle import train_reference
from lightning_asyncpp.pipeline.settings import PipelineSettings
from lightning_asyncpp.pipeline.stage import cut
from lightning_asyncpp.pipeline.ticket import TicketOffice
from lightning_asyncpp.pipeline.units import stages_of_parameters
from lightning_asyncpp.pipeline.update import clip_coefficient
from lightning_asyncpp.pipeline.user_hooks import UserHooks
from tests.pipeline.cases import Case, make_model

warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


def run_case(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Run a case on this rank; returns this stage's final weights, its losses and its norms."""
    settings = PipelineSettings(
        micro_batches=case.micro_batches, lookahead=case.lookahead, data_parallel_size=case.data_parallel_size,
        delay=case.delay, nonfinite_gradients="skip" if case.nan_at is not None else "stop",
        fresh_last_stage=case.fresh, synchronous_start=case.start,
    ).resolved(mesh.world_size)  # fmt: skip
    device = torch.device(case.device)
    model = make_model(case.dropout, case.spare).to(device)
    stage = cut(model, mesh.stage, mesh.num_stages, case.seed, device)
    if case.checkpointing:
        _checkpoint_units(stage)
    hooks = UserHooks(micro_batch_weight=case.weight)
    engine = Engine(stage, mesh, settings, case.seed, device, hooks)
    optimizer = case.make_optimizer(list(model.named_parameters()))
    scheduler = case.make_scheduler(optimizer)
    office = TicketOffice(optimizer)
    norms: list[float] = []

    def apply(update: Update) -> None:
        if case.max_norm is not None:
            factor = clip_coefficient(update.message.norm, case.max_norm)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        lend = nullcontext()
        if case.error_feedback is not None and update.weights_before is not None:
            lend = optimizer.weights_before(update.weights_before)  # type: ignore[attr-defined]
        with office.redeemed(update.ticket), lend:
            optimizer.step()

    def take(updates: list[Update]) -> None:
        norms.extend(update.message.norm for update in updates if not update.skipped)

    losses = []
    for mini_batch in case.mini_batches:
        outputs = []
        for i in mini_batch:
            outputs.append(engine.run(case.batch(i, mesh.replica), case.step(model)))
            if i in case.drains and i != mini_batch[-1]:
                take(engine.drain(apply))
        if mesh.is_last:
            sums = [(output.mean_loss() or 0.0) * sum(output.weights) for output in outputs]
            losses.append(float(sum(sums)) / max(sum(sum(o.weights) for o in outputs), 1e-9))
        if case.error_feedback is not None:
            optimizer.set_delay(engine.delay_of_next_update)  # type: ignore[attr-defined]
        engine.close(office.file())
        take(engine.apply_due(apply))
        if scheduler is not None:
            scheduler.step()
        if mini_batch[-1] in case.drains:
            take(engine.drain(apply))
    take(engine.drain(apply))
    weights = {name: p.detach().cpu().clone() for name, p in stage.parameters.items()}
    return {"weights": weights, "losses": losses, "norms": norms, "replica": mesh.replica, "stage": mesh.stage}


def run_oracle(case: Case, num_stages: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """Run a case in this process; with replicas their micro-batches are simply more micro-batches.

    The number of stages matters to a fresh last stage alone.
    """
    assert case.data_parallel_size == 1 or (not case.dropout and not case.random_input)
    model = make_model(case.dropout, case.spare).to(case.device)
    optimizer = case.make_base(list(model.named_parameters()))
    scheduler = case.make_scheduler(optimizer)
    batches = [
        [case.batch(i, r) for i in indices for r in range(case.data_parallel_size)] for indices in case.mini_batches
    ]
    named = dict(model.named_parameters())
    stages = stages_of_parameters(model, num_stages) if case.fresh else {}
    losses = train_reference(
        model, case.step(model), batches, optimizer,
        micro_batches=case.micro_batches, delay=case.delay, max_norm=case.max_norm,
        error_feedback=case.error_feedback if case.delay else None,
        after_update=scheduler.step if scheduler is not None else None,
        weight=case.weight, skip_nonfinite=case.nan_at is not None, seed=case.seed,
        fresh=[named[name] for name, stage in stages.items() if stage == num_stages - 1],
        synchronous_start=case.start,
    )  # fmt: skip
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}, losses


def _checkpoint_units(stage: Any) -> None:
    for unit in stage.units:
        forward = unit.module.forward
        unit.module.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
