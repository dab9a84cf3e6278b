"""The page of what is tested where is whole and up to date."""

from __future__ import annotations

from tests import covered


def test_every_fault_and_requirement_is_named_by_a_test() -> None:
    ids = [key for section in covered.FAULTS.values() for key in section]
    ids += [f"R{key}" for section in covered.REQUIREMENTS.values() for key in section]
    found = covered.named()
    assert [one for one in ids if one not in found] == []


def test_the_page_is_up_to_date() -> None:
    assert covered.PAGE.read_text() == covered.page(), "run python tests/covered.py"


def test_ranges_and_lists_of_ids_are_read() -> None:
    assert list(covered.ids_of("FAULTS A1, B2-B4 and R7: why")) == ["A1", "B2", "B3", "B4", "R7"]
