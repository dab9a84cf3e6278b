"""The table of claims says what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks import claims

RECORDS = claims.found(claims.RESULTS)


def test_page_has_the_figures_of_the_records() -> None:
    made = claims.page(RECORDS, where="../benchmarks/results")
    assert claims.PAGE.read_text() == made, "python -m benchmarks --table"


def test_readme_has_the_headlines_of_the_records() -> None:
    text = claims.README.read_text()
    assert claims.readme(text, RECORDS) == text, "python -m benchmarks --table"
    with pytest.raises(ValueError, match="figures"):
        claims.readme("no marks", RECORDS)


def test_every_record_and_every_benchmark_makes_a_claim() -> None:
    assert all(list(claims.CLAIMS[name](record)) for name, record in RECORDS.items())
    assert {name for name, _ in every.found(None)} <= claims.CLAIMS.keys()


def test_each_row_of_the_page_is_of_a_record_that_is_there() -> None:
    rows = [line for line in claims.PAGE.read_text().splitlines() if "](" in line]
    assert len(rows) == sum(len(list(claims.CLAIMS[name](record))) for name, record in RECORDS.items())
    for row in rows:
        named = re.search(r"\[(\w+)\]\(\.\./benchmarks/results/(\w+)\.json\), [0-9a-f]{7}\+? \|$", row)
        assert named is not None, row
        assert named[1] == named[2]
        assert named[1] in RECORDS


@pytest.mark.parametrize(
    ("claim", "row"),
    [
        (claims.Claim("times", 2.0, "ms", 50.0, "theirs"), ["times", "2.00 ms", "50.0 ms (theirs)", "25.0 x"]),
        (claims.Claim("worse", 4.0, "GB/s", 8.0, "copy", True), ["worse", "4.00 GB/s", "8.00 GB/s (copy)", "0.500 x"]),
        (claims.Claim("balance", 0.9991, "", 0.9925, "x", True), ["balance", "0.9991", "0.9925 (x)", "1.01 x"]),
        (claims.Claim("none needed", 0, "", 63.34, "x"), ["none needed", "0", "63.3 (x)", ""]),
        (claims.Claim("alone", 12345), ["alone", "12,345", "", ""]),
    ],
)
def test_ratio_is_how_many_times_better_ours_is(claim: claims.Claim, row: list[str]) -> None:
    assert claim.row == row


def test_a_run_ends_with_the_table_of_its_own_records(tmp_path: Path) -> None:
    """The records of a folder, whatever ran there; a name that makes no claim is left out."""
    for name in ("placement", "moving_gpu"):
        (tmp_path / f"{name}.json").write_text((claims.RESULTS / f"{name}.json").read_text())
    (tmp_path / "unknown.json").write_text('{"environment": {}}')
    made = claims.page(claims.found(tmp_path), where=".")
    assert "[placement](./placement.json), " in made
    assert "[moving_gpu](./moving_gpu.json), " in made
    assert "NVIDIA H200." in made
    assert "unknown" not in made
