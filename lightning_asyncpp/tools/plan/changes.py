"""What to change in a recipe that does not fit, tried one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.plan.estimate import Estimate

_CHECKPOINTING = "--model.init_args.activation_checkpointing"
_PIPELINE = "--trainer.strategy.init_args."
_MICRO_BATCHES, _LOOKAHEAD, _PARTITION = (_PIPELINE + name for name in ("micro_batches", "lookahead", "partition"))


Change = tuple[str, Estimate]
"""Arguments of the command, and what becomes of the recipe with them."""


def changes_of(estimate: Estimate, plan: Callable[[Sequence[str]], Estimate]) -> list[Change]:
    """Try changes, those that cost least first; end with the first that is enough.

    Args:
        estimate: of the recipe as it is.
        plan: further arguments of the command -> what it says with them.
    """
    tried: list[Change] = []
    for candidate in _candidates(estimate):
        arguments = [str(part) for argument in candidate.items() for part in argument]
        with suppress(ConfigurationError, ValueError):  # else this recipe cannot be changed so
            tried.append((" ".join(arguments), plan(arguments)))
            if tried[-1][1].fits:
                break
    return tried


def _candidates(estimate: Estimate) -> Iterator[Mapping[str, Any]]:
    settings, recipe = estimate.settings, estimate.recipe
    kinds = {"none": ("selective", "block"), "selective": ("block",)}.get(recipe.checkpointing or "", ())
    counts = [settings.micro_batches * factor for factor in (2, 4, 8, 16)]
    checkpointed: list[dict[str, Any]] = [{_CHECKPOINTING: kind} for kind in kinds]
    more: list[dict[str, Any]] = [{_MICRO_BATCHES: count} for count in counts if recipe.batch_size % count == 0]
    ahead: list[dict[str, Any]] = [{_LOOKAHEAD: 0}] if settings.lookahead else []
    yield from (*checkpointed[:1], *more, *ahead, *checkpointed[1:])
    together = {name: value for part in (*checkpointed[-1:], *more[-1:], *ahead) for name, value in part.items()}
    yield together
    for factor in (2, 4, 8):
        devices = factor * recipe.devices
        stages = devices // settings.data_parallel_size
        count = {_MICRO_BATCHES: max(2 * stages, together.get(_MICRO_BATCHES, 0))} if settings.delay else {}
        # Numbers of the recipe are for as many stages as it has.
        uncut = {} if isinstance(settings.partition, str) else {_PARTITION: "auto"}
        yield {"--devices": devices, **together, **count, **uncut}
