"""What is missing of an ablation, as a list for the top of its page."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.tools.ablation.grid import Open
from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.report.table_cells import UNFINISHED

_BEGIN = (
    f"Not all trainings of the recipe have a result; what depends on one that is missing is marked {UNFINISHED}. The"
    " further seeds of a row count once its search is over."
)
_MOST_LISTED = 20  # rows, and failed trainings, that are named one by one


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
