"""Whether a training loader is shuffled, and by whom: its own sampler, or the one that Lightning puts in its place."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_asyncpp.private_names import required


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
    wrapper = wrapper_of(loader)
    if wrapper is None or not _shuffles(sampler_inside(wrapper)):
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


def sampler_inside(wrapper: DistributedSamplerWrapper) -> Any:
    """The loader's own sampler, around which there is another one."""
    return required(wrapper.dataset, "_sampler", "find the training data's own sampler")


def _shuffles(sampler: Any) -> bool:
    kind = type(sampler)
    is_torchdatas = kind.__module__.partition(".")[0] == "torchdata" and kind.__name__ == "RandomSampler"
    return is_torchdatas and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
