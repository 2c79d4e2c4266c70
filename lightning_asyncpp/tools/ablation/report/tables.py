"""The tables of an ablation as Markdown: without delay against delayed and corrected, other delays, the lr search.

Above them stands what is missing. Pure functions of an
:class:`~lightning_asyncpp.tools.ablation.report.summary.Ablation`; the text depends on nothing else.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_asyncpp.tools.ablation.grid import UNCORRECTED, Group, Open, Row, named, natural, without_start
from lightning_asyncpp.tools.ablation.report.lengths import length_of
from lightning_asyncpp.tools.ablation.report.summary import Ablation, Result, Spread, Verdict, difference, judge
from lightning_asyncpp.tools.ablation.report.table_cells import EDGE, ONE_LR, UNFINISHED, Cells, per_cent

_MOST_BESIDE = 2  # corrections that the main table has columns for
_NOTES = {
    EDGE: f"{EDGE} edge of the search: the best learning rate is the lowest or the highest one tried.",
    ONE_LR: f"{ONE_LR} a single learning rate was run: not searched for.",
    UNFINISHED: f"{UNFINISHED} not finished: trainings of this row, or of one that it is compared with, failed or are"
    " still to be run.",
}
_BEGIN = (
    f"Not all trainings of the recipe have a result; what depends on one that is missing is marked {UNFINISHED}. The"
    " further seeds of a row count once its search is over."
)
_MOST_LISTED = 20  # rows, and failed trainings, that are named one by one


def page(ablation: Ablation, plots: Sequence[str]) -> str:
    """The whole report: a heading, every table that has rows, and the plots.

    Args:
        ablation: what to report.
        plots: file names of the plots, relative to the page.
    """
    name = ablation.runs[0].table if ablation.runs else "no runs yet"
    parts = [f"# Ablation: {_escape(name)}", *([text] if (text := missing_list(ablation)) else [])]
    definitions = Definitions()
    tables = {kind: text for kind in TABLES if (text := TABLES[kind](ablation))}
    parts += [f"## {TITLES[kind]}\n\n{definitions.below(kind, text)}" for kind, text in tables.items()]
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots))
    return "\n\n".join(parts) + "\n"


def main_table(ablation: Ablation) -> str:
    """Loss without delay, with a delay of one update, and with each correction; empty if the recipe has neither.

    Columns that the recipe asks nothing of are left out.
    """
    compared = (ablation.no_delay, ablation.one_update)
    shown = [g for g in ablation.groups if any(r.group == g and r.setting in compared for r in ablation.rows)]
    if not shown:
        return ""
    sync, delayed = named("sync", ablation.no_delay), named("async", ablation.one_update)
    names = len(_group_header(ablation))
    header = [*_group_header(ablation), sync, delayed, "gap"]
    for correction in _beside(ablation):
        header += [f"{delayed} + {correction}", f"{correction} recovers"]
    cells = Cells(ablation)
    lines = [_main_line(cells, group) for group in shown]
    kept = [column for column in range(len(header)) if column < names or any(line[column] for line in lines)]
    header, *lines = [[line[column] for column in kept] for line in (header, *lines)]
    return _with_notes(_markdown(header, lines), counts(ablation))


def correction_table(ablation: Ablation) -> str:
    """A line per correction at a delay of one update; empty where they fit beside the losses of the main table."""
    if len(_used(ablation)) <= _MOST_BESIDE:
        return ""
    header = [*_group_header(ablation), "correction", "loss", "gap to sync", "recovers"]
    cells, known = Cells(ablation), set(ablation.rows)
    lines = [
        [*_group_names(ablation, group), row.correction, cells.loss(row), cells.gap(row), cells.share(row)]
        for group in ablation.groups
        for row in (Row(group, *ablation.one_update, name) for name in [UNCORRECTED, *_used(ablation)])
        if row in known
    ]
    return _with_notes(_markdown(header, lines), counts(ablation))


def equal_table(ablation: Ablation) -> str:
    """All three at every learning rate that all three were run at, on the search seed; empty if there is none.

    A training that two corrections share, such as one with its own and one with another row's learning rate, stands
    once, with the one whose learning rate was searched.
    """
    cells = Cells(ablation)
    lines: dict[tuple[Group, str], list[str]] = {}  # by the corrected training
    for group in ablation.groups:
        for name in sorted(_used(ablation), key=lambda name: not _searched(ablation.delayed(group, name))):
            for cell, line in _equal_lines(cells, group, name):
                lines.setdefault((group, cell), line)
    compared = [named("sync", ablation.no_delay), named("async", ablation.one_update)]
    header = [*_group_header(ablation), "correction", "lr", *compared, "corrected", "recovers"]
    return _with_notes(_markdown(header, list(lines.values()))) if lines else ""


def delay_table(ablation: Ablation) -> str:
    """Loss and gap under every other delay, the delay of one update above them; empty if there is no other."""
    other = [row for row in ablation.rows if row.setting not in (ablation.no_delay, ablation.one_update)]
    if not other:
        return ""
    compared = {row.group for row in other}
    reference = [r for r in ablation.rows if r.setting == ablation.one_update and r.group in compared]
    rows = sorted([*reference, *other], key=_row_order(ablation))
    header = [*_group_header(ablation), "delay", "stages", "correction", "loss", "gap to sync", "recovers"]
    cells = Cells(ablation)
    lines = [[*_row_names(ablation, row), cells.loss(row), cells.gap(row), cells.share(row)] for row in rows]
    if any(length_of(row.group) is not None for row in rows):
        header.append("further updates")
        lines = [[*line, cells.further_updates(row)] for line, row in zip(lines, rows)]
    several = len({ablation.sync_row(row).setting for row in rows}) > 1
    notes = [_SEVERAL_SYNC_NOTE] if several else []
    notes += [_LENGTH_NOTE] if "further updates" in header else []
    notes += [_START_NOTE] if any(without_start(row.delay) != row.delay for row in rows) else []
    return _with_notes(_markdown(header, lines), *notes, counts(ablation))


def search_table(ablation: Ablation) -> str:
    """Loss of every learning rate on the search seed, a table per optimizer, the chosen one in bold."""
    parts, cells = [], Cells(ablation)
    for optimizer in dict.fromkeys(group.optimizer for group in ablation.groups):
        rows = sorted((r for r in ablation.rows if r.group.optimizer == optimizer), key=_row_order(ablation))
        found = [(row, searched) for row in rows if (searched := cells.searched(row))]
        lrs = sorted({lr for _, searched in found for lr in searched})
        header = [*_group_header(ablation), "delay", "stages", "correction", *(f"lr {lr:g}" for lr in lrs)]
        lines = [_row_names(ablation, row) + [searched.get(lr, "") for lr in lrs] for row, searched in found]
        parts += [_markdown(header, lines)] if lines else []
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[Ablation], str]] = {
    "main": main_table,
    "corrections": correction_table,
    "equal": equal_table,
    "delays": delay_table,
    "search": search_table,
}
TITLES = {
    "main": "No delay, a delay of one update, and corrections",
    "corrections": "Corrections side by side",
    "equal": "At the same learning rate",
    "delays": "Other delays",
    "search": "The search for the learning rate",
}
_MAIN_DEFINITION = (
    "Last validation loss (learning rate): mean over seeds, ± half of its 95 % interval (Student's t). Gap: async less"
    " sync, paired by seed. Recovered: (async - corrected) / (async - sync) for each seed; a gap whose interval holds 0"
    " is within noise."
)
_EQUAL_DEFINITION = (
    "Last validation loss on the seed of the search, all three at one learning rate: what a correction does where"
    " nothing else is changed. Bold: at the best learning rate of the column."
)
_DELAY_DEFINITION = (
    "Last validation loss (learning rate) and its difference to the same optimizer's sync run, paired by seed: mean, ±"
    " half of its 95 % interval (Student's t). Recovered: what a correction takes back of the gap at the same delay,"
    " and what a shorter delay, corrected or not, takes back of the gap of one update."
)
_START_NOTE = "Of a synchronous start: what it takes back, corrected or not, of the gap of the same delay without it."
_LENGTH_NOTE = (
    "Further updates: how many more the row takes than a sync run to the loss that it ends at. Losses at the ends of"
    " the sync runs of all lengths are joined by straight lines for it, against the logarithm of the length, and these"
    " are prolonged at both ends."
)
_SEVERAL_SYNC_NOTE = "The sync run is the one of the same further settings, where there is one."
DEFINITIONS = {
    "main": _MAIN_DEFINITION,
    "corrections": _MAIN_DEFINITION,
    "equal": _EQUAL_DEFINITION,
    "delays": _DELAY_DEFINITION,
}
"""What the columns of a kind of table mean, whatever it holds."""


class Definitions:
    """What the columns mean, below the first table of a page that has them."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def below(self, kind: str, text: str) -> str:
        """The table, and its definition if the page has not given it yet.

        Args:
            kind: a key of `TABLES`.
            text: that table of an ablation.
        """
        definition = DEFINITIONS.get(kind)
        if not text or definition is None or definition in self._given:
            return text
        self._given.add(definition)
        return f"{text}\n\n{definition}"


