"""The page about idioms, made from their table: ``python -m tests.trainer.idioms.page`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.idioms import Idiom, data, optimization, steps

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "idioms.md"
SECTIONS: dict[str, list[Idiom]] = {
    "Steps and hooks": steps.IDIOMS,
    "Optimization": optimization.IDIOMS,
    "Data, and arguments of the Trainer": data.IDIOMS,
}
TABLE = [idiom for section in SECTIONS.values() for idiom in section]
_INTRODUCTION = """# Idioms of Lightning's documentation under a pipeline

*works*: it trains and logs, bit for bit, what one process does that cuts its batches the same way
(`DelayedGradientStrategy(stages=P, microbatches=m)`). *refused*: on every rank, with what to do instead. *no*: it
breaks [the contract](../concepts/contract.md), often without an error; `check_model` finds what shows in the first
updates. Callbacks have [their own table](callbacks.md).

Made from `tests/trainer/idioms/`, where every row is tested but those with *no*, with three stages in one process and,
where ranks might differ, in three (`pytest tests/trainer/test_idioms.py`); do not edit.
"""


def page() -> str:
    """The text of ``docs/reference/idioms.md``."""
    text = _INTRODUCTION
    for title, idioms in SECTIONS.items():
        rows = "\n".join(f"| {idiom.code} | {idiom.verdict} | {idiom.note} |" for idiom in idioms)
        text += f"\n## {title}\n\n| Idiom | Verdict | Note |\n| --- | --- | --- |\n{rows}\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
