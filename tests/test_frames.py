"""Tables of load: long and wide, from dicts and from the frames of three packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import Trace

LOAD: npt.NDArray[np.int64] = np.random.default_rng(0).multinomial(100, np.ones(4) / 4, size=(3, 2))
AT = np.indices(LOAD.shape).reshape(3, -1)
LONG: dict[str, Any] = {"window": AT[0], "layer": AT[1] + 3, "expert": AT[2], "tokens": LOAD.reshape(-1)}
WIDE: dict[str, Any] = {"window": [0, 0, 1, 1, 2, 2], "layer": [3, 4] * 3} | {
    f"expert_{e}": LOAD[:, :, e].reshape(-1) for e in range(4)
}


@given(order=st.permutations(range(LOAD.size)), left=st.sets(st.integers(0, LOAD.size - 1), max_size=5))
def test_rows_may_come_in_any_order_and_what_is_left_out_is_zero(order: list[int], left: set[int]) -> None:
    kept = [row for row in order if row not in left]
    expected = LOAD.copy()
    expected.reshape(-1)[sorted(left)] = 0
    trace = Trace.from_frame({name: column[kept] for name, column in LONG.items()}, num_experts=4)
    assert trace.load.tolist() == expected.tolist()
    assert trace.layer_ids == (3, 4)


def test_wide_tables_have_a_column_for_each_expert() -> None:
    trace = Trace.from_frame(WIDE)
    assert trace.load.tolist() == LOAD.tolist()
    assert (trace.windows, trace.layer_ids, trace.format) == (("0", "1", "2"), (3, 4), "table")
    assert "4 columns of experts" in trace.notes[0]
    renamed = {"t": WIDE["window"], "l": WIDE["layer"], "b": WIDE["expert_1"], "a": WIDE["expert_0"]}
    read = Trace.from_frame(renamed, window="t", layer="l", tokens=["a", "b"])
    assert read.load.tolist() == LOAD[:, :, :2].tolist()


def test_columns_of_any_name_may_be_said() -> None:
    odd = dict(zip(("when", "block", "who", "n"), LONG.values(), strict=True))
    trace = Trace.from_frame(odd, window="when", layer="block", expert="who", tokens="n")
    assert trace.load.tolist() == LOAD.tolist()


def test_windows_keep_the_order_of_texts_and_sort_numbers_and_times() -> None:
    small = {"layer": [0, 0], "expert": [0, 0], "tokens": [1, 2]}
    assert Trace.from_frame({"window": ["b", "a"], **small}).windows == ("b", "a")
    assert Trace.from_frame({"step": [9, 1], **small}).load.tolist() == [[[2]], [[1]]]
    times = np.array(["2026-01-02", "2026-01-01"], dtype="M8[D]")
    assert Trace.from_frame({"window": times, **small}).windows == ("2026-01-01", "2026-01-02")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"extra": AT[0]}, ValueError, "columns extra are no window"),
        ({"count": AT[0]}, ValueError, "columns tokens, count could each be the tokens"),
        ({"window": None}, ValueError, r"twice for the same window, layer and expert \(first: \[0, 0, 0\]\)"),
        ({"expert": None}, ValueError, "no column is known as `expert`"),
        ({"tokens": None}, ValueError, "no column is known as `tokens`"),
        ({"tokens": -LOAD.reshape(-1)}, ValueError, "must be finite and not negative"),
        ({"tokens": np.full(24, np.nan)}, ValueError, "must be finite"),
        ({"layer": np.full(24, 0.5)}, TypeError, r"`layer` \(float64\) must be ids"),
        ({"expert": -AT[2]}, TypeError, "`expert`"),
        ({"window": np.full(24, np.nan)}, ValueError, "24 are missing"),
        ({"window": AT}, ValueError, "columns of one length"),
        ({"window": AT[0][:5]}, ValueError, "columns of one length"),
    ],
)
def test_what_is_no_long_table_is_refused(change: dict[str, Any], error: type[Exception], match: str) -> None:
    table = {name: column for name, column in {**LONG, **change}.items() if column is not None}
    with pytest.raises(error, match=match):
        Trace.from_frame(table)


def test_what_is_no_wide_table_is_refused() -> None:
    for change, match in (
        ({"note": [1] * 6}, "columns note are no window"),
        ({"expert_5": [1] * 6}, "4 is missing"),
    ):
        with pytest.raises(ValueError, match=match):
            Trace.from_frame({**WIDE, **change})
    with pytest.raises(ValueError, match="where rows are layers"):
        Trace.from_frame({name: column for name, column in WIDE.items() if name.startswith("expert")})
    with pytest.raises(ValueError, match="`tokens` names nothing"):
        Trace.from_frame(WIDE, tokens=["nothing"])
    with pytest.raises(ValueError, match="`window` \\(='when'\\) must be one of the columns window, layer"):
        Trace.from_frame(LONG, window="when")
    with pytest.raises(ValueError, match=r"`expert` \(=3\) must be below 3"):
        Trace.from_frame(LONG, num_experts=3)
    with pytest.raises(TypeError, match=r"`frame` \(int\)"):
        Trace.from_frame(7)


@pytest.mark.parametrize(("package", "made"), [("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "table")])
@pytest.mark.parametrize("table", [LONG, WIDE])
def test_frames_are_read_column_by_column_and_never_as_an_array(package: str, made: str, table: dict[str, Any]) -> None:
    frame = getattr(pytest.importorskip(package, reason=f"frames of {package}"), made)(table)
    assert Trace.from_frame(frame).load.tolist() == LOAD.tolist()
    with pytest.raises(TypeError, match=r"a frame with columns window, layer.*Trace\.from_frame"):
        Trace(frame)
