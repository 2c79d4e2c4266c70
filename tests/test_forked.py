"""Programs that are forked run and end as those of an interpreter of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import forked


@pytest.mark.parametrize("how", ["script", "code"])
def test_what_a_program_says_and_how_it_ends(how: str, tmp_path: Path) -> None:
    code = (
        "import atexit, os, sys\n"
        "atexit.register(print, 'at its exit')\n"
        "print(__name__, sys.argv[1:], os.getcwd(), os.environ['MINE'])\n"
        "assert 'lightning' in sys.modules and 'lightning_asyncpp' not in sys.modules\n"
        "raise ArithmeticError('its own mistake')\n"
    )
    (tmp_path / "script.py").write_text(code)
    done = forked.run(how, "script.py" if how == "script" else code, tmp_path, "a", "b", MINE="x")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [f"__main__ ['a', 'b'] {tmp_path} x", "at its exit"]
    assert done.stderr.splitlines()[-1] == "ArithmeticError: its own mistake"
    assert forked.run("code", "raise SystemExit(7)", tmp_path) == (7, "", "")


def test_a_program_that_forgets_to_import_the_package_fails(tmp_path: Path) -> None:
    """As a page of the documents may, whose code is run so."""
    program = "import lightning as L; L.Trainer(strategy='async_pipeline', devices=2, accelerator='cpu')"
    forgets, imports = (forked.run("code", first + program, tmp_path) for first in ("", "import lightning_asyncpp; "))
    assert forgets.returncode == 1
    assert "async_pipeline" in forgets.stderr.splitlines()[-1]
    assert imports.returncode == 0, imports.stderr


def test_one_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    hangs = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    done = forked.run("code", hangs, tmp_path, seconds=1)
    assert done.returncode == -signal.SIGKILL
    started = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(200):
        if not started.exists() or started.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(int(done.stdout), signal.SIGKILL)
        pytest.fail("it goes on")


def test_what_outlives_a_program_is_waited_for(tmp_path: Path) -> None:
    outlived = "import subprocess as s; s.Popen(['sh', '-c', 'sleep 0.3; echo last >&2'])"
    assert forked.run("code", outlived, tmp_path) == (0, "", "last\n")
