"""Where the user's functions for microbatches come from."""

from __future__ import annotations

from typing import Any

from lightning_asyncpp.core.microbatch import UserHooks, number_of_samples, split_batch


class Summing:
    """Decides two of the three itself."""

    loss_reduction = "sum"

    def microbatch_weight(self, microbatch: Any) -> float:
        return 7.0


def test_a_module_without_any_gets_the_defaults() -> None:
    assert UserHooks.of(object()) == UserHooks(split_batch, number_of_samples, "mean")


def test_the_modules_own_come_before_the_defaults() -> None:
    hooks = UserHooks.of(Summing(), model_name="model")
    assert (hooks.microbatch_weight(None), hooks.loss_reduction) == (7.0, "sum")
    assert (hooks.split_batch, hooks.model_name) == (split_batch, "model")
