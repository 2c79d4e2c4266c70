"""What looks for gradients where a pipeline has none is refused, or told so; torch's clipping knows one stage alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad, clip_grad_norm_

from lightning_asyncpp.core.step.own_gradients import parameter_hook_problems
from lightning_asyncpp.core.updates.clipping import ClippingGuard
from lightning_asyncpp.private_names import PrivateNameError
from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit


class Hooked(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model[0].weight.register_hook(lambda gradient: 0 * gradient)


class Accumulated(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


class ClipsByTorch(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.1)


class ClipsInHook(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), 0.1)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Hooked, ["0.weight", "register_hook", "on_before_optimizer_step"]),
        (Accumulated, ["0.weight", "register_post_accumulate_grad_hook"]),
        (ClipsByTorch, ["self.clip_gradients", "clip_grad_norm_"]),
        (ClipsInHook, ["self.clip_gradients", "fabric.clip_gradients"]),
    ],
)
def test_is_refused(pools: Pools, module: type[Net], said: list[str]) -> None:
    outcomes = pools.outcomes(2, fit, Run(module))
    assert all(outcome.error for outcome in outcomes)
    assert any(all(word in outcome.message for word in said) for outcome in outcomes), outcomes
    fitted = pools.run(2, fit, Run(Net, trainer={"gradient_clip_val": 0.1}))
    assert fitted[0]["global_step"] == 5


class LooksTooEarly(Net):
    def on_after_backward(self) -> None:
        """Find no gradients."""


def warned(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(run)
    return [str(w.message) for w in caught if "on_after_backward" in str(w.message)]


def test_is_warned_of_once(pools: Pools) -> None:
    first, second = pools.run(2, warned, Run(LooksTooEarly))
    assert len(first) == 1
    assert "LooksTooEarly" in first[0]
    assert second == []


def test_other_parameters_are_clipped_as_ever() -> None:
    guarded, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 5.0)
    guard = ClippingGuard("mend")
    guard.begin([guarded])
    clip_grad_norm_(iter([other]), 1.0)
    assert float(other.grad.norm()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="mend"):
        clip_grad_norm_(guarded, 1.0)
    guard.end()
    clip_grad_norm_(guarded, 1.0)


def test_parameters_of_a_run_that_is_gone_guard_no_others() -> None:
    """A run that failed may not have ended its guard, and new tensors take the identities of dead ones."""
    guard = ClippingGuard("mend")
    guarded = [torch.nn.Parameter(torch.ones(2)) for _ in range(50)]
    guard.begin(guarded)
    dead = {id(parameter) for parameter in guarded}
    del guarded
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(200)]
    assert dead & {id(parameter) for parameter in made}
    clip_grad_norm_(made, 1.0)
    guard.end()


def test_missing_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(clip_grad, "_clip_grads_with_norm_")
    with pytest.raises(PrivateNameError, match="_clip_grads_with_norm_"):
        ClippingGuard("").begin([])
    model = torch.nn.Linear(1, 1)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        monkeypatch.setattr("lightning_asyncpp.core.step.own_gradients._KINDS", (f"{name}_gone",))
        with pytest.raises(PrivateNameError, match=name):
            parameter_hook_problems(model)
