"""Runs a module that may hang, as ``python -m`` does: ``python -m ...doctor.traced SECONDS MODULE ARGUMENTS``.

After so many seconds it prints where each of its threads is.
"""

from __future__ import annotations

import faulthandler
import runpy
import sys

if __name__ == "__main__":
    _, seconds, module, *arguments = sys.argv
    faulthandler.dump_traceback_later(float(seconds), exit=False)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
