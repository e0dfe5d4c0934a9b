"""examples/notebook.ipynb runs in a Jupyter kernel, with two workers."""

import os
import re
from pathlib import Path

import pytest

from tests.patience import PATIENCE

INSTALL_HINT = "a Jupyter kernel is missing: pip install -e .[test], as tests/run.sh does"
nbclient = pytest.importorskip("nbclient", reason=INSTALL_HINT)
nbformat = pytest.importorskip("nbformat", reason=INSTALL_HINT)
pytest.importorskip("ipykernel", reason=INSTALL_HINT)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def cells():
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    return book, {cell.id: cell for cell in book.cells}


def printed(cell):
    """Text of a cell's output, which a kernel may split."""
    assert {o.output_type for o in cell.outputs} == {"stream"}
    return "".join(o.text for o in cell.outputs if o.name == "stdout")


def test_notebook_has_no_outputs():
    book, _ = cells()
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(code) >= 4
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_notebook_trains(tmp_path, monkeypatch):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    book, by_id = cells()
    client = nbclient.NotebookClient(
        book,
        timeout=PATIENCE * 120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    text = printed(by_id["launch"])
    assert re.findall(r"Epoch (\d)/5", text) == list("12345")
    accuracy = float(re.search(r"accuracy ([\d.]+)", text)[1])
    assert accuracy > 0.9
    assert float(re.search(r"compression (\d+)x", text)[1]) > 100
    right = float(re.match(r"[\d.]+", printed(by_id["model"]))[0])
    assert abs(right - accuracy) < 0.002  # rounded
