"""Buckets of gradients are summed over replicas while the backward runs; the other replica is a fake here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_asyncpp.core.updates.reduction import Bucket, Reduction, plan_buckets
from lightning_asyncpp.errors import ConfigurationError

GROUP: Any = object()


class Future:
    def add_done_callback(self, done: Callable[[object], None]) -> None:
        self.done = done


class Work:
    """Fake all-reduce with a replica that has the same gradients; it ends with :meth:`end` or :meth:`wait`."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.over, self.future = flat, False, Future()

    def is_completed(self) -> bool:
        return self.over

    def end(self) -> None:
        if not self.over:
            self.over = True
            self.flat *= 2
            self.future.done(None)

    def wait(self) -> None:
        self.end()

    def get_future(self) -> Future:
        return self.future


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Replace all-reduces by fakes, and return the list of those started, in order."""
    started: list[Work] = []

    def all_reduce(flat: Tensor, **_: Any) -> Work:
        started.append(Work(flat))
        return started[-1]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return started


def leaves(count: int = 3) -> dict[str, Tensor]:
    return {f"w{i}": torch.full((4,), i + 1.0, requires_grad=True) for i in range(count)}


def gradients_of(parameters: dict[str, Any]) -> Any:
    return lambda name: parameters[name].grad


def one_each(like: dict[str, Tensor]) -> list[Bucket]:
    return plan_buckets(like, bucket_bytes=1)


def test_buckets_give_back_what_was_packed() -> None:
    gradients = {
        "a": torch.randn(2, 3), "none": None, "half": torch.randn(4).bfloat16(), "b": torch.randn(5),
        "half_none": None, "turned": torch.randn(3, 2).t(), "number": torch.randn(()),
        "complex": torch.randn(4, dtype=torch.cfloat),
    }  # fmt: skip
    like = {name: torch.zeros(3) if g is None else g for name, g in gradients.items()}
    like["half_none"] = torch.zeros(3).bfloat16()
    unpacked: dict[str, Tensor | None] = {}
    for bucket in plan_buckets(like, bucket_bytes=20):
        unpacked.update(bucket.unpack(bucket.pack(gradients)))
    assert unpacked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (unpacked[name] is None) == (gradient is None)
        assert gradient is None or torch.equal(unpacked[name], gradient)  # type: ignore[arg-type]


def test_late_gradients_are_in_the_last_buckets() -> None:
    """Buckets are sent in order, so the other buckets need not wait for the end of the backward."""
    assert [bucket.names for bucket in plan_buckets(leaves(), 1, complete_late=["w2"])] == [["w1"], ["w0"], ["w2"]]


def test_buckets_leave_while_the_backward_runs(works: list[Work]) -> None:
    """The last layer's gradient is complete first, and is sent before the backward of the first layer begins."""
    parameters, sent = leaves(), []
    reduction = Reduction(one_each(parameters), GROUP)
    x = torch.ones(4, requires_grad=True)
    for parameter in parameters.values():
        x = x * parameter
        x.register_hook(lambda _: sent.append(len(works)))
    with reduction.watching(parameters, gradients_of(parameters)):
        x.sum().backward()
    assert sent == [0, 1, 2]
    assert len(works) == 3
    assert [work.flat[:4].tolist() for work in works] == [[2.0] * 4, [3.0] * 4, [6.0] * 4]


def test_nothing_is_waited_for_until_it_is_needed(works: list[Work]) -> None:
    parameters = leaves()
    reduction = Reduction(one_each(parameters), GROUP)
    reduction.send_rest({"w0": torch.ones(4), "w1": None, "w2": torch.ones(4)})
    assert not reduction.progress()
    works[1].end()
    assert not reduction.progress()
    assert reduction.gradients == {}
    works[0].end()
    assert not reduction.progress()
    assert set(reduction.gradients) == {"w2", "w1"}
    works[2].end()
    assert reduction.progress()
    assert reduction.gradients["w1"] is None
    assert reduction.gradients["w0"] is not None
    assert reduction.gradients["w0"].tolist() == [2.0] * 4
    assert 0 < reduction.started <= max(reduction.ends)  # type: ignore[operator]
    assert reduction.num_bytes == 3 * 5 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_that_grows_after_it_left_is_refused(works: list[Work], reentrant: bool) -> None:
    """Re-entrant checkpoints run backwards inside the backward, and each of them completes the shared weights."""
    parameters = leaves(1)
    reduction = Reduction(one_each(parameters), GROUP)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: x * parameters["w0"], x, use_reentrant=reentrant)  # type: ignore[assignment]
    with reduction.watching(parameters, gradients_of(parameters)):
        if reentrant:
            with pytest.raises(ConfigurationError, match=r"w0 changed after it was complete.*use_reentrant=False"):
                x.sum().backward()
        else:
            x.sum().backward()
            assert works[0].flat[:4].tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_aligned_as_torch_aligns_tensors(dtype: torch.dtype) -> None:
    """Alignment does not depend on the place in a bucket, since rounding of matrix products depends on alignment."""
    like = {str(size): torch.full((size,), float(size), dtype=dtype) for size in (3, 64, 1, 17)}
    views, flags = Bucket(list(like), like).views(Bucket(list(like), like).pack({**like, "1": None}))
    assert flags.tolist() == [1, 1, 0, 1]
    for name, view in views.items():
        assert view.storage_offset() * view.element_size() % 64 == 0
        assert torch.equal(view, 0 * like[name] if name == "1" else like[name])
