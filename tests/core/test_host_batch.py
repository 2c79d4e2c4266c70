"""What the host still has of a batch that was moved; here moving is copying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostBatch
from lightning_asyncpp.core.microbatch import Slot, cut_batch, fingerprint, split_batch
from lightning_asyncpp.core.tree import map_tensors


def moved() -> tuple[HostBatch, dict[str, Any], dict[str, Any]]:
    """A batch, its copy, and who knows of both."""
    batch = {"x": torch.arange(6.0), "names": ["a", "b"]}
    copy = map_tensors(Tensor.clone, batch)
    known = HostBatch()
    known.moved(batch, copy)
    return known, batch, copy


def test_the_host_s_tensors_stand_in_for_their_copies() -> None:
    known, batch, copy = moved()
    copy["names"] = ["c", "d"]  # what is no tensor is as it is now
    found = known.of(copy)
    assert found["x"] is batch["x"]
    assert found["names"] == ["c", "d"]
    assert known.of([copy["x"]])[0] is batch["x"], "in whatever nesting"


@pytest.mark.parametrize(
    "change",
    [
        lambda copy: copy["x"].mul_(2),
        lambda copy: copy.update(x=copy["x"] * 2),
        lambda copy: copy.update(x=copy["x"].view(6)),
    ],
)
def test_what_was_changed_since_is_read_as_it_is(change: Callable[[Any], object]) -> None:
    known, _, copy = moved()
    change(copy)
    assert known.of(copy)["x"] is copy["x"]


@pytest.mark.parametrize("other", [lambda x: x.double(), lambda x: x[:3].clone(), lambda x: [x, x]])
def test_a_copy_that_is_none_is_no_copy(other: Callable[[Tensor], Any]) -> None:
    batch = torch.arange(6.0)
    known, copy = HostBatch(), other(batch.clone())
    known.moved(batch, copy)
    assert known.of(copy) is copy


def test_the_batch_before_is_forgotten_and_what_is_on_the_device_stays() -> None:
    known, _, copy = moved()
    loaded = torch.arange(3.0)  # by the loader, where it belongs
    known.moved(loaded, loaded)
    assert known.of(copy) is copy
    assert known.of(loaded) is loaded


def test_weights_and_marks_are_read_from_the_host() -> None:
    batch, on_host = torch.arange(8.0), torch.arange(8.0)
    read: list[Tensor] = []

    def weigh(microbatch: Tensor) -> float:
        read.append(microbatch)
        return float(microbatch.sum())

    slots = cut_batch(batch, 3, split_batch, weigh, on_host)
    assert [slot.weight for slot in slots] == [3.0, 12.0, 13.0]
    assert {slot.fingerprint for slot in slots} == {fingerprint(batch, 3)}
    assert {tensor.untyped_storage().data_ptr() for tensor in read} == {on_host.untyped_storage().data_ptr()}
    assert slots[0].content.data_ptr() == batch.data_ptr()


def test_a_split_of_the_user_s_is_called_once() -> None:
    calls: list[Tensor] = []

    def split(batch: Tensor, parts: int) -> list[Any]:
        calls.append(batch)
        return [*batch.tensor_split(parts - 1), None]

    batch = torch.arange(4.0)
    slots = cut_batch(batch, 3, split, lambda x: float(x.sum()), batch.clone())
    assert [slot.weight for slot in slots] == [1.0, 5.0, 0.0]
    assert slots[2] == Slot(None, fingerprint(None), 0.0)
    assert calls == [batch]