def counts(ablation: Ablation) -> str:
    """How many runs, seeds and steps, and how long a run took."""
    runs = ablation.runs
    if not runs:
        return "No training is over yet."
    diverged = sum(run.loss is None for run in runs)
    steps = sorted({run.steps for run in runs if run.loss is not None})
    how_long = f"{'-'.join(str(n) for n in dict.fromkeys((steps[0], steps[-1])))} steps" if steps else "none finished"
    seconds = statistics.median(run.seconds for run in runs)
    seeds = sorted({run.seed for run in runs})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{len(runs)} runs ({diverged} diverged), {which}, {how_long}, median {seconds:.1f} s of training per run."


def _main_line(cells: Cells, group: Group) -> list[str]:
    ablation = cells.ablation
    sync, delayed = (Row(group, *setting, UNCORRECTED) for setting in (ablation.no_delay, ablation.one_update))
    line = [*_group_names(ablation, group), cells.loss(sync), cells.loss(delayed), cells.gap(delayed)]
    for correction in _beside(ablation):
        corrected = Row(group, *ablation.one_update, correction)
        line += [cells.loss(corrected), cells.share(corrected)]
    return line


def _equal_lines(cells: Cells, group: Group, correction: str) -> Iterator[tuple[str, list[str]]]:
    """The corrected training, and its line, at every learning rate that all three have finished at."""
    ablation = cells.ablation
    sync, delayed, corrected = ablation.sync(group), ablation.delayed(group), ablation.delayed(group, correction)
    if sync is None or delayed is None or corrected is None or not sync.searched:
        return
    trainings = {(run.lr, run.loss): run.cell for run in ablation.runs if run.row == corrected.row}
    mark, gap = cells.mark(sync.row, delayed.row, corrected.row), difference(delayed, sync)
    columns = [cells.searched(one.row) if one.searched else {} for one in (sync, delayed, corrected)]
    for lr, third in corrected.search.items():
        first, second = sync.search.get(lr), delayed.search.get(lr)
        if first is None or second is None or third is None:
            continue
        shown = [column.get(lr, cells.number(loss)) for column, loss in zip(columns, (first, second, third))]
        share = _equal_share(gap, first, second, third)
        names = [*_group_names(ablation, group), correction, f"{lr:g}"]
        yield trainings[lr, third], [*names, *shown, share + mark]


