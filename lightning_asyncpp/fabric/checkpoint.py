"""Fabric checkpoints of a pipeline, in one file or sharded, and loaders that resume from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.core.checkpoint import (
    PIPELINE,
    gathered,
    load_model_state,
    load_pipeline_state,
    stage_model_state,
    stage_pipeline_state,
)
from lightning_asyncpp.core.cut.whole_model import whole_of
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader, is_stateful, set_epoch, warn_if_inexact
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderBatch, PlaceholderLoader, shuffle_by_epoch


class PipelineCheckpoints(PipelineStrategyMixin, DDPStrategy):
    """Strategy that saves the whole run and loads this stage's part of a checkpoint."""

    _clipping: tuple[str, float] | None
    _resumed_at: int | None = None  # number of the next microbatch when an optimizer was loaded

    @abstractmethod
    def _driving(self) -> AbstractContextManager[None]:
        """Return a context in which the engine may run."""

    @abstractmethod
    def _drain(self) -> None:
        """Finish all microbatches in flight and apply every update, between two mini-batches."""

    def full_state_dict(self) -> dict[str, Any]:
        """Drain (apply all outstanding updates), and return a ``state_dict``; a collective call.

        On rank 0 the result covers the whole model; on other ranks, only their stage.
        """
        self._drain()
        with self._driving():
            return gathered(self.session, self._stage_state())

    def _stage_state(self) -> dict[str, Any]:
        assert self.session.stage is not None
        self.session.share_buffers()
        return stage_model_state(self.session, self.session.stage.state_dict())

    @override
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write ``state`` and, if it has the optimizer, the pipeline's state with its older weights; a collective call.

        Rank 0 writes one file, or with ``state_dict_type="sharded"`` every stage writes its part of a folder.

        Raises:
            StorageError: the checkpoint cannot be written; an earlier one of the same kind (file or folder) at this
                path is intact, or the complete new one has replaced it. With ``async_checkpoints`` it is the next save
                or load, or the end of the run, that raises.
        """
        parts: dict[str, Any] = {}
        if self.session.stage is not None:
            self._drain()
            with self._driving():
                parts = self._parts_of(state)
        content = _converted({**state, **parts}, filter or {})
        if not self.is_global_zero:
            content = {name: content[name] for name in parts}
        with self._driving():
            files = self.checkpoint_io
            self.checkpoints.save(path, content, lambda it: files.save_checkpoint(it, path, storage_options))

    def _parts_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state that belong to the pipeline: model, optimizer, averages of weights.

        If the state has the optimizer, an entry ``"pipeline"`` with the pipeline's state is added. A collective call.
        """
        session, collected = self.session, self.checkpoints.collected
        parts: dict[str, Any] = {}
        for name, value in state.items():
            if value is self._trained_model:
                parts[name] = collected(self._stage_state())
            elif session.optimizer is not None and value is session.optimizer:
                parts[name] = collected(session.stage_optimizer.state_dict())
                parts[PIPELINE] = collected(stage_pipeline_state(session))
            elif isinstance(value, nn.Module) and any(map(whole_of, value.modules())):
                parts[name] = collected(value.state_dict())  # an average of weights
        return parts

    @override
    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of :meth:`save_checkpoint` on every rank.

        If ``state`` has the model and the optimizer, the run then continues as if uninterrupted.

        Raises:
            ConfigurationError: the checkpoint was written with another ``weight_dtype`` or other groups of parameters.
            KeyError: with ``strict``, an entry of ``state`` is missing.
        """
        if self.session.stage is not None:
            self._drain()
        self.checkpoints.settle()
        if isinstance(state, Optimizer):
            self.session.stage_optimizer.load_state_dict(super().load_checkpoint(path, None, strict, weights_only))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        return self._load_state(path, state, strict, weights_only)

    def _load_state(self, path: Any, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
        others = {name: value for name, value in state.items() if not isinstance(value, Optimizer)}
        remainder = super().load_checkpoint(path, others, strict, weights_only)
        progress = remainder.pop(PIPELINE, None)
        state.update(others)
        if self._has_resumed and any(value is self._trained_model for value in others.values()):
            load_pipeline_state(self.session, progress)  # loading the model overwrote the older weight version
        for name in state.keys() - others.keys():
            if name in remainder:
                load_pipeline_state(self.session, progress)
                self.session.stage_optimizer.load_state_dict(remainder.pop(name))
                self._clipping = None
                self._resumed_at = self.session.running().next_forward
            elif strict:
                raise KeyError(f"the checkpoint has no entry {name!r}; pass strict=False to go on without it")
        return remainder

    @property
    def _has_resumed(self) -> bool:
        """Whether an optimizer was loaded and nothing was trained since then.

        While this holds, a separate call that loads only the model still belongs to the same resume, so it restores
        the older weight version, too.
        """
        return self._resumed_at is not None and self.session.running().next_forward == self._resumed_at

    @property
    def _trained_model(self) -> nn.Module | None:
        return None if self.session.stage is None else self.session.stage.model

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a ``state_dict`` into a module; the pipeline's model takes only this stage's part of it."""
        if module is self._trained_model:
            load_model_state(self.session, module, state_dict, strict)
        else:
            if any(map(whole_of, module.modules())):  # an average of this stage's weights
                own = module.state_dict().keys()
                state_dict = {name: value for name, value in state_dict.items() if name in own}
            super().load_module_state_dict(module, state_dict, strict)


