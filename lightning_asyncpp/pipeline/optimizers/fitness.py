"""Whether an optimizer can be a stage's, or one of delayed gradients, in words for the user."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_asyncpp.pipeline.optimizers.naming import name_of
from lightning_asyncpp.pipeline.optimizers.one_gradient import no_closure, several_gradients
from lightning_asyncpp.pipeline.optimizers.probe import GLOBAL, LOSS, RANDOM, SEVERAL, TALKS, Verdict, examine, is_known
from lightning_asyncpp.pipeline.optimizers.state_form import state_problems

_OTHERWISE = "or strategy='delayed_gradient' in one process, which computes with the whole model's"
_REASONS = {
    GLOBAL: (
        "computes over all of its parameters (other gradients of some of them, or leaving them out, changed the step of"
        " the rest), but every stage has an optimizer of its own, and would compute over the stage's; use an optimizer"
        " that treats every parameter by itself, the option that switches this off (max_grad_norm=0, and"
        f" gradient_clip_val of the Trainer or fabric.clip_gradients), {_OTHERWISE}"
    ),
    RANDOM: (
        "draws random numbers in its step: every stage and every replica would draw its own, and weights that are the"
        " same ones would drift apart; use an optimizer, or options, that draw none,"
        f" {_OTHERWISE}"
    ),
    LOSS: (
        "computes with the loss that its closure returns, which no stage knows when it steps; use an optimizer that"
        f" needs gradients only, {_OTHERWISE}"
    ),
    TALKS: (
        "communicates with other processes in its step, but these hold other stages; use an optimizer that steps by"
        f" itself: gradients are summed over replicas before, {_OTHERWISE}"
    ),
}


def stage_problems(optimizer: Optimizer, with_closure: bool) -> list[str]:
    """Why an optimizer cannot step one stage of a model; other ranks may find what this one does not.

    Args:
        optimizer: over this stage's parameters; it stays as it is.
        with_closure: whether its step is given a closure that does more than to return something.
    """
    if is_known(optimizer) and not isinstance(optimizer, LBFGS):
        return []
    verdict = examine(optimizer)
    if verdict.kind == SEVERAL:
        return [several_gradients(optimizer)]
    if verdict.kind:
        return [f"{name_of(optimizer)} {_REASONS[verdict.kind]}"]
    if problems := state_problems(optimizer):
        return problems
    if verdict.unknown:
        _warn(optimizer, verdict)
    elif with_closure and not verdict.calls_closure:
        return [no_closure(optimizer)]
    return []


def sparse_problems(model: nn.Module) -> list[str]:
    """Layers of this stage whose gradients would be sparse, which are not summed over micro-batches and ranks."""
    return [
        f"{name or 'the model'} ({type(layer).__name__}) has sparse=True: gradients are summed, counted and clipped"
        " over micro-batches and stages, which is done with dense ones only; make it with sparse=False"
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    ]


def delayed_problems(optimizer: Optimizer) -> list[str]:
    """Why an optimizer over the whole model cannot take delayed gradients."""
    if is_known(optimizer) and not isinstance(optimizer, LBFGS):
        return []
    return [several_gradients(optimizer)] if examine(optimizer).kind == SEVERAL else []


def _warn(optimizer: Optimizer, verdict: Verdict) -> None:
    rank_zero_warn(
        f"{name_of(optimizer)} could not be examined before training: {verdict.unknown}. If its step computes over all"
        " of its parameters (a norm, an estimated step size) or draws random numbers, stages compute something else"
        " than the whole model would: compare a short run with strategy='delayed_gradient' and the same micro_batches"
    )
