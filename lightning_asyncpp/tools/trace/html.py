"""A timeline for any browser: one file, which asks no network for anything."""

from __future__ import annotations

import json
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Wait
from lightning_asyncpp.tools.trace.run import RankTrace, RecordedRun
from lightning_asyncpp.tools.trace.summary import Summary
from lightning_asyncpp.tools.trace.table import headline, statements

UNIT = 1e-4
"""Milliseconds that one step of a time in the page is worth."""
# In the order of KINDS in page/model.js.
_KINDS: tuple[Kind | Wait | Beside, ...] = (
    Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Wait.ACTIVATION, Wait.GRADIENT, Wait.AGREEMENT, Wait.DATA, Beside.SEND,
    Beside.REDUCE, Beside.DRAIN, Beside.EVALUATE, Beside.CHECKPOINT,
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_SCRIPTS = ("model.js", "draw.js", "overview.js", "report.js", "main.js")


def write_html(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Write the timeline and the table of a run as one page."""
    path.write_text(page(run, summary), encoding="utf-8")


def page(run: RecordedRun, summary: Summary) -> str:
    """The page: markup, style, script and data in one document."""
    script = "\n".join(_part(name) for name in _SCRIPTS)
    data = json.dumps(page_data(run, summary), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = _part("page.html")
    title = f"asyncpp trace: {run.meta.num_stages} stages" + (
        f" x {run.meta.num_replicas} replicas" if run.meta.num_replicas > 1 else ""
    )
    parts = {"title": escape(title), "style": _part("style.css"), "data": data, "script": script}
    # In one go: what is put in may hold such a mark itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], text)


def page_data(run: RecordedRun, summary: Summary) -> dict[str, Any]:
    """What the page shows, in columns; times count from the start of the time that is looked at."""
    rows = {row.name: row for row in summary.rows}
    return {
        "unit": UNIT,
        "seconds": run.seconds,
        "facts": headline(run, summary),
        "lanes": [_lane(run, rank) | {"utilisation": rows[rank.name].utilisation} for rank in run.ranks],
        "summary": summary.as_json(),
        "statements": statements(run, summary),
    }


def _lane(run: RecordedRun, rank: RankTrace) -> dict[str, Any]:
    """A rank's spans; starts are differences, which are short."""
    starts = [round((span.start - run.start) * 1e3 / UNIT) for span in rank.spans]
    ends = [round((span.end - run.start) * 1e3 / UNIT) for span in rank.spans]
    return {
        "name": rank.name,
        "replica": rank.meta.replica,
        "starts": [now - before for before, now in zip([0, *starts], starts)],
        "lengths": [end - start for start, end in zip(starts, ends)],
        "kinds": [_CODES[span.kind] for span in rank.spans],
        "indices": [span.index for span in rank.spans],
        "batches": [rank.mini_batch(span) for span in rank.spans],
        "versions": [span.version for span in rank.spans],
        "bytes": [span.num_bytes for span in rank.spans],
    }


def _part(name: str) -> str:
    return resources.files("lightning_asyncpp.tools.trace").joinpath("page").joinpath(name).read_text(encoding="utf-8")
