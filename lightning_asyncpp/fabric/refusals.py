"""Uses of Fabric that a pipeline cannot run right, each with the mend."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.user_hooks import problems_of_reduction
from lightning_asyncpp.core.cut.units import model_problems
from lightning_asyncpp.core.optimizers.configured import is_placeholder
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import problems_of_precision, problems_of_weight_dtype

JOINT_SETUP = (
    "fabric.setup(model, optimizer): the optimizer was made for the whole model, but every rank keeps only its own"
    " stage; call model = fabric.setup_module(model) first, make the optimizer from model.parameters(), and pass it to"
    " fabric.setup_optimizers(optimizer)"
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


def optimizer_problems(session: PipelineSession, optimizer: Optimizer) -> list[str]:
    """What is wrong with the optimizer that is set up."""
    if session.stage is None:
        return [
            "the optimizer was set up before the model: call model = fabric.setup_module(model) first, and make the"
            " optimizer from model.parameters(), which are then those of this rank's stage"
        ]
    if session.optimizer is not None:
        return [
            "a second optimizer was set up: a pipeline has exactly one update per mini-batch; use one optimizer with"
            " parameter groups (MuonAdamW splits its parameters by itself)"
        ]
    return _parameter_problems(session.stage.parameters, optimizer)


def _parameter_problems(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> list[str]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if not is_placeholder(p)}
    problems = []
    if held - {id(p) for p in parameters.values()}:
        problems.append(
            "the optimizer holds parameters that are not this stage's: it was made before"
            " model = fabric.setup_module(model), or from another model; make it from model.parameters() afterwards"
        )
    left = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if left and not problems:
        problems.append(
            f"parameters that require a gradient but are not in the optimizer: {', '.join(left[:8])}"
            f"{' and more' if len(left) > 8 else ''}; their gradients would count in the norm: add them, or set"
            " requires_grad=False before fabric.setup_module"
        )
    return problems
