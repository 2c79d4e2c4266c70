"""The one call of the model in the user's step, which stages take apart: arguments first, output last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")


class ModelCall:
    """The one call of ``self.model(...)`` in the user's step: captured on the first stage, redirected on the last.

    It replaces ``model.forward`` while the step runs.

    Args:
        model: the module that the step calls.
        name: how the user calls it, for messages.
    """

    def __init__(self, model: nn.Module, name: str = "self.model") -> None:
        self.name = name
        # An instance attribute hides the class's forward; hooks of the module still run around it. It is no parameter
        # and no module, so the way around nn.Module's slow __setattr__ is open.
        self._attributes = vars(called_by_steps(model))

    def capture(self, step: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
        """Run the step up to the call of the model and return the arguments of that call.

        Raises:
            ConfigurationError: the step ended without calling the model.
        """
        try:
            self._run(step, _leave)
        except _Left as left:
            return left.args
        raise ConfigurationError(self._calls(0))

    def redirect(self, step: Callable[[], T], compute: Callable[[tuple, dict[str, Any]], Any]) -> T:
        """Run the whole step with the output of ``compute`` in place of the model's.

        Raises:
            ConfigurationError: the step called the model never or more than once.
        """
        calls = 0

        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigurationError(self._calls(2))
            return compute(args, kwargs)

        result = self._run(step, replacement)
        if calls == 0:
            raise ConfigurationError(self._calls(0))
        return result

    def _run(self, step: Callable[[], T], forward: Callable[..., Any]) -> T:
        own = self._attributes.get("forward")
        self._attributes["forward"] = forward
        try:
            return step()
        finally:
            del self._attributes["forward"]
            if own is not None:
                self._attributes["forward"] = own

    def _calls(self, count: int) -> str:
        times = "without calling" if count == 0 else "after calling twice"
        inside = "its forward()" if self.name == "self" else self.name
        skips = f"; to leave a batch out return a loss of 0, such as 0.0 * {self.name}(...).sum()"
        return (
            f"the step ended {times} {self.name}(...): under a pipeline it must call it exactly once per microbatch,"
            f" because the stages before the last one run only that call; move everything around it into {inside} or"
            f" compute it from its output{'' if count else skips}"
        )


class _Left(BaseException):
    """Carries the arguments of ``self.model(...)`` out of the user's step."""


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Left(args, kwargs)
