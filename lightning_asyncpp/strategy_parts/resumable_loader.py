"""A training loader that goes on where a checkpoint was: with the batch after the last one that was trained on.

What orders the data are the loader's samplers, and the one that the Trainer puts around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

from lightning_asyncpp.data.replica import classes_of_litdata, leave_where_it_was, set_epoch_before, with_own_place
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.loader_identity import IDENTITY, Plain, differing, keeps_place, loader_identity
from lightning_asyncpp.strategy_parts.shuffling import sampler_inside, wrapper_of
from lightning_asyncpp.strategy_parts.stage_loader import LoaderInFront

COMBINED_GOES_ON = RequirementCache("litdata>=0.2.76")
"""Older ones count twice what a resumed ``CombinedStreamingDataset`` has read."""
_END = object()


class ResumableLoader(LoaderInFront):
    """Stands in front of a training loader; everything else about it is the loader's own.

    What loaders with a state do about the ends of epochs differs. This one asks them in the middle of an epoch alone,
    and lets them come to its end, after which most of them begin anew by themselves.

    Args:
        loader: of this replica.
        prefetched: how many batches were taken from here that training has not got yet.

    Attributes:
        identity: what decides the batches, as it was before any was read.
        waits: there is nothing to read until this is false: the end of the last epoch is still to come.
    """

    identity: dict[str, Plain]

    def __init__(self, loader: Any, prefetched: Callable[[], int]) -> None:
        super().__init__(loader)
        self._prefetched = prefetched
        self.__dict__["identity"] = loader_identity(loader)  # its own, also if the loader has an attribute of that name
        self._say: Any = loader.state_dict if is_stateful(loader) else None
        self._take_up: Any = getattr(loader, "load_state_dict", None)
        self.waits = False
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
        """Where training is, and in what: after the last batch that it has got, also if that was before a resume."""
        return {**self._where(), IDENTITY: self.identity}

    def _where(self) -> Mapping[str, Any]:
        if self._resumed is not None:
            return self._resumed[0]
        ahead = self._prefetched()
        if not ahead:
            return self._state()
        return self._before if ahead == 1 and self._before is not None else {"batches": self._batches - ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of the loader's own, from a checkpoint of Lightning's; :meth:`resume` is told more."""
        if "batches" not in state:
            self._go_on_in(state)

    def _go_on_in(self, state: Any) -> None:
        try:
            self._take_up(state)
        except ConfigurationError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(
                "the training loader cannot go on from its state in the checkpoint, which is damaged or another"
                f" loader's: {type(error).__name__}: {error}"
            ) from error

    def resume(self, state: Mapping[str, Any], ended: bool) -> None:
        """Begin the next iteration where a checkpoint was.

        Args:
            state: of :meth:`state_dict`.
            ended: whether its epoch had ended: the iteration is the next epoch's.
        """
        self._resumed = (state, ended)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch; nothing is read before the first batch is asked for."""
        if self.waits:
            return
        resumed, self._resumed = self._resumed, None
        state, ended = resumed or ({}, True)
        if not ended and state.get("exhausted"):  # the shorter one of several: the rest of their epoch has none of it
            self._resumed = (state, True)
            return
        self._batches = self._read_before = 0 if ended else int(state["batches"])
        self._before, self._exhausted = None if ended else dict(state), False
        length = self.length
        iterator = self._anew() if resumed is None else self._begin(state, ended)
        try:
            while (batch := self._next(iterator, length)) is not _END:
                self._batches += 1
                if self._batches == length:  # only now the loader itself knows that its epoch has ended
                    self._exhausted = next(iterator, _END) is _END
                yield batch
        finally:
            leave_where_it_was(self.loader)

    def _begin(self, state: Mapping[str, Any], ended: bool) -> Iterator[Any]:
        """An iterator that goes on from a checkpoint, or of the epoch after it."""
        inner = None if problems_with_workers(self.loader, state) else state.get("loader")  # and that was accepted
        has_place = keeps_place(self.loader, differing(self.identity, state.get(IDENTITY)))
        if inner is None:
            pass
        elif isinstance(self.loader, classes_of_litdata("StreamingDataLoader")) and (ended or not has_place):
            set_epoch_before(self.loader, inner, again=not ended)
        elif has_place and not ended:
            self._go_on_in(with_own_place(self.loader, inner))
        elif has_place:
            self._go_on_in(inner)
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
        torch.empty((), dtype=torch.int64).random_()  # which the loader now draws elsewhere

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
        self._exhausted = batch is _END
        return batch

    def _state(self) -> dict[str, Any]:
        state = self._say() if self._say is not None else None
        return {
            "began": self._began,
            "batches": self._batches,
            "exhausted": self._exhausted,
            "generators": self._states_of_generators(),
            "workers": getattr(self.loader, "num_workers", 0),
            "loader": state,
        }


def is_stateful(loader: object) -> bool:
    """Whether a loader can say where it is, and go on from there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def problems_with_workers(loader: Any, state: Mapping[str, Any]) -> list[str]:
    """Why a loader cannot take up what another number of worker processes left.

    Args:
        loader: of this replica.
        state: of a :class:`ResumableLoader` around such a loader.
    """
    if state.get("loader") is None or not is_torchdatas(loader):
        return []
    if loader.num_workers == state.get("workers", loader.num_workers):
        return []
    return [
        f"the training loader has num_workers={loader.num_workers}, and torchdata's loader goes on with as many as it"
        f" had when the checkpoint was written: {state['workers']}"
    ]


