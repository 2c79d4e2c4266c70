"""Where the user's functions for micro-batches come from."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_asyncpp.core.batches.micro_batch import number_of_samples, split_batch
from lightning_asyncpp.core.batches.user_hooks import UserHooks


class Summing:
    """Decides two of the three itself."""

    loss_reduction = "sum"

    def micro_batch_weight(self, micro_batch: Any) -> float:
        return 7.0


def test_a_module_without_any_gets_the_defaults() -> None:
    assert UserHooks.of(object()) == UserHooks(split_batch, number_of_samples, "mean")


def test_the_modules_own_come_before_the_defaults() -> None:
    hooks = UserHooks.of(Summing(), model_name="model")
    assert (hooks.micro_batch_weight(None), hooks.loss_reduction) == (7.0, "sum")
    assert (hooks.split_batch, hooks.model_name) == (split_batch, "model")


def test_what_is_given_comes_before_the_modules_own() -> None:
    hooks = UserHooks.of(Summing(), {"loss_reduction": "mean", "micro_batch_weight": None})
    assert (hooks.loss_reduction, hooks.micro_batch_weight(None)) == ("mean", 7.0)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="weigth"):
        UserHooks.of(object(), {"weigth": len})
