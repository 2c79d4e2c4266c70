"""Training loader that resumes from a checkpoint, with the batch after the last trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_asyncpp.data.replica import classes_of_litdata
from lightning_asyncpp.strategy_parts.stage_loader import LoaderInFront

_END = object()
_INEXACT = (
    "the checkpoint was written after batch {} of an epoch, and the rest of the epoch is not resumed exactly: {}."
    " Some batches may be read twice or not at all; the next epoch is complete. To resume exactly, use a checkpoint of"
    " an epoch's end, or a loader with a state, such as torchdata's StatefulDataLoader or litdata's StreamingDataLoader"
)


class ResumableLoader(LoaderInFront):
    """Wrapper that makes a training loader resumable.

    Stateful loaders follow torchdata's protocol: with a state from the end of an epoch they begin the next epoch.

    Args:
        loader: loader of this replica.
        prefetched: function that returns the number of batches read here that training has not received yet.
    """

    def __init__(self, loader: Any, prefetched: Callable[[], int]) -> None:
        super().__init__(loader)
        self._prefetched = prefetched
        self._generator = torch.Generator()
        self._batches = 0
        self._exhausted = False
        self._before: dict[str, Any] = {"batches": 0}
        self._resumed: tuple[Mapping[str, Any], bool] | None = None

    @property
    def length(self) -> int | None:
        """Number of batches of an epoch; None if it is unknown."""
        return sized_len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that training received, even if that was in an earlier run."""
        if self._resumed is not None:
            return dict(self._resumed[0])
        return self._before if self._prefetched() else self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the wrapped loader, as Lightning saves it; :meth:`resume` loads states of this class."""
        if "batches" not in state and is_stateful(self.loader):
            self.loader.load_state_dict(state)

    def resume(self, state: Mapping[str, Any], ended: bool) -> None:
        """Begin the next iteration at a checkpoint's position.

        Args:
            state: result of :meth:`state_dict`.
            ended: whether the state's epoch had ended, so that the next epoch begins.
        """
        self._resumed = (state, ended)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch; nothing is read before the first batch is requested."""
        resumed, self._resumed = self._resumed, None
        state, ended = resumed or ({}, True)
        if not ended and state.get("exhausted"):  # one of several loaders, which ended before the epoch did
            self._resumed = (state, True)
            return
        self._batches, self._exhausted = 0 if ended else int(state["batches"]), False
        self._before = {"batches": 0} if ended else dict(state)
        takes_it_up = takes_up(self.loader, state)
        if takes_it_up:
            self._take_up(state, ended)
        draws = state.get("generators", [])
        if ended:
            self._set_generators(draws)
        iterator = self._iterate(begun=not ended)
        yield from self._read(iterator, draws if takes_it_up and not ended else [])

    def _take_up(self, state: Mapping[str, Any], ended: bool) -> None:
        """Restore the loader's position, or the start of the next epoch if the epoch has ended."""
        loader, inner = self.loader, state["loader"]
        if ended and isinstance(loader, classes_of_litdata("StreamingDataLoader")):
            loader.current_epoch = inner["current_epoch"]
            return
        loader.load_state_dict(inner)
        if ended:
            with isolate_rng():  # random numbers of the next epoch must not depend on the interruption
                if state["exhausted"]:
                    loader.state_dict()  # makes torchdata's loader create its iterator, which has ended
                else:
                    next(iter(loader), _END)  # drops the rest of an epoch that was cut short

    def _iterate(self, begun: bool) -> Iterator[Any]:
        """Return an iterator over the loader; making it draws the seed of the epoch's workers.

        If the epoch had begun before the interruption, the process's generators do not advance, since the seed was
        drawn then.
        """
        if getattr(self.loader, "generator", _END) in (None, self._generator):
            self.loader.generator = self._generator.set_state(torch.get_rng_state())
            if not begun:
                torch.empty((), dtype=torch.int64).random_()  # advances torch's generator as the loader would have
        with isolate_rng() if begun else nullcontext():
            iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def _read(self, iterator: Iterator[Any], draws: Sequence[Tensor]) -> Iterator[Any]:
        """Iterate over the batches; the first one draws the order of the epoch, also where it was drawn before.

        Args:
            iterator: iterator over the loader.
            draws: states of the loader's generators at a checkpoint in this epoch.
        """
        length, begin = self.length, self._batches
        try:
            while True:
                if length is None and self._batches > begin:  # Lightning reads loaders without a length one batch ahead
                    self._before = self._state()  # not before the first batch: litdata would lose its position
                if (batch := next(iterator, _END)) is _END:
                    self._exhausted = True
                    return
                self._batches += 1
                if draws:
                    self._set_generators(draws)
                    draws = []
                if self._batches != length:
                    yield batch
                    continue
                before = self._generator_states()
                self._exhausted = next(iterator, _END) is _END  # tells the loader that its epoch has ended
                after = self._generator_states()
                self._set_generators(before)  # a sampler may have drawn an order that nobody asked for yet
                yield batch
                self._set_generators(after)
        finally:
            if isinstance(self.loader, classes_of_litdata("StreamingDataLoader")):
                self.loader.restore = False  # litdata resets this only when an epoch is read to its end

    def _state(self) -> dict[str, Any]:
        return {
            "batches": self._batches,
            "exhausted": self._exhausted,
            "workers": getattr(self.loader, "num_workers", 0),
            "class": type(self.loader).__name__,
            "loader": self.loader.state_dict() if is_stateful(self.loader) else None,
            "generators": self._generator_states(),
        }

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators(), states):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """Return the user's generators of the loader and its samplers, each once."""
        found = [getattr(owner, "generator", None) for owner in (self.loader, *_samplers(self.loader))]
        own = {id(g): g for g in found if isinstance(g, torch.Generator) and g is not self._generator}
        return list(own.values())


def is_stateful(value: object) -> bool:
    """Return whether an object, such as a loader that can save its position, has a state to save and load."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def warn_if_inexact(loader: Any, state: Mapping[str, Any], reasons: Sequence[str] = ()) -> bool:
    """Warn if a loader does not resume exactly within an epoch; return whether it warned.

    Args:
        loader: loader of this replica.
        state: state of a :class:`ResumableLoader`.
        reasons: further reasons for the warning.
    """
    if not is_stateful(loader):
        reasons = [*reasons, f"a {type(loader).__name__} cannot save its position"]
    elif not takes_up(loader, state):
        reasons = [*reasons, "the checkpoint was written with another loader, or another num_workers"]
    if reasons:
        rank_zero_warn(_INEXACT.format(state["batches"], "; ".join(reasons)))
    return bool(reasons)


def takes_up(loader: Any, state: Mapping[str, Any]) -> bool:
    """Return whether a loader can load its state in a checkpoint; arguments as for :func:`warn_if_inexact`."""
    if not is_stateful(loader) or state.get("loader") is None:
        return False
    written_by = state["class"], state["workers"]
    return written_by == (type(loader).__name__, getattr(loader, "num_workers", 0))


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the number of the epoch in the samplers of a loader; the order of the data depends on it."""
    for sampler in _samplers(loader):
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)


def _samplers(loader: Any) -> list[Any]:
    return [getattr(owner, "sampler", None) for owner in (loader, getattr(loader, "batch_sampler", None))]
