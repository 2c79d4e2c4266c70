"""A training loader that goes on where a checkpoint was: with the batch after the last one that was trained on.

What orders the data are the loader's samplers, and the one that the Trainer puts around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_asyncpp.data.replica import classes_of_litdata, leave_where_it_was, set_epoch_before, with_own_place
from lightning_asyncpp.strategy_parts.shuffling import sampler_inside, wrapper_of
from lightning_asyncpp.strategy_parts.stage_loader import LoaderInFront

_END = object()
_INEXACT = (
    "the checkpoint was written after batch {} of an epoch, and its rest is not read as without the interruption: {}."
    " Batches may be seen twice and others not at all; the next epoch is whole again. Exact there are checkpoints of an"
    " epoch's end, and loaders with a state, such as torchdata's StatefulDataLoader and litdata's StreamingDataLoader"
)


class ResumableLoader(LoaderInFront):
    """Stands in front of a training loader; everything else about it is the loader's own.

    What loaders with a state do about the ends of epochs differs. This one asks them in the middle of an epoch alone,
    and lets them come to its end, after which most of them begin anew by themselves.

    Args:
        loader: of this replica.
        prefetched: how many batches were taken from here that training has not got yet.
    """

    def __init__(self, loader: Any, prefetched: Callable[[], int]) -> None:
        super().__init__(loader)
        self._prefetched = prefetched
        self._say: Any = loader.state_dict if is_stateful(loader) else None
        self._take_up: Any = getattr(loader, "load_state_dict", None)
        self._generator = torch.Generator()
        self._began: Mapping[str, Any] = {}  # the random numbers with which the epoch began
        self._batches = self._read_before = 0
        self._exhausted = False
        self._before: dict[str, Any] | None = None
        self._resumed: tuple[Mapping[str, Any], bool] | None = None

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, where that is known."""
        return sized_len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that it has got, also if that was before a resume."""
        if self._resumed is not None:
            return dict(self._resumed[0])
        ahead = self._prefetched()
        if not ahead:
            return self._state()
        return self._before if ahead == 1 and self._before is not None else {"batches": self._batches - ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of the loader's own, from a checkpoint of Lightning's; :meth:`resume` is told more."""
        if "batches" not in state and self._take_up is not None:
            self._take_up(state)

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
        self._batches = self._read_before = 0 if ended else int(state["batches"])
        self._before, self._exhausted = None if ended else dict(state), False
        length, own = self.length, vars(self)  # the way around an attribute's search, for every batch
        iterator = self._anew() if resumed is None else self._begin(state, ended)
        try:
            while (batch := self._next(iterator, length)) is not _END:
                own["_batches"] += 1
                if self._batches == length:  # only now the loader itself knows that its epoch has ended
                    self._exhausted = next(iterator, _END) is _END
                yield batch
        finally:
            leave_where_it_was(self.loader)

    def _begin(self, state: Mapping[str, Any], ended: bool) -> Iterator[Any]:
        """An iterator that goes on from a checkpoint, or of the epoch after it."""
        inner = state["loader"] if takes_up(self.loader, state) else None
        if inner is None:
            pass
        elif not ended:
            self._take_up(with_own_place(self.loader, inner))
        elif isinstance(self.loader, classes_of_litdata("StreamingDataLoader")):
            set_epoch_before(self.loader, inner)
        else:
            self._take_up(inner)
            # Some begin the next epoch by themselves once the last one was read, others must be asked twice.
            with isolate_rng():
                began_anew = next(iter(self.loader), _END) is not _END
                if began_anew and state["exhausted"]:
                    self._take_up(inner)
                    self._say()  # so that it does it now: it draws random numbers for that
        if ended:  # what an epoch draws to begin with is still to be drawn
            self._set_generators(state.get("generators", ()))
            return self._anew()
        return self._again(state)

    def _anew(self) -> Iterator[Any]:
        self._began = {"torch": torch.get_rng_state(), "generators": self._states_of_generators()}
        return self._iterate()

    def _again(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """An iterator of an epoch that had begun: samplers without a state order it with the same random numbers."""
        self._began = state.get("began", {})
        with isolate_rng():
            if self._began:
                torch.set_rng_state(self._began["torch"])
                self._set_generators(self._began["generators"])
            iterator = self._iterate()
        if draws_at_once(self.loader):
            self._set_generators(state.get("generators", ()))
        return iterator

    def _iterate(self) -> Iterator[Any]:
        self._seed_workers()
        iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def _seed_workers(self) -> None:
        """Let the loader draw the seed of its workers as it would without this, and after a resume the same one again.

        It draws it once an epoch from the process's generator, and what is drawn afterwards would depend on where the
        epoch was resumed.
        """
        if getattr(self.loader, "generator", _END) not in (None, self._generator):
            return
        self.loader.generator = self._generator.set_state(torch.get_rng_state())
        torch.empty((), dtype=torch.int64).random_()  # which the loader now draws from its own

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        """Let the generators that the loader and its samplers were given go on from these states."""
        for generator, state in zip(self._generators(), states):
            generator.set_state(state)

    def _states_of_generators(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        return [generator for generator in generators_of(self.loader) if generator is not self._generator]

    def _next(self, iterator: Iterator[Any], length: int | None) -> Any:
        if length is None and self._batches > self._read_before:  # such loaders are read one batch ahead
            self._before = self._state()  # not before the first: some, such as litdata's, then forget where to go on
        batch = next(iterator, _END)
        vars(self)["_exhausted"] = batch is _END
        return batch

    def _state(self) -> dict[str, Any]:
        state = self._say() if self._say is not None else None
        return {
            "began": self._began,
            "batches": self._batches,
            "exhausted": self._exhausted,
            "generators": self._states_of_generators(),
            "workers": getattr(self.loader, "num_workers", 0),
            "class": type(self.loader).__name__,
            "loader": state,
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
    if not is_stateful(loader) or state.get("loader") is None or state["class"] != type(loader).__name__:
        return False
    return not is_torchdatas(loader) or state["workers"] == loader.num_workers


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader, which order the data by it, the number of the epoch."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(getattr(owner, "sampler", None), "set_epoch", None)):
            tell(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of random numbers that a loader and its samplers were given, each once."""
    found = (getattr(owner, "generator", None) for owner in _owners(loader))
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def draws_at_once(loader: Any) -> bool:
    """Whether a loader that goes on in an epoch has drawn what orders it as soon as it is iterated."""
    return is_torchdatas(loader) and is_torchdatas(getattr(loader, "batch_sampler", None)) and not loader.num_workers


def is_torchdatas(thing: Any) -> bool:
    """Whether it is of a class of torchdata's, or of one that comes from there."""
    return any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(thing).__mro__)


def _owners(loader: Any) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    yield from (loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    if (wrapper := wrapper_of(loader)) is not None:
        yield sampler_inside(wrapper)
