"""The same random cases by the emulator of the delay, in one process: bitwise the oracle's, too."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.core.emulator.gradient_delay import DelaySettings
from lightning_asyncpp.core.emulator.micro_batch_gradient import MicroBatchGradient
from tests.core.cases import Case
from tests.core.random_cases import draw
from tests.core.runs import run_oracle, versioned_tensors
from tests.core.test_engine_equals_oracle import parametrized, with_held_micro_batches

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
DEFAULT = range(12)


class Emulated:
    """What a strategy does with an emulator, for a case."""

    def __init__(self, case: Case, num_stages: int, saved: Any = None) -> None:
        self.case, self.num_stages = case, num_stages
        self.model = case.make_model()
        self.optimizer = case.make_optimizer(list(self.model.named_parameters()))
        self.scheduler = case.make_scheduler(self.optimizer)
        counts, by_stage = tuple(case.counts(num_stages)), case.staleness != "uniform"
        settings = DelaySettings(
            delay=case.delay if case.staleness == "uniform" else case.staleness,
            stages=num_stages if by_stage else None, slack=case.slack,
            lookahead=case.lookahead or 0 if case.staleness == "least" else 0,
            micro_batches=case.micro_batches, nonfinite_gradients="skip" if case.nan_at is not None else "stop",
            partition=counts if by_stage else "auto",
        )  # fmt: skip
        assert not settings.problems()
        if saved is not None:
            self.model.load_state_dict(saved["weights"])
        hooks = UserHooks(micro_batch_weight=case.weight)
        parameters = dict(self.model.named_parameters())
        self.gradient = MicroBatchGradient(
            parameters, self.model, hooks, case.micro_batches, case.seed, torch.device("cpu")
        )
        self.emulator = DelayEmulator(
            settings, self.model, self.optimizer, self.gradient,
            None if saved is None else saved["emulator"], Partition(counts, counts, "as given") if by_stage else None,
        )  # fmt: skip
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])

    def train(self, mini_batch: list[int]) -> None:
        for i in mini_batch:
            with self.emulator.weights.stale():
                self.gradient.run(self.case.batch(i), self.case.step(self.model))
            self.optimizer.zero_grad()
            self.gradient.restore()
        self.emulator.update(self._step)
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def resumed(self) -> Emulated:
        file = io.BytesIO()
        weights, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        torch.save({"weights": weights, "optimizer": optimizer, "emulator": self.emulator.state_dict()}, file)
        other = Emulated(self.case, self.num_stages, torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        if other.scheduler is not None and self.scheduler is not None:
            other.scheduler.load_state_dict(self.scheduler.state_dict())
        return other

    def _step(self) -> None:
        if self.case.max_norm is not None:
            self.emulator.clip(self.case.max_norm)
        self.optimizer.step()


def check(num_stages: int, case: Case) -> None:
    case = replace(case, bf16=False, data_parallel_size=1, checkpointing=False)
    expected, _ = run_oracle(case, num_stages)
    run = Emulated(case, num_stages)
    for mini_batch in case.mini_batches:
        run.train(mini_batch)
        if mini_batch[-1] in case.resumes:
            run = run.resumed()
    weights = versioned_tensors(run.model)
    assert weights.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(weights[name].detach(), value)]
    assert not different, f"not bitwise equal: {different}"


@pytest.mark.parametrize("seed", DEFAULT)
def test_random_case(seed: int) -> None:
    check(*draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(DEFAULT), 300))
def test_more_random_cases(seed: int) -> None:
    check(*draw(seed))


@parametrized(with_held_micro_batches(3)[::3])
def test_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@pytest.mark.slow
@parametrized([*with_held_micro_batches(2), *with_held_micro_batches(4)])
def test_more_of_the_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)
