"""Evaluation over the stages of a pipeline, through the Trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from lightning_asyncpp.core.tree import merge_outputs
from lightning_asyncpp.trainer.replica_batches import ReplicaBatches
from lightning_asyncpp.trainer.step_log import StepLog


class EvaluationSteps(ReplicaBatches):
    """Runs the steps of validation, test and prediction.

    Attributes:
        step_log: what the steps log.
    """

    step_log: StepLog

    @abstractmethod
    def _user_step(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Callable[[Any, float | None], Any]:
        """The user's step for a micro-batch of some weight, whose logged values are recorded."""

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        engine = self.session.running()
        output = engine.evaluate(args[0], self._user_step(name, args, kwargs), purpose=name)
        if not engine.mesh.is_last:
            return None
        self.step_log.log_batch(output.weight)
        return merge_outputs(output.results, output.weights)

    def evaluation_step(self, step_fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a batch forward on the newest weights, without gradients; the pipeline is drained first. Collective.

        For what is no ``*_step`` of the module, such as text to be sampled in a callback. The model runs in the mode
        that it is in.

        Args:
            step_fn: micro-batch -> anything; it calls ``self.model(...)`` once.
            batch: the batch, on the first and the last stage, on their device; middle stages ignore it.

        Returns:
            On the last stage what ``step_fn`` would have returned for the whole batch, joined as in Fabric's
            ``evaluation_step``; ``None`` elsewhere.
        """
        engine = self.session.running()
        self.drain()
        with torch.no_grad():
            output = engine.evaluate(batch, lambda micro_batch, _: step_fn(micro_batch), "evaluation_step")
        return merge_outputs(output.results, output.weights) if engine.mesh.is_last else None

    @override
    def on_validation_start(self) -> None:
        self.drain()
