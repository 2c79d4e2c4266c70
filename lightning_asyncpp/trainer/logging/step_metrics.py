"""What the steps log: recorded per micro-batch on the last stage, logged per batch on every rank."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_asyncpp.core.batches.batch_output import BatchOutput
from lightning_asyncpp.core.batches.tree import merge_outputs
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.updates.control_message import Payload
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.hooks.module_hooks import EPOCH_ENDS, ModuleHooks, Replacement
from lightning_asyncpp.trainer.logging.log_recorder import (
    METRIC_SLOTS,
    Entry,
    Gaps,
    Logged,
    LogRecorder,
    combined,
    number,
)
from lightning_asyncpp.trainer.logging.update_metrics import Connection, UpdateMetrics

_EVALUATIONS = ("on_validation", "on_test")
_ONCE = frozenset(f"{loop}_{start}" for loop in ("on_train", *_EVALUATIONS) for start in ("start", "epoch_start"))
_PER_BATCH = frozenset(
    ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]
    + [f"{loop}_{moment}" for loop in ("on_train", *_EVALUATIONS) for moment in ("batch_start", "batch_end")]
)
_RECORDED = _PER_BATCH | _ONCE


class StepMetrics:
    """Stands between ``self.log`` and Lightning for the steps that run in micro-batches.

    Args:
        session: the pipeline whose steps they are.
        on_loss: called on every rank with the mean loss of every mini-batch whose update was applied.

    Attributes:
        updates: takes what is logged with an update.
        holds: whether there are hooks whose values are held back for one mini-batch: see :meth:`of_batch`.
    """

    def __init__(self, session: PipelineSession, on_loss: Callable[[float], None]) -> None:
        self.session = session
        self.updates = UpdateMetrics(session, on_loss)
        self._train = LogRecorder(on_step=True, on_epoch=False, slots=METRIC_SLOTS)
        self._held = LogRecorder(on_step=True, on_epoch=False, slots=METRIC_SLOTS)
        self._holding = False
        self.holds = False
        self._gaps = Gaps()
        self._evaluation = LogRecorder(on_step=False, on_epoch=True, gaps=self._gaps)
        self._unused = LogRecorder(on_step=True, on_epoch=False)
        self._active: LogRecorder | None = None
        self._hooks: ModuleHooks | None = None
        self._batch_weight = 1.0
        self._early: list[tuple[LogRecorder, Callable[[], None]]] = []
        self._spent: list[Metric] = []

    def connect(self, trainer: L.Trainer, module: LightningModule) -> None:
        """Take the place of ``module.log`` and let torchmetrics synchronise over the last stages alone.

        Args:
            trainer: that runs the module.
            module: whose metrics they are.
        """
        self.disconnect()
        self.updates.connect(Connection(trainer, module, module.log))
        self._hooks = ModuleHooks(module, self._mesh, module.log, self._end_evaluation_batch)
        module.log = Replacement(module, "log", self._dispatch)  # type: ignore[method-assign]
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
        """Give ``module.log`` and the module's hooks back."""
        if self.updates.connection is not None:
            self.updates.connection.module.__dict__.pop("log", None)
        if self._hooks is not None:
            self._hooks.release()
        self._hooks = None
        self.updates.disconnect()
        self._early.clear()
        self._held.clear()
        self._evaluation.clear()  # what an evaluation recorded that did not come to its end

    # -- training -------------------------------------------------------------------------------------------------

    def start_recording(self, weight: float | None) -> None:
        """Record what is logged from here on as that of a micro-batch of weight ``weight``; nothing if it is None."""
        if weight is None:
            self._active = self._unused
            self._unused.clear()
            return
        while self._spent:  # not when they were computed: hooks at the end of an epoch may look at them
            self._spent.pop().reset()
        self._active = self._train if self.updates.connected().trainer.training else self._evaluation
        self._active.weight = weight

    def stop_recording(self) -> None:
        """The step of the micro-batch has ended."""
        self._active = None

    def add_batch(self, loss: Tensor | None, output: BatchOutput) -> None:
        """Take in the mean loss of a training batch on the last stage; None if the batch had no samples."""
        weight = sum(output.weights)
        self._weigh_batch(weight)
        self.updates.add_loss(loss, weight, output)

    @property
    def batch_weight(self) -> float:
        """What the newest batch weighs, for what hooks around it log."""
        return self._batch_weight

    @contextmanager
    def of_batch(self, weight: float, held: bool) -> Iterator[None]:
        """The hook of a batch runs meanwhile, maybe in the middle of the next one.

        Args:
            weight: of the batch.
            held: it runs before the next batch, and its values go with the batch after that all the same: steps are
                logged alike whether or not the pipeline drained.
        """
        present, self._batch_weight, self._holding = self._batch_weight, weight, held
        try:
            yield
        finally:
            self._batch_weight, self._holding = present, False

    def payload(self) -> Payload:
        """What the last stage attaches to the control message of the mini-batch."""
        if not self._mesh.is_last:
            self._train.clear()
            return self.updates.payload(None)
        payload = self.updates.payload(self._train.hand_over(METRIC_SLOTS))
        self._train.take(self._held)
        return payload

    def log_rest_of_epoch(self) -> None:
        """Log, at an epoch's end, what no batch logged: hooks after the last update, and updates after a skipped batch.

        A blocking collective, once per epoch.
        """
        self.updates.log_received_late()
        for _ in range(2 if self.holds else 1):
            rest = self._exchange(self._train, metric_objects=False)
            self._train.clear()
            self._train.take(self._held)
            self.updates.log_late(rest, self.session.running().mini_batch - 1)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def merged(self, output: BatchOutput) -> Any:
        """What the step would have returned for the whole batch."""
        self._weigh_batch(sum(output.weights))
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
            self.log_evaluation(whole_loader=has_length)

    def _batches_of_loader(self, dataloader_idx: int) -> int | float:
        """How many batches of a loader are evaluated; infinitely many where only the loop knows."""
        trainer = self.updates.connected().trainer
        limits = trainer.num_sanity_val_batches if trainer.sanity_checking else _evaluated_batches(trainer)
        return limits[dataloader_idx] if dataloader_idx < len(limits) else math.inf

    def log_evaluation(self, whole_loader: bool) -> None:
        """Log what was recorded since the last call, alike on all ranks; a blocking collective, once per loader.

        Args:
            whole_loader: the values are those of a whole loader, torchmetrics objects included; otherwise Lightning
                goes on averaging.
        """
        log, recorder = self.updates.connected().log, self._evaluation
        for entry, value, weight in self._exchange(recorder, metric_objects=whole_loader):
            log(
                entry.name, value, prog_bar=entry.prog_bar, logger=entry.logger, on_step=entry.on_step,
                on_epoch=entry.on_epoch, reduce_fx=entry.reduction, batch_size=1 if whole_loader else weight,
                add_dataloader_idx=entry.add_dataloader_idx,
            )  # fmt: skip
        recorder.clear()

    def log_metric_objects(self, training: bool) -> None:
        """Log the torchmetrics objects of an epoch, alike on all ranks; they are reset before the next step."""
        _, module, log = self.updates.connected()
        if not any(isinstance(m, Metric) for m in module.modules()):
            return
        recorder = LogRecorder(on_step=False, on_epoch=True)
        source = self._train if training else self._evaluation
        recorder.metrics, recorder.metric_entries = source.metrics, source.metric_entries
        for entry, value, _ in self._exchange(recorder, metric_objects=True):
            if not entry.on_epoch:
                continue
            name = f"{entry.name}_epoch" if entry.on_step else entry.name
            log(name, value, prog_bar=entry.prog_bar, logger=entry.logger, batch_size=1)
            if entry.on_step:  # Lightning's callbacks find it under both names
                log(entry.name, value, logger=False, batch_size=1)

    def _exchange(self, recorder: LogRecorder, metric_objects: bool) -> list[Logged]:
        """Values of all replicas' last stages, combined; the same on every rank."""
        recorder.settle()
        rows: list[Logged] = []
        if metric_objects:
            self._agree_on_objects(recorder)
        if self._mesh.is_last:
            rows = recorder.logged()
            if metric_objects:
                rows += [
                    Logged(recorder.metric_entries[n], number(n, m.compute()), 1.0) for n, m in recorder.metrics.items()
                ]
                self._spent += recorder.metrics.values()
        nan = {} if recorder.gaps is None else recorder.gaps.nan
        gaps = [(asdict(recorder.entries[name]), sorted(batches)) for name, batches in nan.items()]
        said = [
            json.loads(text) for text in self._say({"rows": _plain(rows), "gaps": gaps}, bool(rows or gaps)) if text
        ]
        unknown = self._unknown(
            recorder, [(Entry(**fields), batches) for one in said for fields, batches in one["gaps"]]
        )
        if metric_objects:  # what is not logged again has no value
            recorder.metrics.clear()
            recorder.metric_entries.clear()
        together = combined(Logged(Entry(**fields), *rest) for one in said for fields, *rest in one["rows"])
        return [row for row in together if row.entry not in unknown] + [Logged(e, math.nan, 1.0) for e in unknown]

    def _say(self, content: Any, is_any: bool) -> list[str]:
        return exchange(self._mesh, json.dumps(content) if is_any and self._mesh.is_last else "")

    def _agree_on_objects(self, recorder: LogRecorder) -> None:
        """Have torchmetrics objects computed by all replicas that any of them logged; a collective call."""
        if self._mesh.num_replicas == 1:
            return
        modules = dict(self.updates.connected().module.named_modules())
        said = self._say(recorder.objects(modules), bool(recorder.metrics))
        if self._mesh.is_last:
            recorder.agree_on_objects([json.loads(text) for text in said if text], modules)

    def _unknown(self, recorder: LogRecorder, gaps: list[tuple[Entry, list[int]]]) -> list[Entry]:
        """Of what was NaN in some batch of a replica, that for which no replica has a number in that batch; collective.

        Args:
            recorder: of an evaluation.
            gaps: of all replicas, known to all ranks: what was NaN, and in which batches.
        """
        if not gaps:
            return []
        known = {} if recorder.gaps is None else recorder.gaps.known
        own = [sorted(known.get(entry.name, set()).intersection(batches)) for entry, batches in gaps]
        said = [json.loads(text) for text in self._say(own, any(own)) if text]
        lost = [
            entry for at, (entry, batches) in enumerate(gaps) if set(batches).difference(*(one[at] for one in said))
        ]
        return list(dict.fromkeys(lost))

    # -- everything else ------------------------------------------------------------------------------------------

    @property
    def _mesh(self) -> Mesh:
        assert self.session.mesh is not None
        return self.session.mesh

    def _dispatch(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """What ``module.log`` does while the strategy runs."""
        assert self._hooks is not None
        if self._active is not None:
            self._active.log(name, value, *args, **kwargs)
            return
        _, module, log = self.updates.connected()
        hook = private.current_hook(module) or ""
        if hook in EPOCH_ENDS and not kwargs.get("rank_zero_only"):
            self._hooks.record(name, value, *args, **kwargs)
        elif hook in _RECORDED and not kwargs.get("rank_zero_only"):
            self._record_in_hook(hook, name, value, *args, **kwargs)
        else:
            log(name, value, *args, **kwargs)

    def _record_in_hook(self, hook: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a value that a hook logged; that of the last stage counts, whatever the others log."""
        if not self._mesh.is_last:
            return
        training = self._held if self._holding else self._train
        recorder = self._evaluation if hook.startswith(_EVALUATIONS) else training
        recorder.weight = self._batch_weight
        if hook in _ONCE:
            recorder.weight = 1.0
            given = {key: option for key, option in kwargs.items() if option is not None}
            kwargs = {"on_step": False, "on_epoch": True} | given | {"add_dataloader_idx": False}
        if hook.endswith("_batch_start"):  # how much the batch weighs will be known when it has run
            self._early.append((recorder, functools.partial(recorder.log, name, value, *args, **kwargs)))
            return
        recorder.log(name, value, *args, **kwargs)

    def _weigh_batch(self, weight: float) -> None:
        self._batch_weight = weight
        for recorder, log in self._early:
            recorder.weight = weight
            log()
        self._early.clear()


def _plain(rows: list[Logged]) -> list[tuple[dict[str, Any], float, float]]:
    return [(asdict(entry), value, weight) for entry, value, weight in rows]


def _evaluated_batches(trainer: L.Trainer) -> list[int | float]:
    return trainer.num_test_batches if trainer.testing else trainer.num_val_batches


def _not_distributed() -> bool:
    return False
