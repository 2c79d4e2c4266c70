"""The notebook among the examples, run by a kernel as somebody's own would be."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_notebook_is_valid_and_holds_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            compile(cell.source, cell.id, "exec")
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    (use,) = [cell for cell in notebook.cells if cell.id == "use"]
    (output,) = use.outputs
    name, _, accuracy = output.text.partition(": ")
    assert name == "accuracy on new points"
    assert float(accuracy) > 0.85
