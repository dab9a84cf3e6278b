"""Tables of load: long and wide, from dicts and from the frames of three packages; and results as frames."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import Trace
from eplb_core.loading.pull_plan import PullKind
from eplb_core.simulation import Records

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
    for unit in ("D", "us", "ns"):
        assert Trace.from_frame({"window": times.astype(f"M8[{unit}]"), **small}).windows == (
            "2026-01-01",
            "2026-01-02",
        )
    with pytest.raises(ValueError, match="1 are missing"):
        Trace.from_frame({"window": np.array(["NaT", "2026-01-01"], dtype="M8[ns]"), **small})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"extra": AT[0]}, ValueError, "columns extra are no `window"),
        ({"count": AT[0]}, ValueError, "columns tokens, count could each be the tokens"),
        ({"window": None}, ValueError, r"twice for the same window, layer and expert \(first: \[0, 0, 0\]\)"),
        ({"expert": None}, ValueError, "no column is known as `expert`"),
        ({"tokens": None}, ValueError, "no column is known as `tokens`"),
        ({"tokens": -LOAD.reshape(-1)}, ValueError, "must be finite and not negative"),
        ({"tokens": np.full(24, np.nan)}, ValueError, "must be finite"),
        ({"layer": np.full(24, 0.5)}, TypeError, r"`layer` \(float64\) must be ids"),
        ({"expert": -AT[2]}, TypeError, "`expert`"),
        ({"window": np.full(24, np.nan)}, ValueError, "24 are missing"),
        ({"window": np.array(["a", None, "b", "None"] * 6, dtype=object)}, ValueError, "6 are missing"),
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
        ({"note": [1] * 6}, "columns note are no `window"),
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


def results() -> dict[str, Any]:
    """A result of each kind that is a table."""
    topology = eplb.Topology(2)
    load = LOAD + np.array([900, 0, 200, 0])
    options: dict[str, Any] = {"topology": topology, "num_slots": 6}
    old = eplb.ExpertLayout.trivial(2, 4, **options)
    placed = eplb.place(load, topology, num_slots=6, current=old)
    return {
        "trace": eplb.Trace(load, ("a", "b", "c"), (3, 7)),
        "layout": old,
        "diff": old.diff(placed.layout),
        "placement": placed,
        "verdict": eplb.should_rebalance(old, load, placed),
        "slots": eplb.plan_slots(load, topology, total_slots=5),
        "gain": eplb.gain_report(load, topology),
        "pull": eplb.plan_pull(old, placed.layout, rank=0),
        "comparison": eplb.compare_policies(load, ["none", "place"], interval=1, **options),
        "backtest": eplb.backtest(load, interval=1, **options),
        "records": Records.of({"layer": [0, 1], "name": ["a", "b"], "x": [0.5, 1.0]}),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return results()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_results_become_frames_of_columns_of_one_length(
    made: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the package: what it is given is all that is ours."""
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(DataFrame=dict))
    columns = {name: getattr(result, f"to_{package}")() for name, result in made.items()}
    for name, table in columns.items():
        assert len({len(column) for column in table.values()}) == 1, name
        assert all(isinstance(column, list) or column.dtype.kind in "bif" for column in table.values()), name
    assert columns["placement"]["transfers"].tolist() == made["placement"].transfers.tolist()
    assert columns["verdict"]["reason"] == list(made["verdict"].layer_reasons)
    assert columns["gain"]["saved"].tolist() == [row.saved for row in made["gain"].rows]
    assert columns["comparison"]["policy"] == ["none", "place"]
    assert columns["backtest"]["name"] == [row.name for row in made["backtest"]]
    layout, plan, slots = made["layout"], made["pull"], made["slots"]
    held = columns["layout"]
    assert held["expert"].tolist() == layout.physical_to_logical_map.ravel().tolist()
    assert held["rank"].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert columns["diff"]["new_expert"].tolist() == made["diff"].new_expert.tolist()
    assert columns["pull"]["kind"] == [PullKind(kind).name for kind in plan.kind.ravel().tolist()]
    times = [
        slots.layer_time[slots.choices.index(size), layer] for layer, size in enumerate(slots.slots_per_rank.tolist())
    ]
    assert columns["slots"]["pass_s"].tolist() == times
    columns["trace"]["tokens"][0] = 7  # a copy
    assert columns["records"] == {"layer": pytest.approx([0, 1]), "name": ["a", "b"], "x": pytest.approx([0.5, 1.0])}


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_trace_as_a_frame_is_read_back(made: dict[str, Any], package: str) -> None:
    pytest.importorskip(package, reason="makes its own kind of table")
    read = Trace.from_frame(getattr(made["trace"], f"to_{package}")())
    assert read.load.tolist() == made["trace"].load.tolist()
    assert (read.windows, read.layer_ids) == (("a", "b", "c"), (3, 7))
    for result in made.values():
        assert len(getattr(result, f"to_{package}")())


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_without_its_package_says_what_to_install(
    made: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("records", "diff"):
        with pytest.raises(ImportError, match=f"pip install {package}"):
            getattr(made[name], f"to_{package}")()
