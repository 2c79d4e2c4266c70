"""Uses of Fabric that a delayed gradient cannot serve right, each with the mend."""

from __future__ import annotations

SECOND_MODULE = (
    "a second model was set up: a delayed gradient belongs to one model and its optimizer; put both models into one"
    " torch.nn.Module"
)
NO_MODULE = (
    "the optimizer was set up before the model: call fabric.setup(model, optimizer), or fabric.setup_module(model)"
    " before fabric.setup_optimizers(optimizer)"
)
SECOND_OPTIMIZER = (
    "a second optimizer was set up: a delayed gradient has exactly one update; use one optimizer with parameter groups"
    " (MuonAdamW splits its parameters by itself)"
)
FORWARD_BEFORE_BACKWARD = (
    "the model was run for evaluation between a training forward and its backward: the parameters hold the older"
    " weights, and evaluation is meant for the newest; call fabric.backward(loss) first, or run a forward that no"
    " backward follows under torch.no_grad()"
)
LATE_BACKWARD = (
    "fabric.backward() without a training forward since the last update, evaluation or checkpoint: the parameters hold"
    " other weights by now than in the forward, and the gradient would mix both; run all backwards directly after"
    " their forwards, and run these by calling the model that fabric.setup returned, model(...), in training mode:"
    " calls of its methods or submodules are not seen"
)
BACKWARD = (
    "fabric.backward(): with micro_batches, strategy.training_step(step_fn, batch) runs the backward passes itself;"
    " leave fabric.backward out and let step_fn return the loss, or leave micro_batches out"
)
NO_MICRO_BATCHES = (
    "strategy.training_step and strategy.evaluation_step cut batches into micro-batches: give the strategy"
    " micro_batches, or write an ordinary loop with fabric.backward(loss)"
)
NOTHING_TO_STEP = (
    "optimizer.step() was called without a batch: with micro_batches, call strategy.training_step(step_fn, batch), once"
    " or more often (gradient accumulation), before every optimizer.step()"
)
COUNTS_WITHOUT_MICRO_BATCHES = (
    "the model has layers that count and change buffers once per update (StatisticsLayer), which an ordinary loop does"
    " not show to the strategy: give the strategy micro_batches, and call strategy.training_step(step_fn, batch)"
)


def not_set_up(caller: str) -> str:
    """Message for a call before the optimizer was set up."""
    return f"{caller} needs a model and an optimizer: call model, optimizer = fabric.setup(model, optimizer) first"
