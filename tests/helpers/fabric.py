"""Fabric loops that a worker process runs; the cases are those of the engine's tests."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy
from lightning_asyncpp.fabric.strategy import PipelineStrategy
from tests.helpers.cases import Case, make_model


def world_size() -> int:
    """Number of processes, as the launcher says it."""
    return int(os.environ["WORLD_SIZE"])


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
    precision: Any = "32-true"
    spoilt: bool = False  # other initial weights, which loading must replace
    options: dict[str, Any] = field(default_factory=dict)  # more of the strategy's
    stages: int = 0  # all in this process, if there are any

    def __post_init__(self) -> None:
        case = self.case
        options = {
            "microbatches": case.microbatches, "lookahead": case.lookahead, "staleness": case.staleness,
            "slack": case.slack, "partition": case.counts(self.stages or world_size() // case.data_parallel_size),
            "nonfinite_gradients": "skip" if case.nan_at is not None else "stop",
            "weight_dtype": "bf16" if case.bf16 else None, **self.options,
        }  # fmt: skip
        if self.stages:
            self.strategy = DelayedGradientStrategy(stages=self.stages, delay=case.delay, **options)
        else:
            self.strategy = (AsyncPipelineStrategy if case.delay else SyncPipelineStrategy)(
                data_parallel_size=case.data_parallel_size, **options
            )
        self.fabric = make_fabric(self.strategy, self.precision, seed=99 if self.spoilt else case.seed)
        model = case.make_model()
        if self.spoilt:
            torch.nn.init.constant_(next(model.parameters()), 3.0)
        model.microbatch_weight = case.weight
        self.model = self.fabric.setup_module(model)
        self.optimizer = self.fabric.setup_optimizers(case.make_optimizer(list(self.model.named_parameters())))
        self.scheduler = case.make_scheduler(self.optimizer)
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    @property
    def state(self) -> dict[str, Any]:
        """What a user would save."""
        state = {"model": self.model, "optimizer": self.optimizer, "step": len(self.norms)}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def train(self, start: int = 0, stop: int | None = None, evaluate_after: tuple[int, ...] = ()) -> None:
        """Mini-batches ``start`` to ``stop``, without a flush."""
        step = self.case.step(self.model)
        for t in range(len(self.case.mini_batches))[start:stop]:
            self.optimizer.zero_grad()
            for index in self.case.mini_batches[t]:
                loss = self.strategy.training_step(step, self.case.batch(index, self.mesh.replica))
                assert (loss is not None) == self.mesh.is_last
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
        stage = self.strategy.session.stage
        assert stage is not None
        tensors = {**stage.parameters, **stage.buffers}
        ties = [tie for tie in stage.whole.ties if self.mesh.stage in tie.stages[1:]]
        names = {tie.name_on(self.mesh.stage): tie.names[0] for tie in ties}
        arrays = {name: p.detach().float().numpy().copy() for name, p in tensors.items()}
        return {
            "weights": {name: array for name, array in arrays.items() if name not in names},
            "copies": {names[name]: array for name, array in arrays.items() if name in names},
            "metrics": self.strategy.layer_metrics, "losses": self.losses, "norms": self.norms,
            "replica": self.mesh.replica, "stage": self.mesh.stage,
        }  # fmt: skip


def train(case: Case, evaluate_after: tuple[int, ...] = (), precision: Any = "32-true") -> dict[str, Any]:
    """Train a case to its end."""
    run = Run(case, precision)
    run.train(evaluate_after=evaluate_after)
    return run.result()


def evaluate_while_accumulating(case: Case) -> dict[str, Any]:
    """Evaluate after every batch, also where no step follows it."""
    run = Run(case)
    train = run.strategy.training_step

    def train_and_evaluate(*args: Any) -> Any:
        loss = train(*args)
        run.evaluate()
        return loss

    run.strategy.training_step = train_and_evaluate  # type: ignore[method-assign]
    run.train()
    return run.result()


def save_and_go_on(
    case: Case, path: str, at: int, precision: Any = "32-true", options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Save after mini-batch ``at`` - 1 and go on."""
    run = Run(case, precision, options=options or {})
    run.train(stop=at)
    run.fabric.save(path, run.state)
    run.train(start=at)
    return run.result()


def go_through(
    case: Case, loads: str | None, saves: str | None, at: int, evaluate_after: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Begin, or go on from a checkpoint; save after mini-batch ``at`` - 1, and go on to the end."""
    run = Run(case, "bf16-mixed" if case.bf16 else "32-true", loads is not None, options)
    start = 0
    if loads is not None:
        state = run.state
        run.fabric.load(loads, state)
        start = state["step"]
        run.norms += [None] * start  # of which it saves the number
    if saves is not None:
        run.train(start, at, evaluate_after)
        run.fabric.save(saves, run.state)
        start = at
    run.train(start, None, evaluate_after)
    run.strategy.checkpoints.settle()  # as the end of a script waits for what is still being written
    return run.result()


def told_to_end(case: Case, path: str, told: tuple[int, ...], at: int) -> list[int]:
    """Train until all ranks agreed to end and save; some receive SIGTERM before mini-batch ``at``."""
    run = Run(case)
    before = signal.signal(signal.SIGTERM, lambda *_: run.strategy.request_stop())
    try:
        while not run.strategy.stop_agreed:
            if len(run.norms) == at and run.mesh.rank in told:
                os.kill(os.getpid(), signal.SIGTERM)
            run.train(start=len(run.norms), stop=len(run.norms) + 1)
        run.fabric.save(path, run.state)
    finally:
        signal.signal(signal.SIGTERM, before)
    return [len(run.norms)]


def load_and_go_on(
    case: Case, path: str, one_after_the_other: tuple[str, ...] = (), precision: Any = "32-true"
) -> dict[str, Any]:
    """Go on from a checkpoint, in a run that began with other weights and another seed."""
    run = Run(case, precision, spoilt=True)
    state = run.state
    for name in one_after_the_other:
        run.fabric.load(path, {name: state.pop(name)})
    remainder = run.fabric.load(path, state)
    assert remainder.keys() == set(one_after_the_other), remainder
    run.train(start=state["step"])
    return run.result()


def load_the_model_later(case: Case, path: str) -> tuple[int, int, int]:
    """Resume, train one mini-batch, and take over the model's weights: which mini-batch comes next each time."""
    run = Run(case)
    run.fabric.load(path, run.state)
    engine = run.strategy.session.running()
    resumed = engine.mini_batch
    run.train(start=resumed, stop=resumed + 1)
    trained = engine.mini_batch
    run.fabric.load(path, {"model": run.model})
    older, newest = engine.weights.leaves(trained - 1), engine.weights.leaves(trained)
    assert all(torch.equal(older[name], newest[name]) for name in newest)
    return resumed, trained, engine.mini_batch


def evaluate_after_each(case: Case) -> Any:
    """The outputs of an evaluation after every mini-batch, and what the gathered weights of that moment give."""
    run = Run(case)
    pairs = []
    for t in range(len(case.mini_batches)):
        run.train(t, t + 1)
        output, state = run.evaluate(), run.strategy.full_state_dict()
        if run.fabric.global_rank == 0:
            whole = make_model(case.dropout).eval()
            whole.load_state_dict(state)
            with torch.no_grad():
                pairs.append((output.numpy(), whole(case.batch(0)["x"]).numpy()))
        else:
            assert output is None or run.mesh.is_last
    return pairs
