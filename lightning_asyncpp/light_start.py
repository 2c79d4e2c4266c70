"""Print help of the ``asyncpp`` command without the seconds that importing torch and Lightning takes.

The package imports this module first. In the process of the command it ends the process where help is all that was
asked for, and otherwise prints what is about to start; in any other process it does nothing.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

if sys.argv and PurePath(sys.argv[0]).name in ("asyncpp", "asyncpp.exe"):  # and not a user's asyncpp.py
    from lightning_asyncpp.cli import announce, answer_help

    answer_help(sys.argv[1:])
    announce(sys.argv[1:])
