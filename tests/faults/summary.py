"""A table of what a run of the scenarios came to: ``python -m tests.faults.summary REPORT.xml``.

The report is that of ``pytest -m slow tests/faults -n 2 --dist load --junitxml REPORT.xml``.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from xml.etree import ElementTree

WORDS = {
    "kill": "killed (SIGKILL)",
    "stop": "stopped (SIGSTOP), timeout 10 s",
    "leave": "process ends without an error",
    "raise": "an exception",
    "memory": "out of memory",
    "nan": "NaN in an activation or a gradient",
    "full": "a disk that fails (ENOSPC)",
    "small": "a small disk",
    "cut": "link between two hosts cut, timeout 10 s",
    "term": "SIGTERM",
}


def main(path: str) -> None:
    """Print a line for each sort of fault."""
    seconds: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    for what, took, passed in scenarios(path):
        failed[what] += not passed
        seconds[what] += [took] if took is not None else []
    print("| what | scenarios | failed | seconds until all ranks had ended, median (most) |\n| --- | --- | --- | --- |")
    for what, words in WORDS.items():
        took = seconds[what]
        if took:
            print(f"| {words} | {len(took)} | {failed[what]} | {statistics.median(took):.1f} ({max(took):.1f}) |")
    print(f"\n{sum(map(len, seconds.values()))} scenarios, {sum(failed.values())} failed")


def scenarios(path: str) -> Iterator[tuple[str, float | None, bool]]:
    """Of each: what happened, how long it took, and whether all was as it should be."""
    for case in ElementTree.parse(path).iter("testcase"):
        properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if (what := properties.get("what")) is not None:
            took = properties.get("seconds")
            passed = case.find("failure") is None and case.find("error") is None
            yield what, None if took is None else float(took), passed


if __name__ == "__main__":
    main(sys.argv[1])
