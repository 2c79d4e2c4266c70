"""What orders the training data: the samplers of a loader, and the one that the Trainer puts around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DistributedSampler

from lightning_asyncpp.private_names import required

_END = object()


def shuffle_by_epoch(loader: Any, shuffle: bool | None = None) -> None:
    """Let a ``StatefulDataLoader(shuffle=True)`` be shuffled as Lightning shuffles a ``DataLoader(shuffle=True)``.

    Lightning replaces torch's random sampler by one whose order follows from the epoch, but puts torchdata's into a
    wrapper, which hides from the loader where the sampler is: the loader could not go on in the middle of an epoch.

    Args:
        loader: of training data, with the sampler that Lightning chose.
        shuffle: whether it is shuffled; None: as the Trainer chose, where Fabric takes torchdata's for one that is not.
    """
    wrapper = wrapper_of(loader)
    if wrapper is None or not _shuffles(_inside(wrapper)):
        return
    shuffled = wrapper.shuffle if shuffle is None else shuffle
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, wrapper.num_replicas, wrapper.rank, shuffled, wrapper.seed, wrapper.drop_last
    )
    loader.batch_sampler.sampler = sampler


def wrapper_of(loader: Any) -> DistributedSamplerWrapper | None:
    """The Trainer's sampler around a sampler of the loader's own, which does not say where that one is."""
    # A class of batches that is not torch's keeps the sampler to itself, and the loader shows another one.
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(sampler := getattr(owner, "sampler", None), DistributedSamplerWrapper):
            return sampler
    return None


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
        yield _inside(wrapper)


def _inside(wrapper: DistributedSamplerWrapper) -> Any:
    return required(wrapper.dataset, "_sampler", "find the training data's own sampler")


def _shuffles(sampler: Any) -> bool:
    kind = type(sampler)
    is_torchdatas = kind.__module__.partition(".")[0] == "torchdata" and kind.__name__ == "RandomSampler"
    return is_torchdatas and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
