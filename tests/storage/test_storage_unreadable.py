"""What cannot be read is refused in one line that says why: folders, other users' files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_asyncpp.cli import main
from lightning_asyncpp.models import WeightsError, open_saved
from lightning_asyncpp.storage import StorageError, load

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its devices have other names"),
]
NOBODY = 65534


def folder_as_index(folder: Path) -> str:
    (folder / "x.ckpt" / "index.json").mkdir(parents=True)
    return str(folder / "x.ckpt")


def of_nobody(folder: Path) -> str:
    file = folder / "mine.ckpt"
    torch.save({"state_dict": {}}, file)
    file.chmod(0)
    return str(file)


def in_a_folder_of_nobody(folder: Path) -> str:
    (folder / "mine").mkdir()
    torch.save({"state_dict": {}}, folder / "mine" / "x.ckpt")
    (folder / "mine").chmod(0)
    return str(folder / "mine" / "x.ckpt")


def always(path: str) -> Callable[[Path], str]:
    return lambda folder: path


CASES: dict[str, tuple[Callable[[Path], str], str]] = {
    "folder as index": (folder_as_index, "is a folder without index.json"),
    "missing": (always("/nowhere/x.ckpt"), "there is no checkpoint"),
    "mine": (of_nobody, r"cannot be read \(Permission denied\)"),
    "in mine": (in_a_folder_of_nobody, r"cannot be read \(Permission denied\)"),
}


def apart(case: str, action: Callable[[], None]) -> int:
    """Do something in another process, without rights if files are somebody's; its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0 and case.endswith("mine"):
                os.setuid(NOBODY)
            action()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print("Traceback", repr(error))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        made.chmod(0o755)
        yield made
        for path in made.iterdir():
            path.chmod(0o755)


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_why(folder: Path, case: str) -> None:
    make, why = CASES[case]
    path = Path(make(folder))

    def read() -> None:
        with pytest.raises(StorageError, match=why):
            load(path)

    assert apart(case, read) == 0


@pytest.mark.parametrize("case", CASES)
def test_commands_end_with_one_line(folder: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    path = CASES[case][0](folder)
    convert = ["convert", path, str(folder / "out.safetensors"), "--to", "weights"]
    for arguments in (["info", path], convert):
        assert apart(case, lambda told=arguments: main(["checkpoint", *told])) in (1, 2)  # type: ignore[misc]
        captured = capfd.readouterr()
        said = (captured.out + captured.err).strip()
        assert "Traceback" not in said
        assert len(said.splitlines()) == 1


def test_a_model_is_not_taken_from_it(folder: Path) -> None:
    make, why = CASES["mine"]
    path = make(folder)

    def read() -> None:
        with pytest.raises(WeightsError, match=why):
            open_saved(path)

    assert apart("mine", read) == 0
