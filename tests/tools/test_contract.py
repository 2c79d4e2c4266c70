"""Wrong examples of the contract are refused, or check_model finds them and names the sentence; right ones pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp import ConfigurationError, check_model
from lightning_asyncpp.tools.check import record as report

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "contract.md"
TEXT = PAGE.read_text(encoding="utf-8")
# The code that the page's examples change.
READY = """
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

import lightning_asyncpp
from lightning_asyncpp.auxiliary import add_auxiliary_loss


class Classifier(L.LightningModule):
    def __init__(self, *more):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), *more
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class WithMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(16))


class Averages(L.Callback):
    def __init__(self):
        self.mean = torch.zeros(16, 8)
"""
SENTENCES = {
    int(number): (title, body)
    for number, title, body in re.findall(r"(?ms)^\*\*(\d+)\. (.*?)\.\*\*(.*?)(?=^\*\*\d|^## |\Z)", TEXT)
}
UNSEEN = [number for number, (_, body) in SENTENCES.items() if "*unseen*" in body and number != 14]
REFUSED = {1: (ConfigurationError, ""), 2: (ConfigurationError, "twice"), 4: (RuntimeError, "")}


def batches(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    if number == 9:
        return [torch.randn(6, 8, 8, generator=generator)]
    return [(torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(3)]


def compared(number: int, side: int) -> Any:
    """Return check_model's report on the wrong example of a sentence (``side`` 0) or on the right one (1)."""
    names: dict[str, Any] = {}
    exec(READY, names)
    codes = re.findall(r"(?ms)^```python\n(.*?)^```", SENTENCES[number][1])
    for code in codes[: side + 1]:  # the right example may build on the wrong one
        for name in ("module", "callbacks"):
            names.pop(name, None)
        if "class Net(Net)" not in code:
            names["Net"] = names["Classifier"]
        exec(code, names)
    module = names["module"] if "module" in names else names["Net"]()
    updates = 2 if number < 12 else 3  # a delay shows in the third update
    return check_model(module, batches(number), callbacks=names.get("callbacks"), updates=updates)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n in UNSEEN else pytest.mark.slow) for n in SENTENCES])
def test_right_examples_train_as_in_one_process(number: int) -> None:
    """Right examples pass; by default only those run whose wrong counterparts cannot be found."""
    found = compared(number, 1)
    assert found.ok, str(found)


@pytest.mark.parametrize("number", sorted({*SENTENCES} - {*UNSEEN}))
def test_wrong_examples_are_refused_or_found(number: int) -> None:
    if number in REFUSED:
        error, message = REFUSED[number]
        with pytest.raises(error, match=message):
            compared(number, 0)
        return
    found = str(compared(number, 0))
    assert f"{number} ({SENTENCES[number][0]})" in found, found
    assert "docs/concepts/contract.md" in found
    assert number != 6 or "self.loss of the module differs, too: " in found


def test_the_report_knows_the_page() -> None:
    assert [*SENTENCES] == [*range(1, 18)]
    assert UNSEEN == [10, 16, 17]
    assert {number: SENTENCES[number][0] for number in report._SENTENCES} == report._SENTENCES
    named = {number for of_kind in report._WHY.values() for numbers in of_kind.values() for number in numbers}
    assert named == {*report._SENTENCES}
