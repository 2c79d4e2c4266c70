"""The tables of an ablation as Markdown: without delay against delayed and corrected, other delays, the lr search.

Pure functions of an :class:`~lightning_asyncpp.tools.ablation.summary.Ablation`; the text depends on nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from lightning_asyncpp.tools.ablation.summary import (
    UNCORRECTED,
    Ablation,
    Group,
    Result,
    Row,
    Spread,
    Verdict,
    difference,
    judge,
    share_recovered,
)

NOT_RUN = "not run yet"
_MOST_BESIDE = 2  # corrections that the main table has columns for
EDGE, ONE_LR = "†", "‡"
_NOTES = {
    EDGE: f"{EDGE} edge of the search: the best learning rate is the lowest or the highest one tried.",
    ONE_LR: f"{ONE_LR} a single learning rate was run: not searched for.",
}


def page(ablation: Ablation, plots: Sequence[str]) -> str:
    """The whole report: a heading, every table that has rows, and the plots.

    Args:
        ablation: what to report.
        plots: file names of the plots, relative to the page.
    """
    name = ablation.runs[0].table if ablation.runs else "no runs yet"
    parts = [f"# Ablation: {_escape(name)}"]
    parts += [f"## {TITLES[key]}\n\n{text}" for key in TABLES if (text := TABLES[key](ablation))]
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots))
    return "\n\n".join(parts) + "\n"


def main_table(ablation: Ablation) -> str:
    """Loss without delay, with a delay of one update, and with each correction; empty if neither was run."""
    shown = [g for g in ablation.groups if any(r.group == g and r.kind in ("0", "1") for r in ablation.results)]
    if not shown:
        return ""
    header = [*_group_header(ablation), "sync", "async", "gap"]
    for correction in _beside(ablation):
        header += [f"async + {correction}", f"{correction} recovers"]
    lines = [_main_line(ablation, group) for group in shown]
    return _with_notes(_markdown(header, lines), ablation, _MAIN_NOTE)


def correction_table(ablation: Ablation) -> str:
    """A line per correction at a delay of one update; empty where they fit beside the losses of the main table."""
    if len(_used(ablation)) <= _MOST_BESIDE:
        return ""
    header = [*_group_header(ablation), "correction", "loss", "gap to sync", "recovers"]
    lines = [
        _correction_line(ablation, group, correction)
        for group in ablation.groups
        for correction in [UNCORRECTED, *_used(ablation)]
        if ablation.constant(group, "1", correction) is not None
    ]
    return _with_notes(_markdown(header, lines), ablation, _MAIN_NOTE)


def equal_table(ablation: Ablation) -> str:
    """All three at the learning rate of the corrected run, on the search seed; empty where that was never tried."""
    lines = [
        line
        for group in ablation.groups
        for correction in _used(ablation)
        if (line := _equal_line(ablation, group, correction))
    ]
    header = [*_group_header(ablation), "correction", "lr", "sync", "async", "corrected", "recovers"]
    return f"{_markdown(header, lines)}\n\n{_EQUAL_NOTE}" if lines else ""


def delay_table(ablation: Ablation) -> str:
    """Loss and gap under every other delay, the delay of one update above them; empty if there is no other."""
    constant = {ablation.setting("0"), ablation.setting("1")}
    other = [row for row in ablation.results if (row.delay, row.stages) not in constant]
    if not other:
        return ""
    one_update = ablation.setting("1")
    compared = {row.group for row in other}
    reference = [r for r in ablation.results if (r.delay, r.stages) == one_update and r.group in compared]
    rows = sorted([*reference, *other], key=_row_order(ablation))
    header = [*_group_header(ablation), "delay", "stages", "correction", "loss", "gap to sync", "recovers"]
    lines = [_delay_line(ablation, row) for row in rows]
    return _with_notes(_markdown(header, lines), ablation, _DELAY_NOTE)


def search_table(ablation: Ablation) -> str:
    """Loss of every learning rate on the search seed, a table per optimizer, the chosen one in bold."""
    parts = []
    for optimizer in dict.fromkeys(group.optimizer for group in ablation.groups):
        rows = sorted((r for r in ablation.results if r.group.optimizer == optimizer), key=_row_order(ablation))
        lrs = sorted({lr for row in rows for lr in ablation.results[row].search})
        header = [*_group_header(ablation), "delay", "stages", "correction", *(f"lr {lr:g}" for lr in lrs)]
        lines = [_row_names(ablation, row) + _search_cells(ablation.results[row], lrs) for row in rows]
        parts.append(_markdown(header, lines))
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
_MAIN_NOTE = (
    "Last validation loss (learning rate), mean ± sample standard deviation over seeds. Gap: async less sync, paired by"
    " seed. Recovered: (async - corrected) / (async - sync) for each seed; a gap smaller than twice its standard"
    " deviation is within noise."
)
_EQUAL_NOTE = (
    "Last validation loss on the seed of the search, all three at the learning rate of the corrected run: what a"
    " correction does where nothing else is changed."
)
_DELAY_NOTE = (
    "Last validation loss (learning rate) and its difference to the same optimizer's sync run, paired by seed: mean ±"
    " sample standard deviation over seeds. Recovered: what a correction takes back of the gap at the same delay, and"
    " what a fresh last stage, corrected or not, takes back of the gap of one update."
)


def loss_cell(result: Result | None, seeds: int) -> str:
    """Loss and learning rate of a row, its diverged seeds named.

    Args:
        result: None if it was not run yet.
        seeds: how many seeds the whole ablation has; a row with fewer says so.
    """
    if result is None:
        return NOT_RUN
    if result.lr is None:
        return f"diverged at all {len(result.search)} lrs"
    mark = f" {EDGE}" if result.at_edge else "" if result.searched else f" {ONE_LR}"
    lr, loss, total = f"({result.lr:g}{mark})", result.loss, len(result.runs)
    few = f", {_seeds(total)}" if total < seeds else ""
    if not loss.values:
        return f"{loss.diverged} of {total} diverged {lr}"
    if loss.diverged:
        return f"{loss.diverged} of {total} diverged, else {_spread(loss)} {lr}"
    return f"{_spread(loss)} {lr}{few}"


def gap_cell(result: Result | None, sync: Result | None) -> str:
    """Difference to the run without delay, paired by seed."""
    if result is None or sync is None:
        return NOT_RUN
    gap = difference(result, sync)
    if gap.mean is None:
        return judge(gap).value
    few = f", {gap.diverged} of {gap.diverged + len(gap.values)} diverged" if gap.diverged else ""
    return _spread(gap, "+.3f") + few


def share_cell(sync: Result | None, delayed: Result | None, corrected: Result | None) -> str:
    """Share of the gap that a correction recovers, in per cent, or why there is none."""
    if sync is None or delayed is None or corrected is None:
        return NOT_RUN
    share = share_recovered(sync, delayed, corrected)
    if share.verdict is not Verdict.RECOVERED or share.spread.mean is None:
        return share.verdict.value
    few = f", {share.spread.diverged} diverged" if share.spread.diverged else ""
    std = "" if share.spread.std is None else f" ± {_per_cent(share.spread.std)}"
    return f"{_per_cent(share.spread.mean)}{std} %{few}"


def counts(ablation: Ablation) -> str:
    """How many runs, seeds and steps, and how long a run took."""
    runs = ablation.runs
    diverged = sum(run.loss is None for run in runs)
    steps = sorted({run.steps for run in runs if run.loss is not None})
    how_long = f"{'-'.join(str(n) for n in dict.fromkeys((steps[0], steps[-1])))} steps" if steps else "none finished"
    seconds = statistics.median(run.seconds for run in runs)
    seeds = sorted({run.seed for run in runs})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{len(runs)} runs ({diverged} diverged), {which}, {how_long}, median {seconds:.1f} s of training per run."


def _main_line(ablation: Ablation, group: Group) -> list[str]:
    seeds = _seed_count(ablation)
    sync, delayed = ablation.sync(group), ablation.constant(group, "1", UNCORRECTED)
    cells = [loss_cell(sync, seeds), loss_cell(delayed, seeds), gap_cell(delayed, sync)]
    for correction in _beside(ablation):
        corrected = ablation.constant(group, "1", correction)
        cells += [loss_cell(corrected, seeds), share_cell(sync, delayed, corrected)]
    return _group_names(ablation, group) + cells


def _correction_line(ablation: Ablation, group: Group, correction: str) -> list[str]:
    sync, delayed = ablation.sync(group), ablation.constant(group, "1", UNCORRECTED)
    result = ablation.constant(group, "1", correction)
    share = "" if correction == UNCORRECTED else share_cell(sync, delayed, result)
    cells = [loss_cell(result, _seed_count(ablation)), gap_cell(result, sync), share]
    return [*_group_names(ablation, group), correction, *cells]


def _equal_line(ablation: Ablation, group: Group, correction: str) -> list[str] | None:
    sync, delayed = ablation.sync(group), ablation.constant(group, "1", UNCORRECTED)
    corrected = ablation.constant(group, "1", correction)
    if sync is None or delayed is None or corrected is None or corrected.lr is None:
        return None
    first, second, third = (result.search.get(corrected.lr) for result in (sync, delayed, corrected))
    if first is None or second is None or third is None or not sync.searched:
        return None
    share = f"{_per_cent((second - third) / (second - first))} %" if second > first else Verdict.NO_GAP.value
    shown = [f"{loss:.3f}" for loss in (first, second, third)]
    return [*_group_names(ablation, group), correction, f"{corrected.lr:g}", *shown, share]


def _delay_line(ablation: Ablation, row: Row) -> list[str]:
    result = ablation.results[row]
    sync, delayed = ablation.sync(row.group), _recovered_from(ablation, row)
    share = "" if delayed == row else share_cell(sync, ablation.results.get(delayed), result)
    cells = [loss_cell(result, _seed_count(ablation)), gap_cell(result, sync), share]
    return _row_names(ablation, row) + cells


def _recovered_from(ablation: Ablation, row: Row) -> Row:
    """The delayed row whose gap this one takes something back of; itself if it is uncorrected."""
    delay, stages = ablation.setting("1") if row.kind == "fresh_last_stage" else (row.delay, row.stages)
    return Row(row.group, delay, stages, UNCORRECTED)


def _search_cells(result: Result, lrs: Sequence[float]) -> list[str]:
    cells = []
    for lr in lrs:
        loss = result.search.get(lr)
        text = "" if lr not in result.search else "diverged" if loss is None else f"{loss:.3f}"
        cells.append(f"**{text}**" if lr == result.lr else text)
    return cells


def _group_header(ablation: Ablation) -> list[str]:
    return ["optimizer", "momentum"] if ablation.swept_momentum else ["optimizer"]


def _group_names(ablation: Ablation, group: Group) -> list[str]:
    momentum = "" if group.momentum is None else f"{group.momentum:g}"
    return [group.optimizer, momentum] if ablation.swept_momentum else [group.optimizer]


def _row_names(ablation: Ablation, row: Row) -> list[str]:
    stages = "" if row.stages is None else str(row.stages)
    return [*_group_names(ablation, row.group), row.delay, stages, row.correction]


def _row_order(ablation: Ablation) -> Callable[[Row], tuple[int, bool, str, int, int]]:
    groups, corrections = ablation.groups, [UNCORRECTED, *ablation.corrections]
    return lambda row: (
        groups.index(row.group),
        not row.kind.isdigit(),
        row.delay,
        row.stages or 0,
        corrections.index(row.correction),
    )


def _beside(ablation: Ablation) -> list[str]:
    """Corrections that have columns in the main table."""
    used = _used(ablation)
    return used if len(used) <= _MOST_BESIDE else []


def _used(ablation: Ablation) -> list[str]:
    """Corrections that were run at a delay of one update."""
    run = {row.correction for row in ablation.results if row.kind == "1"}
    return [name for name in ablation.corrections if name in run]


def _with_notes(table: str, ablation: Ablation, note: str) -> str:
    marks = [_NOTES[mark] for mark in (EDGE, ONE_LR) if f" {mark})" in table]
    return "\n\n".join([table, " ".join([note, *marks, counts(ablation)])])


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows)


def _spread(spread: Spread, form: str = ".3f") -> str:
    std = "" if spread.std is None else f" ± {spread.std:.3f}"
    return f"{spread.mean:{form}}{std}"


def _per_cent(share: float) -> int:
    return round(100 * share)  # as a whole number it has no -0


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _seed_count(ablation: Ablation) -> int:
    return len({run.seed for run in ablation.runs})


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
