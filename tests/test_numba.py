"""What the disk cache of kernels looks at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import eplb_core
from eplb_core._numba import _imported, _stamp

ROOT = Path(eplb_core.__file__).parent
WITH_KERNELS = [file for file in sorted(ROOT.rglob("*.py")) if "_numba import" in file.read_text("utf-8")]


@pytest.mark.parametrize("file", WITH_KERNELS, ids=lambda file: file.stem)
def test_every_import_of_a_file_with_kernels_is_a_module_that_the_stamp_finds(file: Path) -> None:
    imports = set(re.findall(r"^ *(?:from|import) (eplb_core[\w.]*)", file.read_text("utf-8"), re.MULTILINE))
    assert len(set(_imported(file))) == len(imports)


def test_the_stamp_reaches_what_is_imported_through_another_file() -> None:
    names = {name for name, *_ in _stamp(ROOT / "placement" / "_solve.py")}
    assert {"_solve.py", "_refine.py", "_kernels.py", "_numba.py"} <= names
    assert "simulation.py" not in names
