"""The code of README, of the pages under docs/start and of the notebook runs unchanged.

The Python blocks of a page form scripts. Each block that trains or checks ends a script, and so does the last block.
A script begins with all earlier blocks that do not train, without their calls of ``check_model``.
These Markdown comments, which readers do not see, are markers:

    <!-- run first: CODE -->        code that the page leaves out, before its first block
    <!-- not run: REASON -->        above a block that is not run

Blocks with a ``title`` are files; Python files are part of the scripts, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import programs as forked
from tests.helpers.pool import elastic_environment, free_port

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
PAGES = [ROOT / "README.md", *sorted(START.glob("*.md"))]
BLOCK = re.compile(r"(?ms)^(<!-- not run: .+? -->\n+)?^```(python|yaml)(?: title=\"(.+?)\")?\n(.*?)^```$")


def scripts(text: str) -> list[str]:
    """Return the scripts of a page, as described at the top of this module."""
    ready = "".join(re.findall(r"(?s)<!-- run first:\n(.*?)-->", text))
    made: list[str] = []
    costs = False
    for not_run, language, _, code in BLOCK.findall(text):
        if not_run or language == "yaml":
            continue
        costs = ".fit(" in code or "check_model(" in code
        if costs:
            made.append(ready + code)
        if ".fit(" not in code:
            ready += re.sub(r"(?m)^print\(.*check_model\(.*\n", "", code)
    return made if costs else [*made, ready]


SCRIPTS = [
    pytest.param(script, id=f"{page.name}-{number}")
    for page in PAGES
    for number, script in enumerate(scripts(page.read_text(encoding="utf-8")))
    if script
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_blocks_of_a_page_run(script: str, tmp_path: Path) -> None:
    """Each script runs in as many processes as it asks for, with the environment of ``torchrun``."""
    assert "import lightning_asyncpp" in script, "which gives the strategies their names"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    ranks = 2 if "devices=2" in script else 1
    port = free_port()
    environments = [elastic_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    for done in forked.run_ranks(("script.py",), tmp_path, environments, seconds=280):
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_recipe_of_the_page_trains(tmp_path: Path) -> None:
    blocks = BLOCK.findall((START / "your-model.md").read_text(encoding="utf-8"))
    files = {title: code for _, _, title, code in blocks if title}
    assert files.keys() == {"my_model.py", "my_recipe.yaml"}
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "lightning_asyncpp", "fit", "my_recipe.yaml", "--trainer.max_steps=4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "`max_steps=4` reached" in done.stdout + done.stderr


def test_the_notebook_is_valid_and_holds_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [compile(cell.source, cell.id, "exec") for cell in cells]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path) -> None:
    """A Jupyter kernel runs the notebook, as it would for a user."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    (use,) = [cell for cell in notebook.cells if cell.id == "use"]
    name, _, accuracy = use.outputs[0].text.partition(": ")
    assert name == "accuracy on new points"
    assert float(accuracy) > 0.85
