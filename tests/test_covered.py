"""The page of what is tested where is whole and up to date."""

from __future__ import annotations

import re

from tests import covered

RULES_IN_FULL = (covered.PAGE.parent / "architecture.md").read_text().partition("\n## Rules that always hold\n")[2]
RULES_IN_FULL = RULES_IN_FULL.partition("\n## ")[0]


def test_every_fault_and_requirement_is_named_by_a_test() -> None:
    ids = [key for section in covered.FAULTS.values() for key in section]
    ids += [f"R{key}" for section in covered.REQUIREMENTS.values() for key in section]
    found = covered.named()
    assert [one for one in ids if one not in found] == []


def test_the_page_is_up_to_date() -> None:
    assert covered.PAGE.read_text() == covered.page(), "run python tests/covered.py"


def test_ranges_and_lists_of_ids_are_read() -> None:
    assert list(covered.ids_of("FAULTS A1, B2-B4 and R7: why")) == ["A1", "B2", "B3", "B4", "R7"]


def test_what_is_left_out_of_the_count_is_named_with_a_reason() -> None:
    assert sorted(covered.settings()) == sorted(covered.LEFT_OUT)
    assert [line for line, reason in covered.left_out().items() if not reason] == []


def test_every_rule_has_changes_that_break_it() -> None:
    """That the tests then fail is what `make mutants` shows."""
    assert sorted(covered.breaking()) == sorted(covered.RULES)
    rules = re.findall(r"^(\d+)\. ", RULES_IN_FULL, re.M)
    assert [int(rule) for rule in rules] == list(covered.RULES)
