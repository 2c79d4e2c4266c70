"""Data loaders under a pipeline: middle stages read no data, and all stages of a replica read the same order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, TypeGuard

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_asyncpp.data.replica import is_litdata, reads_streams, use_replica
from lightning_asyncpp.dependencies import required


class PlaceholderBatch:
    """Placeholder for a batch on a middle stage."""

    def __repr__(self) -> str:
        return "<no batch: this is a middle stage of the pipeline>"


def has_placeholder(batch: object) -> bool:
    """Return whether a batch is a placeholder or, with several loaders, contains one."""
    if isinstance(batch, (list, tuple, Mapping)):
        return any(map(has_placeholder, batch.values() if isinstance(batch, Mapping) else batch))
    return isinstance(batch, PlaceholderBatch)


class Next(IntEnum):
    """Result of the next step of a loader's iteration on the first stage."""

    END = 0
    BATCH = 1
    NOTHING = 2  # None, which Lightning skips; a collate_fn may return None for a batch without valid samples


class LoaderInFront:
    """Wrapper of a loader, with the attributes and the length of the loader.

    Args:
        loader: loader of this replica.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)


class AnnouncingLoader(LoaderInFront):
    """Loader of a first stage that announces the result of each step of its iteration to the middle stages.

    Args:
        loader: loader of this replica.
        announce: function that is called with each result, before the batch is used.
    """

    def __init__(self, loader: Any, announce: Callable[[Next], None]) -> None:
        super().__init__(loader)
        self._announce = announce

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._announce(Next.NOTHING if batch is None else Next.BATCH)
            yield batch
        self._announce(Next.END)


class PlaceholderLoader(LoaderInFront):
    """Loader that yields a placeholder for every batch of another loader, without iterating over that loader.

    It has no state, since the ranks that read data save the state of the loader.

    Args:
        loader: loader of this replica.
        follow: function that waits for the result of the first stage's next step; None: there are as many placeholders
            as batches in the loader.
    """

    def __init__(self, loader: Any, follow: Callable[[], Next] | None = None) -> None:
        super().__init__(loader)
        self._follow = follow

    def __iter__(self) -> Iterator[PlaceholderBatch | None]:
        if self._follow is None:
            yield from (PlaceholderBatch() for _ in range(len(self)))
            return
        while (step := self._follow()) != Next.END:
            yield None if step == Next.NOTHING else PlaceholderBatch()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def stage_loader(
    loader: object, num_replicas: int, replica: int, needs_data: bool, follow: Callable[[], Next] | None = None
) -> object:
    """Return the loader that a stage iterates instead of ``loader``.

    Args:
        loader: the user's loader; a litdata loader is set to split its data by replica instead of by rank.
        num_replicas: number of replicas.
        replica: index of this rank's replica.
        needs_data: whether this is the first or the last stage.
        follow: function for :class:`PlaceholderLoader`. Without it, a middle stage gets placeholders only if the
            loader's length is reliable (a ``DataLoader`` over a map-style dataset, or a litdata loader). Otherwise it
            gets the loader itself, since it must see when an epoch ends.
    """
    if reads_streams(loader):
        use_replica(loader, num_replicas, replica)
    _seed_workers(loader, replica)
    if needs_data or (follow is None and not (is_litdata(loader) or _is_map_style(loader))):
        return loader
    return PlaceholderLoader(loader, follow)


def shuffles(loader: object) -> bool:
    """Return whether a loader's sampler shuffles in every epoch; True if the loader shows no sampler."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and not hasattr(batches, "sampler"):
        return True  # a custom batch sampler, which may shuffle by itself
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    return sampler is None or isinstance(sampler, RandomSampler) or _shuffles(sampler)


def shuffle_by_epoch(loader: Any, shuffle: bool | None = None) -> None:
    """Shuffle a ``StatefulDataLoader(shuffle=True)`` as Lightning shuffles a ``DataLoader(shuffle=True)``.

    Lightning replaces torch's random sampler by one whose order depends on the epoch. It does not replace torchdata's,
    but wraps it. The wrapper hides the sampler's position, so that the loader could not resume within an epoch.

    Args:
        loader: loader of training data with the sampler that Lightning chose.
        shuffle: whether to shuffle; None: by the wrapper's setting, which is wrong under Fabric.
    """
    wrapper = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(wrapper, DistributedSamplerWrapper):
        return
    if not _shuffles(required(wrapper.dataset, "_sampler", "find the sampler of the training data")):
        return
    shuffled = wrapper.shuffle if shuffle is None else shuffle
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, wrapper.num_replicas, wrapper.rank, shuffled, wrapper.seed, wrapper.drop_last
    )
    loader.batch_sampler.sampler = sampler


def _seed_workers(loader: object, replica: int) -> None:
    # seed_everything(workers=True) seeds the workers of every rank differently; here the ranks of a replica must agree.
    # Fabric has already set worker_init_fn; the Trainer sets it later if it is still None.
    if not isinstance(loader, DataLoader):
        return
    function = loader.worker_init_fn
    is_lightnings = isinstance(function, partial) and function.func is pl_worker_init_function
    if is_lightnings or (function is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def _is_map_style(loader: object) -> TypeGuard[DataLoader]:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _shuffles(sampler: Any) -> bool:
    kind = type(sampler)
    is_torchdatas = kind.__module__.partition(".")[0] == "torchdata" and kind.__name__ == "RandomSampler"
    return is_torchdatas and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
