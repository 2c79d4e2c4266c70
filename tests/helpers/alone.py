"""Scripts that need the pipeline package alone: it is plain torch, and the rest takes seconds to be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import lightning_asyncpp

_BEGIN = """
import sys, types
package = sys.modules["lightning_asyncpp"] = types.ModuleType("lightning_asyncpp")
package.__path__ = [{folder!r}]
"""


def run_script(script: str, *arguments: str, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter of its own."""
    begin = _BEGIN.format(folder=str(Path(str(lightning_asyncpp.__file__)).parent))
    command = [sys.executable, "-c", begin + textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def allocated(function, path):
    """Return (peak, what is left) of the bytes that ``function`` allocated, from the allocator's own events.

    Memory of before is not counted when it is freed meanwhile, as the garbage of other tests is.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    peak, sizes = 0, {}  # the sizes by address
    for event in sorted(events, key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            sizes[address] = size
        else:
            sizes.pop(address, None)
        peak = max(peak, sum(sizes.values()))
    return peak, sum(sizes.values())
