"""The guide's links lead to the lines that they name.

`python tests/test_guide.py` points them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
LINK = re.compile(r"\[`([^`]+)`\]\(((?:\.\./benchmarks/engine|examples)/\w+\.py)#L(\d+)\)")


def pointed(text: str) -> str:
    """The page with each link on the nearest line that holds the code it shows."""

    def point(found: re.Match[str]) -> str:
        code, path, line = found[1], found[2], int(found[3])
        lines = (GUIDE.parent / path).read_text().splitlines()
        places = [number for number, text in enumerate(lines, start=1) if code in text]
        assert places, f"{path} does not have {code!r} any more"
        return f"[`{code}`]({path}#L{min(places, key=lambda place: abs(place - line))})"

    return LINK.sub(point, text)


def test_links_of_the_guide_lead_to_the_lines_they_name() -> None:
    page = GUIDE.read_text()
    assert len(LINK.findall(page)) > 20
    assert pointed(page) == page, "run python tests/test_guide.py"


if __name__ == "__main__":
    GUIDE.write_text(pointed(GUIDE.read_text()))