class FabricLoader(ResumableLoader):
    """Loader for a Fabric loop; ``fabric.save`` stores its position if the loader is part of the state.

    After ``fabric.load`` the next loop over the loader reads the rest of the epoch in which the checkpoint was saved,
    and later loops read the next epochs. The loader counts epochs itself, since Fabric starts again at 0 when a run
    resumes in a new process.

    Args:
        loader: loader of this replica; on a middle stage a :class:`PlaceholderLoader` if the length is reliable.
    """

    def __init__(self, loader: Any) -> None:
        given = loader.loader if isinstance(loader, PlaceholderLoader) else loader
        shuffle_by_epoch(given, shuffle=True)
        super().__init__(loader, lambda: 0)
        self._given = given
        self._epoch, self._is_over = -1, True  # epoch of the newest iteration; whether it has ended
        self._newest: object = None
        self._rest: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop received, or between two epochs."""
        if self._rest is not None:  # loaded, but not iterated yet
            return dict(self._rest)
        if self._resumed is not None:
            return {**self._resumed[0], "is_over": True}
        here = {"epoch": self._epoch, "is_over": self._is_over, "length": self.length}
        return {**here, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict` for the next iteration.

        Raises:
            ConfigurationError: a loader without a pipeline wrote the state.
        """
        if "is_over" not in state:
            raise ConfigurationError(
                "a Fabric run without a pipeline saved this loader, and a pipeline cannot take up its place: leave the"
                " loader out of the state that you load, and begin an epoch"
            )
        if self._has_rest(state):
            warn_if_inexact(self._given, state)
        self._rest = state

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or over the rest of the epoch in which the checkpoint was written."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._epoch, self._is_over = int(rest["epoch"]), bool(rest["is_over"])
        goes_on = rest is not None and not self._is_over
        if rest is not None and not (goes_on and self._has_rest(rest)):
            self.resume(rest, ended=True)
            if goes_on:  # nothing is left of the epoch; the next iteration begins the next epoch
                self._is_over = True
                return
        elif rest is not None:
            self.resume(rest, ended=False)
        self._epoch, self._is_over = self._epoch + (not goes_on), False
        self._newest = newest = object()
        try:
            yield from self._batches_of_epoch(int(rest["batches"]) if rest is not None and goes_on else 0)
        finally:
            if newest is self._newest:  # an older iterator may be closed after a newer one has begun
                self._is_over = True

    def _batches_of_epoch(self, begun: int) -> Iterator[Any]:
        if not isinstance(self.loader, PlaceholderLoader):
            set_epoch(self.loader, self._epoch)
            yield from super().__iter__()
            return
        for number in range(begun, len(self.loader)):
            self._batches = number + 1
            yield PlaceholderBatch()

    def _has_rest(self, state: Mapping[str, Any]) -> bool:
        """Return whether batches are left of the epoch in which a state was saved."""
        if state["is_over"] or state["exhausted"]:
            return False
        length = state["length"]
        return length is None or int(state["batches"]) < length


def resumable(loader: Any, given: Any) -> FabricLoader:
    """Return a resumable loader with the attributes (``dataset``, ``batch_size``) of the user's loader.

    Args:
        loader: loader that this rank iterates.
        given: loader of the user.
    """
    wrapped = FabricLoader(loader)
    attributes = {name: value for name, value in vars(given).items() if name not in ("state_dict", "load_state_dict")}
    vars(wrapped).update({**attributes, **vars(wrapped)})  # Fabric's wrapper copies the attributes in vars()
    return wrapped


def _converted(state: Mapping[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]) -> dict[str, Any]:
    """Replace modules and optimizers in a state by their ``state_dict``, and apply the filter of ``fabric.save``."""
    converted = {name: value.state_dict() if is_stateful(value) else value for name, value in state.items()}
    for name, keep in filter.items():
        converted[name] = {key: value for key, value in converted[name].items() if keep(key, value)}
    return converted
