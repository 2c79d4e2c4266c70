"""The wheel has the package and the recipes, and trains the quickstart; a missing package of an extra is named."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

from lightning_asyncpp import __version__
from lightning_asyncpp.dependencies import EXTRAS, optional_package

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def content(wheel: Path) -> dict[str, bytes]:
    """Return the content of all files in the wheel, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def about(content: dict[str, bytes]) -> Message:
    return email.message_from_bytes(content[f"lightning_asyncpp-{__version__}.dist-info/METADATA"])


def test_the_wheel_has_the_files_of_the_package(content: dict[str, bytes]) -> None:
    """The wheel has the package's files and the recipes, unchanged, and nothing else."""
    package = [path for path in (ROOT / "lightning_asyncpp").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)): path for path in package}
    expected |= {f"lightning_asyncpp/{path.relative_to(ROOT)}": path for path in (ROOT / "recipes").rglob("*.yaml")}
    assert "lightning_asyncpp/py.typed" in expected
    assert {name for name in content if ".dist-info/" not in name} == expected.keys()
    assert all(content[name] == path.read_bytes() for name, path in expected.items())


def test_the_promised_versions_of_python_are_those_of_ci(about: Message) -> None:
    classifiers = about.get_all("Classifier", [])
    promised = [text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)]
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert ci["jobs"]["tests"]["strategy"]["matrix"]["python-version"] == promised
    assert about["Requires-Python"] == f">={promised[0]}"
    assert (about["Version"], about["License-Expression"]) == (__version__, "Apache-2.0")


def test_links_of_the_readme_lead_somewhere_on_pypi_too(about: Message) -> None:
    """PyPI shows README.md without the repository, so links are URLs or lead to headings."""
    links = [target or other for target, other in LINK.findall(str(about.get_payload()))]
    assert links
    assert not [link for link in links if not link.startswith(("https://", "#"))]


@pytest.mark.slow
def test_the_installed_wheel_trains_the_quickstart_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The wheel is installed without its dependencies, and uses those of this test's environment."""
    place, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}

    def asyncpp(*arguments: str) -> str:
        command = ["timeout", "-k", "10", "280", str(place / "bin" / "asyncpp"), *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    where = [sys.executable, "-c", "import lightning_asyncpp; print(lightning_asyncpp.__file__)"]
    assert str(place) in subprocess.check_output(where, cwd=empty, env=environment, text=True)
    assert asyncpp("--version").startswith(f"asyncpp {__version__} (torch ")
    assert "\nquickstart " in asyncpp("recipes")
    trainer = {"max_steps": 4, "val_check_interval": 4, "limit_val_batches": 2}
    options = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    data = [f"--data.init_args.cache_dir={tmp_path / 'cache'}", "--data.init_args.max_bytes=400000"]
    assert "Done. Checkpoint: runs/quickstart/version_0/" in asyncpp("fit", "--config", "quickstart", *options, *data)


def test_a_missing_package_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'^lora needs `peft`, not .*: pip install "lightning-asyncpp\[lora\]"$'):
        optional_package("peft", "lora")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package, extra in EXTRAS.items():
        (brings,) = re.findall(rf"(?m)^{extra} = (\[.*\])$", text)
        assert f'"{package}>=' in brings
