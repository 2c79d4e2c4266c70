"""Base class of the Trainer strategies for a rank's batches, and for validation, test and prediction steps."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_asyncpp.core.tree import merge_outputs
from lightning_asyncpp.strategy_parts.stage_loader import AnnouncingLoader, Next, has_placeholder, stage_loader
from lightning_asyncpp.trainer.checkpoint import PipelineCheckpoints
from lightning_asyncpp.trainer.step_log import StepLog

_HOOK = "on_before_batch_transfer"
_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")


class EvaluationSteps(PipelineCheckpoints):
    """Strategy that distributes batches over replicas, and runs the steps of validation, test and prediction.

    Attributes:
        step_log: values that the steps log.
    """

    step_log: StepLog
    _only_moves_batches = True

    def take_batch_hooks(self, owners: list[Any], until: ExitStack) -> None:
        """Hide the placeholder batches of middle stages, which read no data, from the users' hooks.

        Args:
            owners: the module, and the data module or None.
            until: stack that restores the hooks when it is closed.
        """
        # Without transfer hooks, the batch on the host equals the one on the device.
        self._only_moves_batches = not any(is_overridden(name, of) for name in _TRANSFER_HOOKS for of in owners)
        for owner in owners:
            if owner is not None and is_overridden(_HOOK, owner):
                owner.__dict__[_HOOK] = functools.partial(_unless_placeholder, getattr(owner, _HOOK))
                until.callback(owner.__dict__.pop, _HOOK, None)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.session.mesh
        if mesh is None:
            return {"num_replicas": self.session.settings.data_parallel_size, "rank": 0}
        return {"num_replicas": mesh.num_replicas, "rank": mesh.replica}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        engine, trainer = self.session.running(), self.lightning_module.trainer
        mesh, transport = engine.mesh, engine.runner.transport
        needs_data = mesh.is_first or mesh.is_last
        follow = None if transport is None else lambda: Next(transport.follow_loaded())
        loader = stage_loader(dataloader, mesh.num_replicas, mesh.replica, needs_data, follow)
        loader = self.progress.training_loader(loader, trainer) if trainer.training else loader
        if transport is not None and mesh.is_first and mesh.num_stages > 2:
            return AnnouncingLoader(loader, transport.announce_loaded)
        return loader

    @abstractmethod
    def _user_step(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Callable[[Any, float | None], Any]:
        """Return a function of a microbatch and its weight that runs the user's step and records logged values."""

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
        """Drain (apply all outstanding updates), then run a batch forward without gradients; a collective call.

        Use it for forwards outside of the module's ``*_step`` methods, such as text that a callback samples. The model
        keeps its mode (``train`` or ``eval``).

        Args:
            step_fn: function of a microbatch that calls ``self.model(...)`` once.
            batch: the batch, on this rank's device. Only the first and the last stage use it.

        Returns:
            On the last stage the result of ``step_fn`` for the whole batch, joined as in Fabric's ``evaluation_step``;
            ``None`` on other stages.
        """
        engine = self.session.running()
        self.drain()
        with torch.no_grad():
            output = engine.evaluate(batch, lambda microbatch, _: step_fn(microbatch), "evaluation_step")
        return merge_outputs(output.results, output.weights) if engine.mesh.is_last else None

    @override
    def on_validation_start(self) -> None:
        self.drain()
        self.session.share_buffers()


def _unless_placeholder(hook: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
    return batch if has_placeholder(batch) else hook(batch, dataloader_idx)
