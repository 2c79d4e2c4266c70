"""Table of the results of a run of the scenarios: ``python -m tests.faults.summary REPORT.xml`` prints it.

The report is written by ``pytest -m slow tests/faults -n 2 --dist load --junitxml REPORT.xml``.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from xml.etree import ElementTree

WORDS = {
    "kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP), timeout 10 s", "leave": "process ends without an error",
    "raise": "an exception", "memory": "out of memory", "nan": "NaN in an activation or a gradient",
    "full": "a disk that fails (ENOSPC)", "small": "a small disk", "term": "SIGTERM",
    "cut": "link between two hosts cut, timeout 10 s",
}  # fmt: skip


def main(path: str) -> None:
    """Print a table with one line for each kind of fault."""
    seconds: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    for case in ElementTree.parse(path).iter("testcase"):
        properties = {entry.get("name"): str(entry.get("value")) for entry in case.iter("property")}
        if (what := properties.get("what")) is not None:
            failed[what] += case.find("failure") is not None or case.find("error") is not None
            seconds[what] += [float(properties["seconds"])] if "seconds" in properties else []
    print("| what | scenarios | failed | seconds until all ranks had ended, median (most) |\n| --- | --- | --- | --- |")
    for what, took in seconds.items():
        times = f"{statistics.median(took):.1f} ({max(took):.1f})" if took else ""
        print(f"| {WORDS[what]} | {len(took)} | {failed[what]} | {times} |")
    print(f"\n{sum(map(len, seconds.values()))} scenarios, {sum(failed.values())} failed")


if __name__ == "__main__":
    main(sys.argv[1])
