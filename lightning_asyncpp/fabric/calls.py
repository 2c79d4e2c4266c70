"""Messages for calls in the wrong order, and checks of the model."""

from __future__ import annotations

from torch import nn

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


def not_set_up(caller: str) -> str:
    """Return the message for a call before the optimizer was set up."""
    return (
        f"{caller} needs a model and an optimizer: call model = fabric.setup_module(model) and then"
        " optimizer = fabric.setup_optimizers(make_optimizer(model)) first"
    )


def refuse_outside_of_steps(module: nn.Module, args: object) -> None:
    """Refuse a call of the cut model that no step makes; a forward pre-hook."""
    if "forward" not in vars(module):  # see ModelCall
        raise ConfigurationError(
            "model(...) outside of a step: this rank has only its stage of the model; call it in the function that"
            " strategy.training_step or strategy.evaluation_step gets, on every rank"
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
