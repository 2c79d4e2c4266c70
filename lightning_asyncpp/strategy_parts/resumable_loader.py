"""A training loader that goes on where a checkpoint was: with the batch after the last one that was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_asyncpp.data.replica import classes_of_litdata
from lightning_asyncpp.strategy_parts.stage_loader import LoaderInFront

_END = object()
_INEXACT = (
    "the checkpoint was written after batch {} of an epoch, and its rest is not read as without the interruption: {}."
    " Batches may be seen twice and others not at all; the next epoch is whole again. Exact there are checkpoints of an"
    " epoch's end, and loaders with a state, such as torchdata's StatefulDataLoader and litdata's StreamingDataLoader"
)


class ResumableLoader(LoaderInFront):
    """Stands in front of a training loader; everything else about it is the loader's own.

    A loader with a state keeps torchdata's protocol: from a state after an epoch's last batch it begins the next one.

    Args:
        loader: of this replica.
        prefetched: how many batches were taken from here that training has not got yet.
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
        """How many batches an epoch has, where that is known."""
        return sized_len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that it has got, also if that was before a resume."""
        if self._resumed is not None:
            return dict(self._resumed[0])
        return self._before if self._prefetched() else self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of the loader's own, from a checkpoint of Lightning's; :meth:`resume` is told more."""
        if "batches" not in state and is_stateful(self.loader):
            self.loader.load_state_dict(state)

    def resume(self, state: Mapping[str, Any], ended: bool) -> None:
        """Begin the next iteration where a checkpoint was.

        Args:
            state: of :meth:`state_dict`.
            ended: whether its epoch had ended: the iteration is the next epoch's.
        """
        self._resumed = (state, ended)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch; nothing is read before the first batch is asked for."""
        resumed, self._resumed = self._resumed, None
        state, ended = resumed or ({}, True)
        if not ended and state.get("exhausted"):  # the shorter one of several: the rest of their epoch has none of it
            self._resumed = (state, True)
            return
        self._batches, self._exhausted = 0 if ended else int(state["batches"]), False
        self._before = {"batches": 0} if ended else dict(state)
        if takes_up(self.loader, state):
            self._take_up(state, ended)
        yield from self._read(self._iterate(begun=not ended))

    def _take_up(self, state: Mapping[str, Any], ended: bool) -> None:
        """Put the loader where it was, or at the beginning of the epoch after that."""
        loader, inner = self.loader, state["loader"]
        if ended and isinstance(loader, classes_of_litdata("StreamingDataLoader")):
            loader.current_epoch = inner["current_epoch"]
            return
        loader.load_state_dict(inner)
        if ended:
            with isolate_rng():  # the next epoch draws as if there had been no interruption
                if state["exhausted"]:
                    loader.state_dict()  # torchdata's loader makes the iterator that has ended for it
                else:
                    next(iter(loader), _END)  # of the rest of an epoch that was cut short, which is left out

    def _iterate(self, begun: bool) -> Iterator[Any]:
        """Begin to iterate; an epoch that had begun before has drawn the seed of its workers already."""
        if getattr(self.loader, "generator", _END) in (None, self._generator):
            self.loader.generator = self._generator.set_state(torch.get_rng_state())
            if not begun:
                torch.empty((), dtype=torch.int64).random_()  # which the loader now draws from its own
        with isolate_rng() if begun else nullcontext():
            iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        length, begin = self.length, self._batches
        try:
            while True:
                if length is None and self._batches > begin:  # such loaders are read one batch ahead
                    self._before = self._state()  # not before the first: litdata then forgets where to go on
                if (batch := next(iterator, _END)) is _END:
                    self._exhausted = True
                    return
                self._batches += 1
                if self._batches == length:  # only now the loader itself knows that its epoch has ended
                    self._exhausted = next(iterator, _END) is _END
                yield batch
        finally:
            if isinstance(self.loader, classes_of_litdata("StreamingDataLoader")):
                self.loader.restore = False  # it forgets a resume only when an epoch is read to its end

    def _state(self) -> dict[str, Any]:
        return {
            "batches": self._batches,
            "exhausted": self._exhausted,
            "workers": getattr(self.loader, "num_workers", 0),
            "class": type(self.loader).__name__,
            "loader": self.loader.state_dict() if is_stateful(self.loader) else None,
        }


def is_stateful(loader: object) -> bool:
    """Whether a loader can say where it is, and go on from there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def warn_if_inexact(loader: Any, state: Mapping[str, Any], reasons: Sequence[str] = ()) -> bool:
    """Say why a loader does not go on exactly in the middle of an epoch, if it does not; whether there was a reason.

    Args:
        loader: of this replica.
        state: of a :class:`ResumableLoader`.
        reasons: others.
    """
    if not is_stateful(loader):
        reasons = [*reasons, f"a {type(loader).__name__} cannot say where it was"]
    elif not takes_up(loader, state):
        reasons = [*reasons, "the checkpoint was written with another loader, or another num_workers"]
    if reasons:
        rank_zero_warn(_INEXACT.format(state["batches"], "; ".join(reasons)))
    return bool(reasons)


def takes_up(loader: Any, state: Mapping[str, Any]) -> bool:
    """Whether a loader can go on from the state that one in a checkpoint had of its own; arguments as above."""
    if not is_stateful(loader) or state.get("loader") is None:
        return False
    written_by = state["class"], state["workers"]
    return written_by == (type(loader).__name__, getattr(loader, "num_workers", 0))


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader, which order the data by it, the number of the epoch."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(getattr(owner, "sampler", None), "set_epoch", None)):
            tell(epoch)
