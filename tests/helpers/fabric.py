"""Fabric loops for worker processes; they run the cases of the engine's tests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy
from lightning_asyncpp.fabric.strategy import PipelineStrategy
from tests.helpers.cases import Case
from tests.helpers.engine import tensors_on


def world_size() -> int:
    """Return the number of processes that the launcher has set; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_fabric(strategy: PipelineStrategy, precision: Any = "32-true", seed: int = 5) -> L.Fabric:
    """Return a launched Fabric for all ranks of this pool."""
    fabric = L.Fabric(strategy=strategy, devices=world_size(), accelerator="cpu", precision=precision)
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    return fabric


@dataclass
class Run:
    """Run of a case on this rank, set up with the calls that a user would make."""

    case: Case
    precision: Any = ""  # by default, the precision that the case's weights need
    spoilt: bool = False  # start with other weights, which loading must replace
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the strategy
    stages: int = 0  # number of stages if all of them are in this process, else 0
    evaluates_each: bool = False  # evaluate after every batch, even if no optimizer step follows it
    at_once: bool = False  # make the optimizer first, then set it up in one call with the model

    def __post_init__(self) -> None:
        case = self.case
        options = {
            "microbatches": case.microbatches, "lookahead": case.lookahead, "staleness": case.staleness,
            "slack": case.slack, "synchronous_start": case.start,
            "partition": case.counts(self.stages or world_size() // case.data_parallel_size),
            "nonfinite_gradients": "skip" if case.nan_at is not None else "stop",
            "weight_dtype": "bf16" if case.bf16 else None,
        }  # fmt: skip
        if self.stages:
            self.strategy = DelayedGradientStrategy(stages=self.stages, delay=case.delay, **options)
        else:
            self.strategy = (AsyncPipelineStrategy if case.delay else SyncPipelineStrategy)(
                data_parallel_size=case.data_parallel_size, **options, **self.options
            )
        precision = self.precision or ("bf16-mixed" if case.bf16 else "32-true")
        self.fabric = make_fabric(self.strategy, precision, seed=99 if self.spoilt else case.seed)
        model = case.make_model()
        if self.spoilt:
            torch.nn.init.constant_(next(model.parameters()), 3.0)
        model.microbatch_weight = case.weight
        if self.at_once:
            self.model, self.optimizer = self.fabric.setup(model, case.make_optimizer(self._trained(model)))
        else:
            self.model = self.fabric.setup_module(model)
            self.optimizer = self.fabric.setup_optimizers(case.make_optimizer(self._trained(self.model)))
        self.scheduler = case.make_scheduler(self.optimizer)
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    def _trained(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @property
    def state(self) -> dict[str, Any]:
        """State that a user would save."""
        state = {"model": self.model, "optimizer": self.optimizer, "step": len(self.norms)}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def load(self, path: str) -> None:
        """Resume from a checkpoint; for each earlier mini-batch, the norm is None."""
        state = self.state
        self.fabric.load(path, state)
        self.norms += [None] * state["step"]

    def train(self, start: int = 0, stop: int | None = None, evaluate_after: tuple[int, ...] = ()) -> None:
        """Train on mini-batches ``start`` to ``stop`` - 1, by default to the last one, without a drain at the end."""
        step = self.case.step(self.model)
        for t in range(len(self.case.mini_batches))[start:stop]:
            self.optimizer.zero_grad()
            for index in self.case.mini_batches[t]:
                loss = self.strategy.training_step(step, self.case.batch(index, self.mesh.replica))
                assert (loss is not None) == self.mesh.is_last
                if self.evaluates_each:
                    self.evaluate()
            if self.case.max_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.case.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
            self.losses += [] if loss is None else [loss.item()]
            self.norms.append(self.strategy.gradient_norm)
            if t in evaluate_after:
                with torch.inference_mode():  # entered by the user; a drain suspends it
                    self.evaluate()

    def evaluate(self) -> Any:
        """Evaluate batch 0, and return the outputs on the last stage."""
        self.model.eval()
        output = self.strategy.evaluation_step(lambda batch: self.model(batch["x"]), self.case.batch(0))
        self.model.train()
        return output

    @property
    def mesh(self) -> Any:
        return self.strategy.session.mesh

    def result(self) -> dict[str, Any]:
        """Drain, and return this rank's final weights, its place, metrics, losses and norms."""
        self.strategy.drain()
        found = tensors_on(self.strategy.session.stage, self.mesh)
        found |= {kind: {n: t.float().numpy() for n, t in found[kind].items()} for kind in ("weights", "copies")}
        return found | {"metrics": self.strategy.layer_metrics, "losses": self.losses, "norms": self.norms}


def train(case: Case, evaluate_after: tuple[int, ...] = (), precision: Any = "", **more: Any) -> dict[str, Any]:
    """Train a case to its end, and return this rank's result."""
    run = Run(case, precision, **more)
    run.train(evaluate_after=evaluate_after)
    return run.result()


def go_through(
    case: Case, loads: str | None = None, saves: str | None = None, at: int = 0, evaluate_after: tuple[int, ...] = (),
    options: dict[str, Any] | None = None, stages: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end, from the start or a checkpoint; ``saves``: save a checkpoint after mini-batch ``at`` - 1."""
    run = Run(case, spoilt=loads is not None, options=options or {}, stages=stages)
    if loads is not None:
        run.strategy.training_step(case.step(run.model), case.batch(0, run.mesh.replica))  # a load forgets it
        run.load(loads)
    if saves is not None:
        run.train(len(run.norms), at, evaluate_after)
        run.fabric.save(saves, run.state)
    run.train(len(run.norms), None, evaluate_after)
    run.strategy.checkpoints.settle()  # the end of a script also waits for saves in the background
    return run.result()
