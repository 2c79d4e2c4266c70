"""What the steps of a mini-batch logged, known to every rank with its update, and logged once on each."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import lightning as L
import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_asyncpp.core.batches.batch_output import BatchOutput, nan_loss_text
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.updates.control_message import Payload
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.logging.log_recorder import METRIC_SLOTS, Entry, Logged, Recorded
from lightning_asyncpp.trainer.logging.payload import (
    BatchLoss,
    LoggedBatch,
    combine,
    decode_schema,
    mean_loss,
    nan_micro_batch,
    payload_length,
    schema_number,
)


class Connection(NamedTuple):
    """Where values are logged.

    Attributes:
        trainer: that runs the module.
        module: whose values they are.
        log: ``LightningModule.log`` of it.
    """

    trainer: L.Trainer
    module: LightningModule
    log: Callable[..., None]


class UpdateMetrics:
    """Losses and logged values of mini-batches: sent with their updates, and logged where these were applied.

    Args:
        session: the pipeline whose updates they are.
        on_loss: called on every rank with the mean loss of every mini-batch whose update was applied.

    Attributes:
        connection: where they are logged; None while no Trainer runs.
    """

    def __init__(self, session: PipelineSession, on_loss: Callable[[float], None]) -> None:
        self.session = session
        self.connection: Connection | None = None
        self._on_loss = on_loss
        self._losses: list[BatchLoss] = []
        self._schemas: dict[int, list[Entry]] = {0: []}  # the same on all ranks
        self._own_schemas: dict[int, str] = {}
        self._received: deque[tuple[Update, list[list[Entry]]]] = deque()
        self._logged: dict[str, Entry] = {}
        self._told_of_nan = False

    def connect(self, connection: Connection) -> None:
        """Log there from here on."""
        self.connection, self._told_of_nan = connection, False

    def disconnect(self) -> None:
        """Forget what was not logged."""
        self.connection = None
        for kept in (self._received, self._losses, self._logged):
            kept.clear()

    def connected(self) -> Connection:
        """Where values are logged, while a Trainer runs."""
        assert self.connection is not None
        return self.connection

    def add_loss(self, loss: Tensor | None, weight: float, output: BatchOutput) -> None:
        """Take in the mean loss of a training batch of weight ``weight``; None if it had no samples."""
        nan = output.nan_losses()
        if loss is not None and nan is not None:
            self._losses.append(BatchLoss(loss, weight, *nan))

    def payload(self, recorded: Recorded | None) -> Payload:
        """What the control message of the mini-batch carries.

        Args:
            recorded: what its steps logged; None off the last stage.
        """
        if recorded is None:
            return torch.zeros(payload_length(METRIC_SLOTS), dtype=torch.float64)
        payload = LoggedBatch(recorded, self._losses, METRIC_SLOTS)
        self._own_schemas[schema_number(payload.schema)] = payload.schema
        self._losses.clear()
        return payload

    def receive(self, updates: Sequence[Update]) -> None:
        """Take the metrics out of applied updates; they are logged in the next hook that may log."""
        for update in updates:
            self._warn_of_nan(update)
            self._received.append((update, self._layouts(update.message.payload[:, 0])))
            self._on_loss(mean_loss(update.message.payload))

    def log_received(self) -> None:
        """Log what updates brought, each as the metrics of its own step."""
        trainer = self.connected().trainer
        engine = self.session.running()
        # Of the batch that just ended; in the middle of an accumulation that mini-batch is still open.
        newest = engine.mini_batch - (0 if engine.accumulating else 1)
        while self._received:
            update, layouts = self._received.popleft()
            for entry, value, weight in self._rows(update, layouts):
                self._log_training(entry, value, weight)
            private.log_step_metrics(trainer, batches_ago=newest - update.mini_batch)

    def log_before_save(self) -> None:
        """Log what a save's own drain brought: neither this run, if it is killed, nor one that goes on would."""
        if self.connection is None or not self._received:  # after the training
            return
        if private.current_hook(self.connection.module) == "on_train_batch_end":
            self.log_received()
        else:
            self.log_received_late()

    def log_received_late(self) -> None:
        """Log, outside of the hook that may log steps, what updates brought."""
        while self._received:
            update, layouts = self._received.popleft()
            self.log_late(self._rows(update, layouts), update.mini_batch)

    def log_late(self, rows: list[Logged], mini_batch: int) -> None:
        """Log values that belong to a mini-batch whose own hook is over.

        Args:
            rows: each with the weight that it stands for.
            mini_batch: its index.
        """
        trainer, _, log = self.connected()
        for entry, value, weight in rows:
            if private.update_logged(trainer, "on_train_batch_end", entry.name, value, weight):
                continue
            if entry.on_epoch:
                name = f"{entry.name}_epoch" if entry.on_step else entry.name
                log(name, _on_host(value), prog_bar=entry.prog_bar, logger=entry.logger, batch_size=weight)
        steps = {
            f"{entry.name}_step" if entry.on_epoch else entry.name: value
            for entry, value, _ in rows
            if entry.on_step and entry.logger is not False
        }
        behind = self.session.running().mini_batch - 1 - mini_batch
        private.log_at_step(trainer, steps, batches_ago=behind)

    def _warn_of_nan(self, update: Update) -> None:
        """Say once that a loss was NaN where the gradient is finite; a gradient that is not is another matter."""
        place = nan_micro_batch(update.message.payload)
        if place and update.message.finite and not self._told_of_nan:
            self._told_of_nan = True
            rank_zero_warn(nan_loss_text(update.mini_batch, place))

    def _rows(self, update: Update, layouts: list[list[Entry]]) -> list[Logged]:
        """What steps logged for a mini-batch, and what layers counted in it, with the weights of the values."""
        rows = combine(update.message.payload, layouts)
        if not update.message.weight:
            return rows
        metrics = self.session.whole_model.statistics.metrics(update.message.statistics)
        return rows + [Logged(_counted_entry(name), value, update.message.weight) for name, value in metrics.items()]

    def _log_training(self, entry: Entry, value: float, weight: float) -> None:
        trainer, module, log = self.connected()
        hook = private.current_hook(module) or ""
        known = self._logged.get(entry.name) == entry
        if known and private.update_logged(trainer, hook, entry.name, value, weight):
            return
        log(
            entry.name, _on_host(value), prog_bar=entry.prog_bar, logger=entry.logger, on_step=entry.on_step,
            on_epoch=entry.on_epoch, reduce_fx=entry.reduction, batch_size=weight,
        )  # fmt: skip
        self._logged[entry.name] = entry

    def _layouts(self, numbers: Tensor) -> list[list[Entry]]:
        """What stands at the places of each replica's payload; exchanged between all ranks the first time."""
        wanted = [int(number) for number in numbers]
        if unknown := sorted(set(wanted) - self._schemas.keys()):
            own = {number: self._own_schemas[number] for number in unknown if number in self._own_schemas}
            assert self.session.mesh is not None
            for text in exchange(self.session.mesh, json.dumps(own)):
                self._schemas |= {int(number): decode_schema(schema) for number, schema in json.loads(text).items()}
        return [self._schemas[number] for number in wanted]


def _on_host(value: float) -> Tensor:
    """A number to log: of a float Lightning makes a tensor on the device, and waits for it whenever it shows it."""
    return torch.tensor(value, device="cpu")


def _counted_entry(name: str) -> Entry:
    """How a metric is logged that layers counted."""
    return Entry(name, "mean", prog_bar=False, logger=True, on_step=True, on_epoch=False)
