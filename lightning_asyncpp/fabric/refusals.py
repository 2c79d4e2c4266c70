"""Uses of Fabric that a pipeline cannot run right, each with the mend."""

from __future__ import annotations

from torch import nn

from lightning_asyncpp.core.batches.user_hooks import problems_of_reduction
from lightning_asyncpp.core.cut.units import model_problems
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import problems_of_precision, problems_of_weight_dtype

ONE_MODEL_ONE_OPTIMIZER = (
    "fabric.setup_optimizers: a pipeline has one model, which is set up first, and one optimizer. Call"
    " model = fabric.setup_module(model), then fabric.setup_optimizers with an optimizer that has parameter groups"
)
BACKWARD = (
    "fabric.backward(): strategy.training_step(step_fn, batch) runs the backward passes itself, micro-batch by"
    " micro-batch; leave fabric.backward out, and let step_fn return the loss"
)
CLOSURE = (
    "optimizer.step(closure): strategy.training_step(step_fn, batch) has computed the gradients already; call"
    " optimizer.step() without a closure"
)
NOTHING_TO_STEP = (
    "optimizer.step() was called without a batch: call strategy.training_step(step_fn, batch), once or more often"
    " (gradient accumulation), before every optimizer.step()"
)
NOTHING_TO_CLIP = (
    "fabric.clip_gradients() was called without a batch: it clips the gradient of the batches since the last update;"
    " call it after strategy.training_step(step_fn, batch) and before optimizer.step()"
)
NO_OPTIMIZER_TO_LOAD = (
    "fabric.load: the optimizer in the state was not set up; call fabric.setup_module(model) and"
    " fabric.setup_optimizers(optimizer) first, and put what they returned into the state"
)
META_LOAD = (
    "fabric.load: the model in the state is still on the meta device and would keep nothing; call"
    " model = fabric.setup_module(model) first, and put what it returned into the state"
)


def not_set_up(caller: str) -> str:
    """Message for a call before the optimizer was set up."""
    return (
        f"{caller} needs a model and an optimizer: call model = fabric.setup_module(model) and then"
        " optimizer = fabric.setup_optimizers(make_optimizer(model)) first"
    )


def reserved(name: str) -> str:
    """Message for an entry of a checkpoint that has the name of the strategy's own."""
    return f"fabric.save: the state has an entry {name!r}, a name that the strategy needs itself; rename it"


def not_stepped(caller: str) -> str:
    """Message for a call between a batch and its update."""
    return (
        f"{caller}: batches were trained that no optimizer.step() followed, so their gradient would be lost; call"
        f" optimizer.step() on what fabric.setup_optimizers returned before {caller}"
    )


def module_problems(session: PipelineSession, module: nn.Module, precision: str, loss_reduction: str) -> list[str]:
    """What is wrong with the model that is set up, or with how it is to be trained."""
    problems = []
    if session.stage is not None:
        problems.append(
            f"a second model ({type(module).__name__}) was set up: one strategy runs one pipeline; put both into one"
            " module with pipeline_layers(), or use a second Fabric with a strategy of its own"
        )
    problems += problems_of_precision(precision) + problems_of_weight_dtype(session.settings.weight_dtype, precision)
    problems += model_problems(module, "the model")
    return problems + problems_of_reduction(loss_reduction)
