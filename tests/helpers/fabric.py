"""Fabric loops that a worker process runs; the cases are those of the engine's tests."""

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
    """Number of processes, as the launcher says it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_fabric(strategy: PipelineStrategy, precision: Any = "32-true", seed: int = 5) -> L.Fabric:
    """A launched Fabric on all ranks of this pool."""
    fabric = L.Fabric(strategy=strategy, devices=world_size(), accelerator="cpu", precision=precision)
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    return fabric


@dataclass
class Run:
    """A case on this rank, set up as a user would."""

    case: Case
    precision: Any = ""  # by default, what the case's weights need
    spoilt: bool = False  # other initial weights, which loading must replace
    options: dict[str, Any] = field(default_factory=dict)  # more of the strategy's
    stages: int = 0  # all in this process, if there are any
    evaluates_each: bool = False  # after every batch, also where no step follows it
    at_once: bool = False  # the optimizer is made before the model is set up, and both are by one call

    def __post_init__(self) -> None:
        case = self.case
        options = {
            "microbatches": case.microbatches, "lookahead": case.lookahead, "staleness": case.staleness,
            "slack": case.slack, "partition": case.counts(self.stages or world_size() // case.data_parallel_size),
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
        """What a user would save."""
        state = {"model": self.model, "optimizer": self.optimizer, "step": len(self.norms)}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def load(self, path: str) -> None:
        """Go on from a checkpoint; of the norms before it there is only the number."""
        state = self.state
        self.fabric.load(path, state)
        self.norms += [None] * state["step"]

    def train(self, start: int = 0, stop: int | None = None, evaluate_after: tuple[int, ...] = ()) -> None:
        """Mini-batches ``start`` to ``stop``, without a flush."""
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
                with torch.inference_mode():  # a user's own; draining leaves it
                    self.evaluate()

    def evaluate(self) -> Any:
        """Evaluate batch 0; the outputs on the last stage."""
        self.model.eval()
        output = self.strategy.evaluation_step(lambda batch: self.model(batch["x"]), self.case.batch(0))
        self.model.train()
        return output

    @property
    def mesh(self) -> Any:
        return self.strategy.session.mesh

    def result(self) -> dict[str, Any]:
        """This rank's final weights and place."""
        self.strategy.drain()
        found = tensors_on(self.strategy.session.stage, self.mesh)
        found |= {kind: {n: t.float().numpy() for n, t in found[kind].items()} for kind in ("weights", "copies")}
        return found | {"metrics": self.strategy.layer_metrics, "losses": self.losses, "norms": self.norms}


def train(case: Case, evaluate_after: tuple[int, ...] = (), precision: Any = "", **more: Any) -> dict[str, Any]:
    """Train a case to its end."""
    run = Run(case, precision, **more)
    run.train(evaluate_after=evaluate_after)
    return run.result()


def go_through(
    case: Case, loads: str | None = None, saves: str | None = None, at: int = 0, evaluate_after: tuple[int, ...] = (),
    options: dict[str, Any] | None = None, stages: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Begin, or go on from a checkpoint; save after mini-batch ``at`` - 1, and go on to the end."""
    run = Run(case, spoilt=loads is not None, options=options or {}, stages=stages)
    if loads is not None:
        run.load(loads)
    if saves is not None:
        run.train(len(run.norms), at, evaluate_after)
        run.fabric.save(saves, run.state)
    run.train(len(run.norms), None, evaluate_after)
    run.strategy.checkpoints.settle()  # as the end of a script waits for what is still being written
    return run.result()