def problems_in_mid_epoch(loader: Any, state: Mapping[str, Any]) -> list[str]:
    """Why a loader cannot go on in the middle of an epoch.

    Args:
        loader: of this replica.
        state: of a :class:`ResumableLoader` around such a loader.
    """
    if not is_stateful(loader):
        return [
            f"a {type(loader).__name__} cannot go on in the middle of an epoch: batches would be seen twice; use a"
            " loader with a state, such as torchdata's StatefulDataLoader, litdata's StreamingDataLoader or"
            " TextDataModule"
        ]
    if wrapper_of(loader) is not None:
        return [
            "the sampler of the training loader, around which Lightning put its own, does not say where it was; give"
            " the loader torchdata's StatefulDistributedSampler, or Lightning use_distributed_sampler=False"
        ]
    is_combined = isinstance(getattr(loader, "dataset", None), classes_of_litdata("CombinedStreamingDataset"))
    if is_combined and not COMBINED_GOES_ON:
        return [
            f"litdata's CombinedStreamingDataset does not go on where it was: install {COMBINED_GOES_ON.requirement}"
        ]
    if is_combined and loader.num_workers > 1:
        return [
            "litdata's CombinedStreamingDataset does not go on where it was with several worker processes; give its"
            " loader num_workers=1 or 0"
        ]
    if draws_unseen(loader):
        return [
            "the batch sampler of the training loader would order the rest of the epoch anew, with random numbers that"
            " nothing repeats; give the sampler in it a generator, or give the loader the sampler and a batch_size"
        ]
    if state.get("loader") is None:
        return ["the checkpoint does not say where the loader of the training data was"]
    return []


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


def draws_unseen(loader: Any) -> bool:
    """Whether a loader of torchdata's would order an epoch in which it goes on anew, from the process's generator.

    Its own samplers of batches repeat what they drew before anything else is drawn; others do it with the first batch.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not is_torchdatas(loader) or is_torchdatas(batches) or hasattr(batches, "state_dict"):
        return False
    return any(getattr(owner, "generator", _END) is None for owner in (batches, getattr(batches, "sampler", None)))


def is_torchdatas(thing: Any) -> bool:
    """Whether it is of a class of torchdata's, or of one that comes from there."""
    return any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(thing).__mro__)


def _owners(loader: Any) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    yield from (loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    if (wrapper := wrapper_of(loader)) is not None:
        yield sampler_inside(wrapper)
