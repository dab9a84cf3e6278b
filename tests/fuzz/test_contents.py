"""Arrays of every kind, cut, cast, turned, joined, misnamed: what is no load is not taken for one without a doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import contents

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
# Equal totals in every window, and nothing in the numbers that says what they were.
UNKNOWABLE = ("windows and layers as one axis", "layers beside each other", "mixtral8x7b_c4: ")


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_but_a_load_is_taken_for_one_without_a_doubt_and_no_load_is_refused(recorded: bool) -> None:
    if recorded and not SHARED.exists():
        pytest.skip("needs ../shared/data: recordings that are not ours to ship")
    answers = contents.confusion(contents.sources(SHARED if recorded else None), quick=not recorded)
    wrong, lost = contents.faults(answers)
    assert lost == []
    assert [how for how in wrong if not any(part in how for part in UNKNOWABLE)] == []
    assert sum(kind == "load" for kind, _, _ in answers) > 20
    assert {answer for (kind, _, name), answer in answers.items() if kind == "top-k ids" and name == "topk_ids"} == {
        "refused"
    }