def _searched(result: Result | None) -> bool:
    return result is not None and result.searched


def _equal_share(over_seeds: Spread, sync: float, delayed: float, corrected: float) -> str:
    # One seed says nothing of noise: a gap that is none over the seeds is none here.
    verdict = judge(over_seeds)
    if verdict is Verdict.RECOVERED:
        verdict = judge(Spread({0: delayed - sync}), abs(delayed - corrected))
    recovered = verdict is Verdict.RECOVERED
    return f"{per_cent((delayed - corrected) / (delayed - sync))} %" if recovered else verdict.value


def _group_header(ablation: Ablation) -> list[str]:
    momentum, variant = ["momentum"] * ablation.swept_momentum, ["variant"] * ablation.has_variants
    return ["optimizer", *momentum, *variant]


def _group_names(ablation: Ablation, group: Group) -> list[str]:
    momentum = ["" if group.momentum is None else f"{group.momentum:g}"] * ablation.swept_momentum
    return [group.optimizer, *momentum, *[group.variant or ""] * ablation.has_variants]


def _row_names(ablation: Ablation, row: Row) -> list[str]:
    stages = "" if row.stages is None else str(row.stages)
    return [*_group_names(ablation, row.group), row.delay, stages, row.correction]


def _row_order(ablation: Ablation) -> Callable[[Row], tuple[int, list[tuple[bool, int, str]], int, int]]:
    groups, corrections = ablation.groups, [UNCORRECTED, *ablation.corrections]
    return lambda row: (
        groups.index(row.group),
        natural(row.delay),
        row.stages or 0,
        corrections.index(row.correction),
    )


