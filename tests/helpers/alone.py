"""Scripts that need the pipeline package alone: it is plain torch, and the rest takes seconds to be imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

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
