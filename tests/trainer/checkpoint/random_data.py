"""What a drawn run is fed, when it validates, and at which steps it may be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Pick = Callable[[Sequence[Any]], Any]
SAVES: dict[str, dict[str, Any]] = {
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "validations": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


@dataclass(frozen=True)
class Data:
    """Training data, validations and checkpoints of a run.

    Attributes:
        loader: as :func:`tests.trainer.checkpoint.resumable.training_loader` reads it.
        samples, batch_size: of the training set.
        val_samples: of validation sets.
        scheduler: of learning rates, by what there is to monitor.
        trainer: arguments of the Trainer.
        saves: ``"steps"``, ``"epochs"`` or ``"validations"``.
        saved_steps: those whose checkpoint a run may go on from.
        validated_steps: those of them after which it validates.
        inner_steps: those of them in the middle of an epoch, where a run may be cut short.
        parted: whether the Trainer puts its own sampler into a loader.
    """

    loader: str
    samples: int
    batch_size: int
    val_samples: tuple[int, ...]
    scheduler: str
    trainer: dict[str, Any]
    saves: str
    saved_steps: tuple[int, ...]
    validated_steps: tuple[int, ...]
    inner_steps: tuple[int, ...]
    parted: bool


class Clock:
    """When batches, updates and validations are."""

    def __init__(self, batches: int, accumulate: int, epochs: int) -> None:
        self.batches, self.accumulate, self.epochs = batches, accumulate, epochs
        self.updates = -(-batches // accumulate)

    def updates_after(self, batch: int) -> int:
        """Of batches that are counted over all epochs; the last one of an epoch comes with an update."""
        epochs, rest = divmod(batch, self.batches)
        return epochs * self.updates + rest // self.accumulate

    def has_update(self, batch: int) -> bool:
        rest = batch % self.batches
        return rest == 0 or rest % self.accumulate == 0


def data(pick: Pick, workers: bool, replicas: int) -> Data:
    """Draw what can be resumed: in mid-epoch by loaders with a state, and from an epoch's end by any."""
    kinds = ["litdata", "plain", "stateful", "stateful noisy"]
    loader = pick(kinds * 3 + ["litdata workers", "stateful workers"] if workers else kinds)
    # Without the Trainer's sampler torchdata's loader gives every replica the same, in an order that it draws.
    parted = "stateful" not in loader or replicas > 1 or pick([False, True])
    if not parted:
        loader += pick(["", " torchs", " torchs seeded", " weighted", " weighted seeded", " generator"])
    batch_size, per_epoch = pick([4, 8]), pick([3, 4, 5])
    # Of every replica; litdata gives several of them whole batches.
    samples = batch_size * (per_epoch - 1) + pick(range(1, batch_size + 1) if replicas == 1 else [batch_size])
    limit = pick([None, None, None, per_epoch - 1])
    clock = Clock(limit or per_epoch, pick([1, 1, 2]), pick([2, 3]))
    total = clock.epochs * clock.updates
    steps = pick([None, total, *([total - 1] if total - 1 > clock.updates else [])])  # the last epoch may end early
    length = {"max_epochs": clock.epochs} if steps is None else {"max_epochs": -1, "max_steps": steps}
    total = total if steps is None else steps
    validates, validated = _validations(pick, clock)
    saves = pick(["steps", "steps", "epochs", *(["validations"] if validated else [])])
    ends = [clock.updates * epoch for epoch in range(1, clock.epochs + 1)]
    after_validations = sorted({clock.updates_after(batch) for batch in validated if clock.has_update(batch)})
    if saves == "validations":
        saved = after_validations
    else:
        saved = ends if saves == "epochs" or loader == "plain" else list(range(1, total + 1))
    # Nothing follows the last step but the end of its epoch, if it has not begun.
    most = total if saves == "steps" and total in ends else total - 1
    saved = [step for step in saved if step <= most and (loader != "plain" or step in ends)]
    if not saved:
        saves, saved = "epochs", ends[:1]
    after_validations = [step for step in after_validations if step in saved and step < total]
    return Data(
        loader, samples * replicas, batch_size, (9,) if validates else (), pick(_schedulers(validated, clock)),
        length | validates | {"accumulate_grad_batches": clock.accumulate, "limit_train_batches": limit or 1.0},
        saves, tuple(saved), tuple(after_validations),
        tuple(step for step in saved if saves == "steps" and step not in ends and step < total), parted,
    )  # fmt: skip


def _validations(pick: Pick, clock: Clock) -> tuple[dict[str, Any], list[int]]:
    """Arguments of the Trainer, and after how many batches it validates."""
    kind = pick(["never", "in epochs", "over epochs", "at ends", "at every second end"])
    last = clock.batches * clock.epochs
    every = pick(range(1, clock.batches + 1))
    if kind == "in epochs":
        after = [batch for batch in range(1, last + 1) if (batch - 1) % clock.batches % every == every - 1]
        return {"val_check_interval": every}, after
    if kind == "over epochs":
        return {"val_check_interval": every, "check_val_every_n_epoch": None}, list(range(every, last + 1, every))
    if kind == "never":
        return {}, []
    stride = 1 if kind == "at ends" else 2
    return {"check_val_every_n_epoch": stride}, list(range(clock.batches * stride, last + 1, clock.batches * stride))


def _schedulers(validated: Sequence[int], clock: Clock) -> list[str]:
    kinds = ["", "decay-step", "decay-epoch", "plateau-step-train_loss", "plateau-epoch-train_loss"]
    return [*kinds, "plateau-epoch-val_loss"] if validated and validated[0] <= clock.batches else kinds
