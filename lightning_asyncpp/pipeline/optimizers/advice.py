"""What an optimizer does better with: for the log, where nothing is wrong."""

from __future__ import annotations

from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_asyncpp.pipeline.optimizers.configured import name_of
from lightning_asyncpp.pipeline.settings import ResolvedSettings

_ADAMS = (Adam, AdamW, NAdam, RAdam)  # with torch before 2.7 AdamW is no Adam
_ENOUGH = 4  # micro-batches per stage, with which they hardly notice the delay


def advice_on_micro_batches(optimizer: Optimizer, settings: ResolvedSettings) -> str | None:
    """What to tell who trains on delayed gradients with a plain Adam and few micro-batches; None for all others.

    With another staleness than the least the number of micro-batches does not change how old gradients are.

    Args:
        optimizer: of a stage; one that corrects the delay is around an Adam, and none itself.
        settings: of the pipeline that runs.
    """
    wanted = _ENOUGH * settings.num_stages
    if not settings.delay or settings.staleness != "least" or settings.micro_batches >= wanted:
        return None
    if not isinstance(optimizer, _ADAMS):
        return None
    return (
        f"{name_of(optimizer)} with micro_batches={settings.micro_batches} on {settings.num_stages} stages: it learns"
        f" more slowly from delayed gradients; micro_batches={wanted} (four per stage) delays fewer of them, and Muon or"
        " ErrorFeedback keep more of the quality:"
        " https://lightning-asyncpp.github.io/lightning-asyncpp/guides/choosing/#if-the-delay-costs-too-much"
    )
