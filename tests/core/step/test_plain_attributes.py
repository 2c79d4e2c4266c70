"""Attributes that a model keeps: what was changed is named, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.step.model_in_step import PlainAttributes


class Layer(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.scale, self.name, self.sizes, self.config = 1.0, "a", [1, 2], shared
        self.options: dict[str, Any] = {"rate": 0.1, "function": torch.relu}
        self.kept: Any = None


def changed_by(change: Any) -> str | None:
    config = SimpleNamespace(width=3)
    model = nn.Sequential(Layer(config), Layer(config))
    attributes = PlainAttributes(dict(model.named_modules()))
    attributes.find()
    attributes.remember()
    assert attributes.changed() is None
    change(model)
    return attributes.changed()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m[1], "scale", 2.0), "1.scale"),
        (lambda m: setattr(m[1], "name", "b"), "1.name"),
        (lambda m: setattr(m[1].config, "width", 4), "0.config['width']"),
        (lambda m: m[1].options.update(rate=0.2), "1.options['rate']"),
        (lambda m: m[0].sizes.__setitem__(1, 3), "0.sizes[1]"),
        (lambda m: delattr(m[0], "scale"), "0.scale"),
        (lambda m: setattr(m[0], "kept", torch.ones(1)), "0.kept"),
    ],
)
def test_what_was_changed_is_named(change: Any, name: str) -> None:
    assert changed_by(change) == name


@pytest.mark.parametrize(
    "change",
    [lambda m: m.eval(), lambda m: setattr(m[0], "scale", 1.0), lambda m: m[0].register_buffer("b", torch.ones(1))],
)
def test_nothing_else_is(change: Any) -> None:
    assert changed_by(change) is None


def test_a_list_that_becomes_shorter() -> None:
    assert changed_by(lambda m: m[0].sizes.pop()) == "0.sizes[1]"
