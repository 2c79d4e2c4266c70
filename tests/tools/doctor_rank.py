"""Stands for a rank of ``asyncpp doctor``'s small trainings: the case says what it does."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time

job = json.loads(sys.argv[1])
if job["cases"] == ["raises"]:
    if os.environ["RANK"] == "1":
        raise ValueError("the first cause")
    time.sleep(600)
faulthandler.dump_traceback_later(0.5, exit=False)


def wait_for_a_message_that_never_comes() -> None:
    time.sleep(600)


wait_for_a_message_that_never_comes()
