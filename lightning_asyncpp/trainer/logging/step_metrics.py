"""What the steps log: recorded per micro-batch on the last stage, logged per batch on every rank."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_asyncpp.core.microbatch import BatchOutput
from lightning_asyncpp.core.not_counted import nan_loss_text
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.tree import merge_outputs
from lightning_asyncpp.core.updates.mini_batch import Payload, Update
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.hooks.module_hooks import EPOCH_ENDS, ModuleHooks, Replacement
from lightning_asyncpp.trainer.logging.exchanged import Exchange
from lightning_asyncpp.trainer.logging.log_recorder import (
    METRIC_SLOTS,
    Entry,
    Gaps,
    Logged,
    LoggedBatch,
    LogRecorder,
    combine,
    decode_schema,
    nan_micro_batch,
    payload_length,
)

_EVALUATIONS = ("on_validation", "on_test")
_ONCE = frozenset(f"{loop}_{start}" for loop in ("on_train", *_EVALUATIONS) for start in ("start", "epoch_start"))
_PER_BATCH = frozenset(
    ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]
    + [f"{loop}_{moment}" for loop in ("on_train", *_EVALUATIONS) for moment in ("batch_start", "batch_end")]
)
_RECORDED = _PER_BATCH | _ONCE


class StepMetrics:
    """Stands between ``self.log`` and Lightning for the steps that run in micro-batches.

    What is logged in a mini-batch is sent with its update, and logged where this was applied.

    Args:
        session: the pipeline whose steps they are.

    Attributes:
        active: records what is logged; None outside of steps.
        unused: takes what steps log on stages that do not run them to their end.
        batch_weight: what the newest batch weighs, for what hooks around it log.
    """

    def __init__(self, session: PipelineSession) -> None:
        self.session = session
        self.active: LogRecorder | None = None
        self.unused = LogRecorder(on_step=True, on_epoch=False)
        self.batch_weight = 1.0
        self._trainer: L.Trainer | None = None  # while one runs
        self._train = LogRecorder(on_step=True, on_epoch=False, slots=METRIC_SLOTS)
        self._gaps = Gaps()
        self._evaluation = LogRecorder(on_step=False, on_epoch=True, gaps=self._gaps)
        self._early: list[tuple[LogRecorder, Callable[[], None]]] = []
        self._nan_places: list[Tensor] = []
        self._schemas: dict[int, list[Entry]] = {0: []}  # the same on all ranks
        self._own_schemas: dict[int, str] = {}
        self._received: deque[tuple[Update, list[list[Entry]]]] = deque()
        self._logged: dict[str, Entry] = {}
        self._told_of_nan = False

    def connect(self, trainer: L.Trainer, module: LightningModule) -> None:
        """Take the place of ``module.log`` and let torchmetrics synchronise over the last stages alone.

        Args:
            trainer: that runs the module.
            module: whose metrics they are.
        """
        self.disconnect()
        assert self.session.mesh is not None
        self._mesh: Mesh = self.session.mesh
        self._trainer, self._module, self._told_of_nan = trainer, module, False
        self._log: Callable[..., None] = module.log
        self._exchange = Exchange(self._mesh, lambda: self._module)
        self._hooks = ModuleHooks(module, self._mesh, module.log, self._end_evaluation_batch)
        Replacement(self._dispatch).of(module, "log")
        # What is logged here is the same on all ranks already.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")
        groups = self._mesh.groups
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            group = groups.last_stages if groups is not None else None
            metric.process_group = group
            metric.sync_on_compute = group is not None
            if group is None:  # a metric that is only updated ignores sync_on_compute
                metric.distributed_available_fn = _not_distributed
            metric.dist_sync_on_step = False

    def disconnect(self) -> None:
        """Give ``module.log`` and the module's hooks back, and forget what was not logged."""
        if self._trainer is not None:
            self._module.__dict__.pop("log", None)
            self._hooks.release()
        self._trainer = None
        for kept in (self._early, self._received, self._nan_places, self._logged):
            kept.clear()
        self._evaluation.clear()  # what an evaluation recorded that did not come to its end

    # -- training -------------------------------------------------------------------------------------------------

    def recorder(self) -> LogRecorder:
        """What records the steps of the batch that begins; torchmetrics objects that are over are reset."""
        self.unused.clear()
        while self._exchange.spent:
            self._exchange.spent.pop().reset()
        assert self._trainer is not None
        return self._train if self._trainer.training else self._evaluation

    def add_batch(self, output: BatchOutput) -> None:
        """Take in a training batch on the last stage."""
        self._weigh_batch(output.weight)
        if output.first_nan is not None:
            self._nan_places.append(output.first_nan)

    def payload(self) -> Payload:
        """What the last stage attaches to the control message of the mini-batch."""
        slots = METRIC_SLOTS
        if not self._mesh.is_last:
            self._train.clear()
            return torch.zeros(payload_length(slots), dtype=torch.float64)
        payload = LoggedBatch(self._train.hand_over(slots), self._nan_places, slots)
        self._own_schemas[payload.schema_number] = payload.schema
        self._nan_places = []
        return payload

    def receive(self, updates: Sequence[Update]) -> None:
        """Take the metrics out of applied updates; they are logged in the next hook that may log."""
        for update in updates:
            place = nan_micro_batch(update.message.payload)
            # A gradient that is not finite is another matter.
            if place and update.message.finite and not self._told_of_nan:
                self._told_of_nan = True
                rank_zero_warn(nan_loss_text(update.mini_batch, place))
            self._received.append((update, self._layouts(update.message.payload[:, 0].tolist())))

    def log_received(self) -> None:
        """Log what updates brought, each as the metrics of its own step."""
        engine = self.session.engine
        if self._trainer is None or engine is None:
            return
        # Of the batch that just ended; in the middle of an accumulation that mini-batch is still open.
        newest = engine.mini_batch - (0 if engine.accumulating else 1)
        hook = private.current_hook(self._module) or ""
        while self._received:
            update, layouts = self._received.popleft()
            for row in self._rows(update, layouts):
                self._log_training(hook, row)
            private.log_step_metrics(self._trainer, batches_ago=newest - update.mini_batch)

    def log_before_save(self) -> None:
        """Log what a save's own drain brought: neither this run, if it is killed, nor one that goes on would."""
        if self._trainer is None or not self._received:  # after the training
            return
        if private.current_hook(self._module) == "on_train_batch_end":
            self.log_received()
        else:
            self._log_received_late()

    def log_rest_of_epoch(self) -> None:
        """Log, at an epoch's end, what no batch logged: hooks after the last update, and updates after a skipped batch.

        A blocking collective, once per epoch.
        """
        self._log_received_late()
        rest = self._exchange.values(self._train, metric_objects=False)
        self._train.clear()
        self._log_late(rest, self.session.running().mini_batch - 1)

    def _log_received_late(self) -> None:
        """Log, outside of the hook that may log steps, what updates brought."""
        while self._received:
            update, layouts = self._received.popleft()
            self._log_late(self._rows(update, layouts), update.mini_batch)

    def _log_late(self, rows: list[Logged], mini_batch: int) -> None:
        """Log values that belong to a mini-batch whose own hook is over.

        Args:
            rows: each with the weight that it stands for.
            mini_batch: its index.
        """
        assert self._trainer is not None
        for entry, value, weight in rows:
            if private.update_logged(self._trainer, "on_train_batch_end", entry.name, value, weight):
                continue
            if entry.on_epoch:
                name = f"{entry.name}_epoch" if entry.on_step else entry.name
                self._log(name, _on_host(value), prog_bar=entry.prog_bar, logger=entry.logger, batch_size=weight)
        steps = {
            f"{entry.name}_step" if entry.on_epoch else entry.name: value
            for entry, value, _ in rows
            if entry.on_step and entry.logger is not False
        }
        behind = self.session.running().mini_batch - 1 - mini_batch
        private.log_at_step(self._trainer, steps, batches_ago=behind)

    def _rows(self, update: Update, layouts: list[list[Entry]]) -> list[Logged]:
        """What steps logged for a mini-batch, and what layers counted in it, with the weights of the values."""
        rows, message = combine(update.message.payload, layouts), update.message
        if message.weight and len(message.statistics):
            metrics = self.session.whole_model.statistics.metrics(message.statistics)
            rows += [Logged(_counted_entry(name), value, message.weight) for name, value in metrics.items()]
        return rows

    def _log_training(self, hook: str, row: Logged) -> None:
        entry, value, weight = row
        assert self._trainer is not None
        known = self._logged.get(entry.name) == entry
        if known and private.update_logged(self._trainer, hook, entry.name, value, weight):
            return
        self._log(
            entry.name, _on_host(value), prog_bar=entry.prog_bar, logger=entry.logger, on_step=entry.on_step,
            on_epoch=entry.on_epoch, reduce_fx=entry.reduction, batch_size=weight,
        )  # fmt: skip
        self._logged[entry.name] = entry

    def _layouts(self, numbers: Sequence[float]) -> list[list[Entry]]:
        """What stands at the places of each replica's payload; exchanged between all ranks the first time."""
        if unknown := sorted({int(number) for number in numbers} - self._schemas.keys()):
            own = {number: self._own_schemas[number] for number in unknown if number in self._own_schemas}
            for text in exchange(self._mesh, json.dumps(own)):
                self._schemas |= {int(number): decode_schema(schema) for number, schema in json.loads(text).items()}
        return [self._schemas[int(number)] for number in numbers]

    # -- evaluation -----------------------------------------------------------------------------------------------

    def merged(self, output: BatchOutput) -> Any:
        """What the step would have returned for the whole batch."""
        self._weigh_batch(output.weight)
        self._evaluation.settle()
        self._gaps.batch += 1
        return merge_outputs(output.results, output.weights)

    def ends_loader(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Whether an evaluation's batch is the last of its loader; without a length, only the loop knows which is."""
        return batch_idx + 1 >= self._batches_of_loader(dataloader_idx)

    def _end_evaluation_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """Log what a loader brought, after its last batch; of one without a length, what each batch brought."""
        has_length = self._batches_of_loader(dataloader_idx) != math.inf
        if not has_length or self.ends_loader(batch_idx, dataloader_idx):
            self._log_evaluation(whole_loader=has_length)

    def _batches_of_loader(self, dataloader_idx: int) -> int | float:
        """How many batches of a loader are evaluated; infinitely many where only the loop knows."""
        trainer = self._trainer
        assert trainer is not None
        evaluated = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        limits = trainer.num_sanity_val_batches if trainer.sanity_checking else evaluated
        return limits[dataloader_idx] if dataloader_idx < len(limits) else math.inf

    def _log_evaluation(self, whole_loader: bool) -> None:
        """Log what was recorded since the last call, alike on all ranks; a blocking collective, once per loader.

        Args:
            whole_loader: the values are those of a whole loader, torchmetrics objects included; otherwise Lightning
                goes on averaging.
        """
        for entry, value, weight in self._exchange.values(self._evaluation, metric_objects=whole_loader):
            self._log(
                entry.name, value, prog_bar=entry.prog_bar, logger=entry.logger, on_step=entry.on_step,
                on_epoch=entry.on_epoch, reduce_fx=entry.reduction, batch_size=1 if whole_loader else weight,
                add_dataloader_idx=entry.add_dataloader_idx,
            )  # fmt: skip
        self._evaluation.clear()

    def log_metric_objects(self, training: bool) -> None:
        """Log the torchmetrics objects of an epoch, alike on all ranks; they are reset before the next step."""
        if not any(isinstance(m, Metric) for m in self._module.modules()):
            return
        recorder = LogRecorder(on_step=False, on_epoch=True)
        source = self._train if training else self._evaluation
        recorder.metrics, recorder.metric_entries = source.metrics, source.metric_entries
        for entry, value, _ in self._exchange.values(recorder, metric_objects=True):
            if not entry.on_epoch:
                continue
            name = f"{entry.name}_epoch" if entry.on_step else entry.name
            self._log(name, value, prog_bar=entry.prog_bar, logger=entry.logger, batch_size=1)
            if entry.on_step:  # Lightning's callbacks find it under both names
                self._log(entry.name, value, logger=False, batch_size=1)

    # -- everything else ------------------------------------------------------------------------------------------

    def _dispatch(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """What ``module.log`` does while the strategy runs."""
        if self.active is not None:
            self.active.log(name, value, *args, **kwargs)
            return
        hook = private.current_hook(self._module) or ""
        if hook in EPOCH_ENDS and not kwargs.get("rank_zero_only"):
            self._hooks.record(name, value, *args, **kwargs)
        elif hook in _RECORDED and not kwargs.get("rank_zero_only"):
            self._record_in_hook(hook, name, value, *args, **kwargs)
        else:
            self._log(name, value, *args, **kwargs)

    def _record_in_hook(self, hook: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a value that a hook logged; that of the last stage counts, whatever the others log."""
        if not self._mesh.is_last:
            return
        recorder = self._evaluation if hook.startswith(_EVALUATIONS) else self._train
        recorder.weight = self.batch_weight
        if hook in _ONCE:
            recorder.weight = 1.0
            given = {key: option for key, option in kwargs.items() if option is not None}
            kwargs = {"on_step": False, "on_epoch": True} | given | {"add_dataloader_idx": False}
        if hook.endswith("_batch_start"):  # how much the batch weighs will be known when it has run
            self._early.append((recorder, functools.partial(recorder.log, name, value, *args, **kwargs)))
            return
        recorder.log(name, value, *args, **kwargs)

    def _weigh_batch(self, weight: float) -> None:
        self.batch_weight = weight
        for recorder, log in self._early:
            recorder.weight = weight
            log()
        self._early.clear()


def _on_host(value: float) -> Tensor:
    """A number to log: of a float Lightning makes a tensor on the device, and waits for it whenever it shows it."""
    return torch.tensor(value, device="cpu")


def _counted_entry(name: str) -> Entry:
    """How a metric is logged that layers counted."""
    return Entry(name, "mean", prog_bar=False, logger=True, on_step=True, on_epoch=False)


def _not_distributed() -> bool:
    return False
