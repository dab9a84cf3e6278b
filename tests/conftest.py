"""Where torch is not installed, files of tests that import it are left out, and the head of the report says so.

No example of Hypothesis has a deadline: on a busy machine any of them may take long.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("EPLB_CORE_QUIET", "1")  # what commands say does not depend on what is compiled
settings.register_profile("eplb", deadline=None)
settings.load_profile("eplb")

_HERE = Path(__file__).parent
_NEEDS_TORCH = re.compile(r"^(import|from) (torch|tests\.adapters\.vllm\.fakes)\b", re.M)

collect_ignore: list[str] = []
if importlib.util.find_spec("torch") is None:
    for file in sorted(_HERE.rglob("*.py")):
        if _NEEDS_TORCH.search(file.read_text()):
            # A folder whose fixtures work on tensors is left out whole.
            collect_ignore.append(str(file.parent if file.name == "conftest.py" else file))


def pytest_report_header() -> list[str]:
    """What is left out."""
    names = ", ".join(str(Path(path).relative_to(_HERE)) for path in collect_ignore)
    return [f"torch is not installed; left out: {names}"] if names else []


@pytest.fixture
def own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are told of nobody but what the test makes."""
    from eplb_core import exposition

    for name, value in (("_sources", []), ("_finished", {}), ("_rank", [None]), ("_errors", [0]), ("_logged", set())):
        monkeypatch.setattr(exposition, name, value)
