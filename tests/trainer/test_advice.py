"""The start of a training says what a plain Adam does better with, once, where gradients are delayed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lightning_utilities.core import rank_zero

from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit


def fit_and_note(run: Run) -> list[str]:
    """What a training tells on this rank of its optimizer."""
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        fit(run)
    finally:
        rank_zero.log.removeHandler(handler)
    return [note for note in notes if "four per stage" in note]


def test_a_plain_adam_with_few_micro_batches_is_told_once(pools: Pools) -> None:
    told, elsewhere = pools.run(2, fit_and_note, Run(Net, strategy="default"))
    assert elsewhere == []
    assert len(told) == 1
    assert told[0].startswith("AdamW with micro_batches=4 on 2 stages")


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "sync"}, {"strategy": "async"}, {"error_feedback": True}, {"options": {"micro_batches": 8}}],
    ids=["synchronous", "all equally old", "corrected", "enough"],
)
def test_all_others_are_not(pools: Pools, changes: dict[str, Any]) -> None:
    run = Run(**({"module": Net, "strategy": "default"} | changes))
    assert pools.run(2, fit_and_note, run) == [[], []]