def _beside(ablation: Ablation) -> list[str]:
    """Corrections that have columns in the main table."""
    used = _used(ablation)
    return used if len(used) <= _MOST_BESIDE else []


def _used(ablation: Ablation) -> list[str]:
    """Corrections that the recipe runs at a delay of one update."""
    run = {row.correction for row in ablation.rows if row.setting == ablation.one_update}
    return [name for name in ablation.corrections if name in run]


def _with_notes(table: str, *notes: str) -> str:
    """A table, and below it what the signs mean that it uses, and further notes."""
    marks = [text for mark, text in _NOTES.items() if re.search(rf" {mark}[ )]", table)]
    return "\n\n".join([table, " ".join([*marks, *notes])]).rstrip()


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def missing_list(ablation: Ablation) -> str:
    """Rows with trainings that failed, each named with its log, and rows with trainings still to be run.

    Returns:
        Markdown; empty if nothing is missing.
    """
    members = sorted(ablation.unfinished.values(), key=lambda ones: not any(one.failed for one in ones))
    if not members:
        return ""
    lines = [f"- {ones[0].row.label}: {_count(ones)}" for ones in members[:_MOST_LISTED]]
    if more := members[_MOST_LISTED:]:
        lines.append(f"- {len(more)} more rows: {_count([one for ones in more for one in ones])}")
    logs = _logs([one for one in ablation.open if one.failed])
    return "\n\n".join([_BEGIN, "\n".join(lines), *([logs] if logs else [])])


def _logs(failed: Sequence[Open]) -> str:
    lines = [f"- {one.row.label}, lr {one.lr:g}, seed {one.seed}: `{one.log}`" for one in failed[:_MOST_LISTED]]
    if len(failed) > _MOST_LISTED:
        lines.append(f"- {len(failed) - _MOST_LISTED} more")
    return "What failed, and its log:\n\n" + "\n".join(lines) if lines else ""


def _count(ones: Sequence[Open]) -> str:
    failed, waiting = sum(one.failed for one in ones), sum(one.lr is None for one in ones)
    pending = len(ones) - failed - waiting
    said = [(failed, f"{failed} failed"), (pending, f"{pending} still to be run")]
    texts = [text for count, text in said if count]
    if waiting:
        texts.append("the learning rate of another row is awaited")
    return ", ".join(texts)
