"""Answer requests for help before torch and Lightning are imported, which takes seconds.

The package imports this module first. In a process that runs the ``asyncpp`` command, the module answers a request for
help and ends the process; without such a request it prints which subcommand starts. In other processes it does nothing.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

if sys.argv and PurePath(sys.argv[0]).name in ("asyncpp", "asyncpp.exe"):  # not a user's asyncpp.py
    from lightning_asyncpp.cli import announce, answer_help

    answer_help(sys.argv[1:])
    announce(sys.argv[1:])
