"""The call of the model in the user's step is captured or redirected, and undone however the step ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.microbatch import ModelCall
from lightning_asyncpp.errors import ConfigurationError

RULE = "under a pipeline the step must call the model exactly once per microbatch"
NEVER = f"the step ended without calling self.model(...): {RULE}"
TWICE = f"the step ended after calling self.model(...) twice: {RULE}"


def double(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] * 2


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(("calls", "message"), [(0, NEVER), (2, TWICE)])
def test_a_step_calls_the_model_once(model: nn.Module, calls: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelCall(model).redirect(lambda: [model(1) for _ in range(calls)], double)
    assert str(caught.value).startswith(message)


def test_a_step_that_catches_everything_is_told(model: nn.Module) -> None:
    def step() -> None:
        try:
            model("x")
        except BaseException:
            return

    with pytest.raises(ConfigurationError, match="without calling"):
        ModelCall(model).capture(step)


class InstanceForward(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.forward = self.shifted

    def shifted(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def fail(error: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), InstanceForward], ids=["of the class", "of the instance"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_forward_is_put_back_after_every_ending(make: Callable[[], nn.Module], error: BaseException) -> None:
    model = make()
    call, x = ModelCall(model), torch.ones(1, 2)
    own, expected = model.__dict__.get("forward"), model(x)
    for run in (
        lambda: call.capture(lambda: model(x)),
        lambda: call.capture(fail(error)),
        lambda: call.redirect(lambda: model(x), double),
        lambda: call.redirect(fail(error), double),
        lambda: call.redirect(lambda: [model(x), model(x)], double),
    ):
        try:
            run()
        except (type(error), ConfigurationError):
            pass
        assert model.__dict__.get("forward") is own
        assert torch.equal(model(x), expected)
