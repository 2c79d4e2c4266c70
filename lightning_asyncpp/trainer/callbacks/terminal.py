"""Terminal output of a training: a table of the stages at its start, then a progress bar that fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from lightning_utilities.core.rank_zero import rank_zero_info
from tqdm import tqdm

from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.partition import loads_of
from lightning_asyncpp.core.cut.partition_choice import BY_SIZE
from lightning_asyncpp.core.cut.units import telling
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession

_SHORT = {"train_loss": "loss", "tokens_per_second": "tok/s", "val_loss": "val"}
_FIRST = ("loss", "tok/s", "bubble", "val")
_LEAST_BAR = 8
_TQDMS_BAR = 10
"""Width in columns that tqdm gives its bar if the line has no fixed width."""


class PipelineProgressBar(TQDMProgressBar):
    """Lightning's bar with short names: ``loss`` for ``train_loss``, ``tok/s`` for ``tokens_per_second``; shares in %.

    Values are shown as far as there is room: first loss, throughput and bubble, then the validation's loss, then other
    values logged with ``prog_bar=True``. The version number and the batches per second are not shown. ``asyncpp fit``
    uses this bar unless the recipe has another progress bar.

    Args:
        refresh_rate: number of batches between two refreshes.
        process_position: number of bars above this one.
        leave: whether the bar of every epoch stays on the screen.
    """

    BAR_FORMAT = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def get_metrics(
        self, trainer: L.Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values to show after the bar, in their order."""
        shown = {_SHORT.get(name, name): _text(name, value) for name, value in trainer.progress_bar_metrics.items()}
        ordered = {name: shown[name] for name in (*_FIRST, *shown) if name in shown}
        if trainer.state.fn == TrainerFn.FITTING:  # also when a validation ends and refreshes the training's bar
            ordered = _fitting(self.train_progress_bar, ordered)
        return {**ordered}

    def on_exception(self, trainer: L.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, which would otherwise be drawn below the error at the end of the process."""
        with suppress(TypeError):  # no training has begun
            self.train_progress_bar.close()


def _text(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if name == "tokens_per_second":
        return tqdm.format_sizeof(value) if value >= 1000 else f"{value:.0f}"
    return f"{100 * value:.0f}%" if name in ("bubble", "mfu") else f"{value:#.4g}"


def _fitting(bar: tqdm, metrics: dict[str, str]) -> dict[str, str]:
    """Return the first metrics, as many as fit in the line; all of them if the output has no width, like a file."""
    now = bar.format_dict
    if now["ncols"] is None:
        return metrics
    line = bar.format_meter(**{**now, "ncols": None, "postfix": ""})
    room = now["ncols"] - len(line) + _TQDMS_BAR - _LEAST_BAR
    fitting: dict[str, str] = {}
    for name, text in metrics.items():
        room -= len(f", {name}={text}")
        if room < 0:
            break
        fitting[name] = text
    return fitting


class StageSummary(ModelSummary):
    """Table of each stage's layers, parameters and (if known) costs, printed when a training starts.

    The pipeline strategies put it in place of a ``ModelSummary`` or ``RichModelSummary``.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Print the table, on rank 0."""
        rank_zero_info(stage_table(trainer.strategy.session, network_in(pl_module)))  # type: ignore[attr-defined]


def show_stages(trainer: L.Trainer) -> None:
    """Replace a Trainer's model summary, if there is one, by a :class:`StageSummary`."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    summaries = [c for c in callbacks if isinstance(c, ModelSummary)]
    if not summaries or any(isinstance(c, StageSummary) for c in summaries):
        return
    replaced = [c for c in summaries if type(c) in (ModelSummary, RichModelSummary)]
    place = callbacks.index(summaries[0])
    rest = [c for c in callbacks[place:] if c not in replaced]
    trainer.callbacks = [*callbacks[:place], StageSummary(), *rest]  # type: ignore[attr-defined]


def stage_table(session: PipelineSession, model: Any = None) -> str:
    """Return a table of every stage: its layers, its parameters and its share of the cost.

    Args:
        session: the started pipeline.
        model: model that was cut; its ``pipeline_costs_unit`` is the unit of the costs.
    """
    whole, partition, mesh = session.whole_model, session.partition, session.mesh
    assert mesh is not None
    titles, rows = ["stage", "ranks", "layers", "names", "parameters"], _rows(whole, mesh)
    if partition is not None and partition.costs and not partition.source.endswith(BY_SIZE):
        unit = getattr(model, "pipeline_costs_unit", None)
        _add_costs(titles, rows, [float(load) for load in loads_of(partition.costs, partition.counts)], unit)
    frozen = sum(whole.num_parameters) - sum(whole.num_trained)
    notes = [_places(mesh)]
    notes += [f"{_count(frozen)} of the parameters are frozen."] if frozen else []
    if whole.ties:
        notes.append("A parameter that several stages share counts on each of them.")
    return "\n".join(["Stages of the pipeline:", *_lines(titles, rows), *notes])


def _places(mesh: Mesh) -> str:
    """Return a line that explains the column of ranks."""
    several = mesh.num_replicas > 1
    first = " of the first replica" if several else ""
    rest = " The ranks of a row run the same stage, each for one replica." if several else ""
    return (
        f"A rank is a process. Rank 0 runs stage {mesh.stage_of(0)}{first}, which computes the loss, and writes the"
        f" logs. Batches enter at stage 0, on rank {mesh.rank_of(0, 0)}.{rest}"
    )


def _rows(whole: WholeModel, mesh: Mesh) -> list[list[str]]:
    """Return a row of cells for each stage, and a last row for the whole model."""
    rows, start = [], 0
    for stage, count in enumerate(whole.counts):
        ranks = ", ".join(str(mesh.rank_of(stage, replica)) for replica in range(min(mesh.num_replicas, 4)))
        ranks += ", ..." if mesh.num_replicas > 4 else ""
        names = _from_to(telling(whole.names[start : start + count]))
        rows.append([str(stage), ranks, str(count), names, _count(whole.num_parameters[stage])])
        start += count
    return [*rows, ["all", "", str(start), "", _count(sum(whole.num_parameters))]]


def _add_costs(titles: list[str], rows: list[list[str]], loads: Sequence[float], unit: str | None) -> None:
    """Add a column with each stage's share of the cost; if the model has a unit, also a column with the costs."""
    total = sum(loads)
    for row, load in zip(rows, [*loads, total]):
        row += [_count(int(load))] * (unit is not None) + [f"{100 * load / (total or 1.0):.1f} %"]
    titles += ([unit] if unit is not None else []) + ["of cost"]


def _count(number: int) -> str:
    return str(get_human_readable_count(number)).strip()


def _from_to(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    for number, row in enumerate([titles, *rows]):
        if number in (1, len(rows)):
            yield "-" * (sum(widths) + 2 * (len(widths) - 1))
        cells = (c.ljust(w) if name == "names" else c.rjust(w) for c, w, name in zip(row, widths, titles))
        yield "  ".join(cells).rstrip()
