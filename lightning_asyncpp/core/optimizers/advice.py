"""What an optimizer does better with: for the log, where nothing is wrong."""

from __future__ import annotations

from torch.optim import Adam, NAdam, Optimizer, RAdam

from lightning_asyncpp.core.optimizers.configured import name_of

_ADAMS = (Adam, NAdam, RAdam)  # AdamW is an Adam, too
_ENOUGH = 4  # micro-batches per stage, with which they hardly notice the delay


def advice_on_micro_batches(optimizer: Optimizer, stages: int, micro_batches: int) -> str | None:
    """What to tell who trains a plain Adam on delayed gradients with few micro-batches; None for all others.

    Args:
        optimizer: of a stage; one that corrects the delay is around an Adam, and none itself.
        stages: of a pipeline in which the more micro-batches there are, the fewer are delayed.
        micro_batches: of a mini-batch.
    """
    wanted = _ENOUGH * stages
    if micro_batches >= wanted or not isinstance(optimizer, _ADAMS):
        return None
    return (
        f"{name_of(optimizer)} with micro_batches={micro_batches} on {stages} stages: it learns more slowly from"
        f" delayed gradients. With micro_batches={wanted}, four per stage, fewer are; Muon or ErrorFeedback keep"
        " more of the quality:"
        " https://lightning-asyncpp.github.io/lightning-asyncpp/guides/choosing/#if-the-delay-costs-too-much"
    )
