"""Hooks between two batches that read weights to which an update is still to come: the user is told.

The update of batch t is applied in the middle of batch t+1 unless the pipeline drains. Meanwhile hooks that Lightning
calls see W_t where a single process has W_{t+1}: a mean of weights, the norm of an update or a swap of weights would be
one update old. To drain for every callback would cost what the pipeline gains, and most read no weights.

So they run under a ``TorchFunctionMode``, which sees every torch function and every attribute that is given a weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.private_names import required
from lightning_asyncpp.trainer.hooks.module_hooks import Replacement

_current_mode: Callable[[], TorchFunctionMode | None] = required(
    overrides, "_get_current_function_mode", "let the engine work apart from what watches hooks"
)

_BETWEEN = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_zero_grad")
CALLBACK_HOOKS = (*_BETWEEN, "on_train_batch_end")
MODULE_HOOKS = (*_BETWEEN, "optimizer_step")  # its on_train_batch_end comes once the update has been applied

# Whose hooks read no weights there, or drain first.
_PACKAGES = ("lightning", "lightning_asyncpp")
# What reads an attribute reads no weights, but for these views of them.
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_FACTS = frozenset({
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "get_device", "__len__", "__hash__", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad",
})  # fmt: skip


class StaleReads:
    """Watches the hooks of the user's callbacks and of the module, from :meth:`install` to :meth:`release`.

    Args:
        module: that is trained.
        session: the pipeline, started.
    """

    def __init__(self, module: LightningModule, session: PipelineSession) -> None:
        self._module, self._session = module, session
        self._replaced: list[_Replaced] = []
        self._mode: _SeesReads | None = None  # of the hook that runs
        self._is_on = False
        self._warned: set[type] = set()

    def install(self, trainer: L.Trainer) -> None:
        """Stand around the hooks, if weights can be behind in them."""
        engine = self._session.running()
        if engine.settings.delay == 0:
            return
        trained = set(map(id, engine.weights.parameters.values()))
        names = {id(p): name for name, p in self._module.named_parameters() if id(p) in trained}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            self._replace(callback, CALLBACK_HOOKS, names)
        self._replace(self._module, MODULE_HOOKS, names)

    def release(self) -> None:
        """Give the hooks back."""
        for owner, name, own in self._replaced:
            vars(owner).pop(name, None)
            if own is not None:
                vars(owner)[name] = own
        self._replaced.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing while the engine works, which a hook may ask for; nor afterwards, if no update is left."""
        self._switch_off()
        try:
            yield
        finally:
            self._switch_on()

    def _replace(self, owner: Callback | LightningModule, hooks: Iterable[str], names: Mapping[int, str]) -> None:
        for hook in hooks:
            function = getattr(owner, hook)
            if _is_users(function):
                self._replaced.append(_Replaced(owner, hook, vars(owner).get(hook)))
                mode = _SeesReads(names, partial(self._warn, owner, hook))
                watched = Replacement(owner, hook, partial(self._call, function, mode))
                vars(watched)["__wrapped__"] = function  # Lightning asks whether a hook is overridden
                vars(owner)[hook] = watched

    def _call(self, function: Callable[..., Any], mode: _SeesReads, *args: Any, **kwargs: Any) -> Any:
        outer, self._mode = self._mode, mode  # on_before_zero_grad comes within optimizer_step, where it is paused
        self._switch_on()
        try:
            return function(*args, **kwargs)
        finally:
            self._switch_off()
            self._mode = outer

    def _switch_on(self) -> None:
        if self._mode is not None and not self._is_on and not self._mode.has_seen and self._is_outstanding():
            self._mode.__enter__()
            self._is_on = True

    def _switch_off(self) -> None:
        # A mode that the user has put above it stays there, and so does this one.
        if self._is_on and self._mode is not None and _current_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._is_on = False

    def _is_outstanding(self) -> bool:
        engine = self._session.engine
        return engine is not None and engine.updates.applied < engine.mini_batch

    def _warn(self, owner: Callback | LightningModule, hook: str, name: str) -> bool:
        """Warn once of every class; whether the read was a stale one."""
        if not self._is_outstanding():
            return False
        if type(owner) not in self._warned:
            self._warned.add(type(owner))
            # On every rank: each has other layers, and may be the only one that reads.
            warnings.warn(_message(owner, hook, name), stacklevel=2)
        return True


class _Replaced(NamedTuple):
    """A hook that is watched.

    Attributes:
        owner: the callback or the module.
        name: of the hook.
        own: what its instance had under that name; None if its class alone has it.
    """

    owner: Callback | LightningModule
    name: str
    own: Any


class _SeesReads(TorchFunctionMode):
    """Notices the first weight that a torch function is given.

    Args:
        names: id of a weight -> its name.
        found: called with the name; whether that was all there is to see.
    """

    def __init__(self, names: Mapping[int, str], found: Callable[[str], bool]) -> None:
        super().__init__()
        self._names, self._found = names, found
        self.has_seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.has_seen and not _asks_for_facts(func):
            name = self._weight_in(args) or (kwargs and self._weight_in(kwargs.values()))
            if name:
                self.has_seen = self._found(name)
        return func(*args, **(kwargs or {}))

    def _weight_in(self, values: Iterable[Any]) -> str | None:
        for value in values:
            if isinstance(value, (list, tuple)):
                if name := self._weight_in(value):
                    return name
            elif isinstance(value, Tensor) and (name := self._names.get(id(value))):
                return name
        return None


def _is_users(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] not in _PACKAGES


def _asks_for_facts(func: Callable[..., Any]) -> bool:
    """Whether the values of a tensor do not matter to a torch function: its shape, its dtype, its gradient, ..."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _FACTS or name == "__set__" or name.startswith(("is_", "new_")) or name.endswith("_like")


def _message(owner: Callback | LightningModule, hook: str, name: str) -> str:
    instead = (
        "lightning_asyncpp.after_own_update(callback) has its on_train_batch_end called once the update has been"
        " applied, as the LightningModule's own on_train_batch_end is; Lightning's EMAWeightAveraging and"
        " WeightAveraging average every update"
        if isinstance(owner, Callback)
        else "its on_train_batch_end is called once the update has been applied"
    )
    return (
        f"{hook} of {type(owner).__name__} reads weights ({name}) before the last update has been applied to them; in a"
        " single process it would have been. An asynchronous pipeline applies the update of a batch in the middle of"
        " the next one, so means of weights, norms of updates and swaps of weights that are made here are one update"
        f" old. Instead: {instead}; in on_train_epoch_end and in validations all updates have been applied"
    )
