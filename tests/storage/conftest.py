"""What the tests of checkpoints on disk share."""

from __future__ import annotations

import subprocess

import pytest

from tests.storage import faults


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the library that lets system calls fail."""
    if reason := faults.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("faults")
    try:
        library = faults.build(folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"what traps system calls cannot be compiled here: {error.stderr.decode().strip()[-300:]}")
    ended = faults.run(faults.Fault(library, str(folder)), nothing)
    if ended.code != 0:
        pytest.skip(f"system calls cannot be trapped here (seccomp): {ended.raised.splitlines()[:1]}")
    return library


def nothing() -> None:
    """Tells whether a process with trapped calls gets anywhere."""
