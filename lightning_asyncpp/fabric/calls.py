"""Fabric's calls that take effect with a later update, and checks of the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_asyncpp.core.clipping import clip_values
from lightning_asyncpp.core.cut.units import model_problems
from lightning_asyncpp.core.microbatch import problems_of_reduction
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import problems_of_precision, problems_of_weight_dtype
from lightning_asyncpp.errors import ConfigurationError

ONE_MODEL_ONE_OPTIMIZER = (
    "fabric.setup_optimizers: a pipeline has one model, which is set up first, and one optimizer. Call"
    " model = fabric.setup_module(model), then fabric.setup_optimizers with one optimizer, which may have several"
    " parameter groups"
)


@dataclass(frozen=True)
class Clipping:
    """Arguments of ``fabric.clip_gradients``.

    Attributes:
        algorithm: ``"max_norm"`` clips by a 2-norm over all stages, ``"clip_val"`` limits every element.
        limit: largest norm, or largest absolute value.
    """

    algorithm: str
    limit: float

    def apply(self, session: PipelineSession) -> None:
        """Clip the gradients of the update that is being applied."""
        if self.algorithm == "max_norm":
            session.clip(self.limit)
        else:
            clip_values(session.running().weights.parameters.values(), self.limit)


@dataclass
class MiniBatchNote:
    """Requests, made during a mini-batch, for its update, which is applied later.

    Attributes:
        clipping: clipping of the gradient; None: no clipping.
    """

    clipping: Clipping | None = None

    def clip(self, clipping: Clipping) -> None:
        """Request a clipping; a second request with the same algorithm replaces the first.

        Raises:
            ConfigurationError: both algorithms are requested.
        """
        before = self.clipping
        if before is not None and before.algorithm != clipping.algorithm:
            raise ConfigurationError(
                f"clip_gradients was called with {before.algorithm} and with {clipping.algorithm} for the same update,"
                " but the norm over all stages is computed before any clipping; use only one of them"
            )
        self.clipping = clipping


def not_set_up(caller: str) -> str:
    """Return the message for a call before the optimizer was set up."""
    return (
        f"{caller} needs a model and an optimizer: call model = fabric.setup_module(model) and then"
        " optimizer = fabric.setup_optimizers(make_optimizer(model)) first"
    )


def module_problems(session: PipelineSession, module: nn.Module, precision: str, loss_reduction: str) -> list[str]:
    """Return the problems of a model that is being set up, and of the settings for its training."""
    problems = []
    if session.stage is not None:
        problems.append(
            f"a second model ({type(module).__name__}) was set up: one strategy runs one pipeline; put both into one"
            " module with pipeline_layers(), or use a second Fabric with a strategy of its own"
        )
    problems += problems_of_precision(precision) + problems_of_weight_dtype(session.settings.weight_dtype, precision)
    problems += model_problems(module, "the model")
    return problems + problems_of_reduction(loss_reduction)
