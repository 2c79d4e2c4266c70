"""What the last stages of all replicas recorded, put together: at the end of a loader, and of an epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.trainer.logging.log_recorder import Entry, Logged, LogRecorder, combined, number


class Exchange:
    """Values of all replicas, the same on every rank; each call is a blocking collective.

    Args:
        mesh: this rank's place.
        module: whose torchmetrics objects are computed.

    Attributes:
        spent: torchmetrics objects that were computed, to be reset before the next step: hooks at the end of an epoch
            may look at them.
    """

    def __init__(self, mesh: Mesh, module: Callable[[], LightningModule]) -> None:
        self._mesh, self._module = mesh, module
        self.spent: list[Metric] = []

    def values(self, recorder: LogRecorder, metric_objects: bool) -> list[Logged]:
        """What a recorder has on all replicas, combined.

        Args:
            recorder: of this rank.
            metric_objects: compute torchmetrics objects, too.
        """
        recorder.settle()
        rows: list[Logged] = []
        if metric_objects:
            self._agree_on_objects(recorder)
        if self._mesh.is_last:
            rows = recorder.logged()
            if metric_objects:
                computed = [(name, number(name, metric.compute())) for name, metric in recorder.metrics.items()]
                rows += [Logged(recorder.metric_entries[name], value, 1.0) for name, value in computed]
                self.spent += recorder.metrics.values()
        nan = {} if recorder.gaps is None else recorder.gaps.nan
        gaps = [(asdict(recorder.entries[name]), sorted(batches)) for name, batches in nan.items()]
        plain = [(asdict(entry), value, weight) for entry, value, weight in rows]
        told = self._of_replicas({"rows": plain, "gaps": gaps}, bool(rows or gaps))
        unknown = self._unknown(
            recorder, [(Entry(**fields), batches) for one in told for fields, batches in one["gaps"]]
        )
        if metric_objects:  # what is not logged again has no value
            recorder.metrics.clear()
            recorder.metric_entries.clear()
        together = combined([Logged(Entry(**fields), *rest) for one in told for fields, *rest in one["rows"]])
        return [row for row in together if row.entry not in unknown] + [Logged(e, math.nan, 1.0) for e in unknown]

    def _of_replicas(self, content: Any, is_any: bool) -> list[Any]:
        """What last stages have to tell, those that have anything."""
        texts = exchange(self._mesh, json.dumps(content) if is_any and self._mesh.is_last else "")
        return [json.loads(text) for text in texts if text]

    def _agree_on_objects(self, recorder: LogRecorder) -> None:
        """Have torchmetrics objects computed by all replicas that any of them logged."""
        if self._mesh.num_replicas == 1:
            return
        modules = dict(self._module().named_modules())
        told = self._of_replicas(recorder.objects(modules), bool(recorder.metrics))
        if self._mesh.is_last:
            recorder.agree_on_objects(told, modules)

    def _unknown(self, recorder: LogRecorder, gaps: list[tuple[Entry, list[int]]]) -> list[Entry]:
        """Of what was NaN in some batch of a replica, that for which no replica has a number in that batch.

        Args:
            recorder: of an evaluation.
            gaps: of all replicas, known to all ranks: what was NaN, and in which batches.
        """
        if not gaps:
            return []
        known = {} if recorder.gaps is None else recorder.gaps.known
        own = [sorted(known.get(entry.name, set()).intersection(batches)) for entry, batches in gaps]
        told = self._of_replicas(own, any(own))
        lost = [
            entry for at, (entry, batches) in enumerate(gaps) if set(batches).difference(*(one[at] for one in told))
        ]
        return list(dict.fromkeys(lost))
