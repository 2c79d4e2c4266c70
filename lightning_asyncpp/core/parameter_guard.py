"""Parameters of a stage while it trains: nobody uses them outside of its layers, puts others there or freezes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor, nn

from lightning_asyncpp.core.cut.elsewhere import Home
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.errors import ConfigurationError


class ParameterGuard:
    """Refuses, until :meth:`release`, what the weight versions would not take part in.

    Args:
        stage: whose parameters they are.
        trained: name -> parameter, those that have versions.
    """

    def __init__(self, stage: Stage, trained: Mapping[str, nn.Parameter]) -> None:
        self._stage, self._trained = stage, trained
        self._handles = [parameter.register_hook(_refuse_gradient) for parameter in trained.values()]
        self._handles += [
            parameter.register_hook(functools.partial(_refuse_elsewhere, home))
            for reference, home in stage.elsewhere
            if (parameter := reference()) is not None and parameter.requires_grad
        ]

    def check_there(self) -> None:
        """The versions are those of the parameters that the layers had at the start.

        Raises:
            ConfigurationError: other parameters are there.
        """
        if replaced := self._stage.replaced():
            raise ConfigurationError(
                f"{', '.join(replaced[:5])}: another parameter, or none, is there since the training started (pruning,"
                " a parametrization, adapters, a layer's weight that was assigned), and would not be trained; do it"
                " before the training, in __init__ or configure_model, or between two trainings"
            )

    def check_trained(self) -> None:
        """The versions are those of the parameters that were to be trained at the start.

        Raises:
            ConfigurationError: others are to be.
        """
        parameters = self._stage.parameters
        if changed := [name for name, p in parameters.items() if p.requires_grad != (name in self._trained)]:
            raise ConfigurationError(
                f"{', '.join(changed[:5])}: frozen or unfrozen (requires_grad) since the training started, while two"
                " versions of the trainable parameters are alive; do it before, or between two trainings"
            )

    def release(self) -> None:
        """Let anybody use them."""
        for handle in self._handles:
            handle.remove()


def _refuse_gradient(gradient: Tensor) -> Tensor:
    raise ConfigurationError(
        "a parameter of self.model was used directly in training_step: only the stage that holds it would see that"
        " part of the loss; compute it inside a layer of self.model (an auxiliary loss), or use weight_decay. A layer"
        " that uses it must find it in an nn.Module, not in a list, a closure or another object"
    )


def _refuse_elsewhere(home: Home, _: Tensor) -> Tensor:
    raise ConfigurationError(home.refusal("a parameter that was used here"))
