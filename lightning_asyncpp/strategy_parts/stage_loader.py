"""Data loaders under a pipeline: middle stages read nothing, and all stages of a replica read the same order."""

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
    """Stands where a middle stage would have a batch."""

    def __repr__(self) -> str:
        return "<no batch: this is a middle stage of the pipeline>"


def has_placeholder(batch: object) -> bool:
    """Whether a batch is a placeholder, or has one from a loader among those of several."""
    if isinstance(batch, (list, tuple, Mapping)):
        return any(map(has_placeholder, batch.values() if isinstance(batch, Mapping) else batch))
    return isinstance(batch, PlaceholderBatch)


class Next(IntEnum):
    """What the next step of a loader's iteration brought on the stage that reads."""

    END = 0
    BATCH = 1
    NOTHING = 2  # None, as a collate_fn returns where no sample is valid: the batch is skipped


class LoaderInFront:
    """Stands in front of a loader: what is not its own to say is the loader's.

    Args:
        loader: the loader of this replica.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # before there is one
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)


class AnnouncingLoader(LoaderInFront):
    """The loader of a first stage, which says on every step what it brought: stages in the middle do the same.

    Args:
        loader: the loader of this replica.
        announce: is told at once.
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
    """A placeholder for every batch of a loader; the loader itself is never iterated.

    Its state lives on the ranks that read, where every training loader has one.

    Args:
        loader: the loader of this replica.
        follow: waits for what the next step brought on the first stage; None: there is a batch as often as the loader's
            length says.
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
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""


def stage_loader(
    loader: object, num_replicas: int, replica: int, needs_data: bool, follow: Callable[[], Next] | None = None
) -> object:
    """Return the loader that a stage iterates instead of ``loader``.

    Args:
        loader: what the user gave; a litdata loader is told the replica, it would otherwise split by rank.
        num_replicas: number of replicas.
        replica: index of this rank's.
        needs_data: whether this is the first or the last stage.
        follow: what the others ask for the first stage's next step. Without it they iterate placeholders if the
            loader's length can be trusted (a ``DataLoader`` over a map-style dataset, a litdata loader), and otherwise
            the loader itself, since only it knows when an epoch ends.
    """
    if reads_streams(loader):
        use_replica(loader, num_replicas, replica)
    _seed_workers(loader, replica)
    if needs_data or (follow is None and not (is_litdata(loader) or _is_map_style(loader))):
        return loader
    return PlaceholderLoader(loader, follow)


def shuffles(loader: object) -> bool:
    """Whether a loader has its samples in a new order in every epoch, as far as its sampler shows."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and not hasattr(batches, "sampler"):
        return True  # one of somebody's own, which may do so by itself
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    return sampler is None or isinstance(sampler, RandomSampler) or _shuffles(sampler)


def shuffle_by_epoch(loader: Any, shuffle: bool | None = None) -> None:
    """Let a ``StatefulDataLoader(shuffle=True)`` be shuffled as Lightning shuffles a ``DataLoader(shuffle=True)``.

    Lightning replaces torch's random sampler by one whose order follows from the epoch, but puts torchdata's into a
    wrapper, which hides from the loader where the sampler is: the loader could not go on in the middle of an epoch.

    Args:
        loader: of training data, with the sampler that Lightning chose.
        shuffle: whether it is shuffled; None: as the Trainer chose, where Fabric takes torchdata's for one that is not.
    """
    wrapper = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(wrapper, DistributedSamplerWrapper):
        return
    if not _shuffles(required(wrapper.dataset, "_sampler", "find the training data's own sampler")):
        return
    shuffled = wrapper.shuffle if shuffle is None else shuffle
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, wrapper.num_replicas, wrapper.rank, shuffled, wrapper.seed, wrapper.drop_last
    )
    loader.batch_sampler.sampler = sampler


def _seed_workers(loader: object, replica: int) -> None:
    # seed_everything(workers=True) makes every rank transform its data in its own way: here every replica does.
    # Fabric has told the loader so before, the Trainer does it later, where there is no function yet.
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
