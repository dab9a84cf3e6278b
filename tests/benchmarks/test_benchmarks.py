"""Each benchmark runs, and records what its numbers need beside them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from benchmarks import __main__ as every
from benchmarks import measure, peers, placement


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


LONG = {
    "affinity",
    "against",
    "dispatch",
    "engine",
    "forecast",
    "few_transfers",
    "from_layout",
    "fuzz_record",
    "loading",
    "moving",
    "moving_gpu",
    "multi_gpu",
    "record",
    "record_faults",
    "schedules",
    "simulation",
    "soak_moves",
    "startup",
    "transport_gpu",
    "transports",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name, _ in every.found(None)],
)
def test_benchmark_runs_and_records(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(["--quick", "--only", name, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"cpu", "cores", "versions", "commit", "python"} <= record["environment"].keys()
    assert (tmp_path / f"{name}.md").stat().st_size > 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in record.get("summary", []))


def test_unknown_benchmark_is_named() -> None:
    with pytest.raises(SystemExit, match=r"`--only` \(=nothing\) must be one of affinity, "):
        list(every.found(["nothing"]))


def test_absent_peers_are_said_in_one_line_each(tmp_path: Path) -> None:
    policies, absent = peers.load_peers(tmp_path, tmp_path / "eplb.py")
    assert policies == []
    assert [line.split(":")[0] for line in absent] == ["vllm 0.33.0", "sglang 0.5.23", "DeepSeek EPLB"]


def test_peers_load_from_their_files_and_leave_no_trace(tmp_path: Path) -> None:
    """The packages' own `__init__` files, which would import an engine, do not run."""
    folder = tmp_path / peers.FOLDERS["vllm"]
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('the engine')\n")
    (folder / "__init__.py").write_text("raise ImportError('the engine')\n")
    (folder / "abstract.py").write_text("class Base: pass\n")
    (folder / "default.py").write_text(
        "import torch\nfrom .abstract import Base\n"
        "class DefaultEplbPolicy(Base):\n"
        "    @classmethod\n"
        "    def rebalance_experts(cls, weight, slots, groups, nodes, ranks, old=None):\n"
        "        return (torch.arange(slots) % weight.shape[1]).expand(weight.shape[0], -1)\n"
    )
    deepseek_file = tmp_path / "eplb.py"
    deepseek_file.write_text(
        "from eplb_core.placement.deepseek import rebalance_experts as ours\n"
        "def rebalance_experts(*numbers):\n    return ours(*numbers)\n"
    )
    policies, absent = peers.load_peers(tmp_path, deepseek_file)
    assert [policy.name for policy in policies] == ["vLLM 0.33.0", "vLLM 0.33.0, given the old map", "DeepSeek EPLB"]
    assert len(absent) == 1
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
    load, old = np.ones((2, 4), np.int64), np.zeros((2, 6), np.int64)
    for policy in policies[:2]:
        assert policy.prepare(load, 6, 2, old)().tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert policies[2].prepare(load, 6, 2, old)().shape == (2, 6)


def test_loads_of_a_file_are_summed_over_windows(tmp_path: Path) -> None:
    path = tmp_path / "loads.npz"
    np.savez(path, one=np.ones((2, 4), np.int32), many=np.ones((3, 2, 4), np.int32), other=np.ones(3))
    found = list(placement.loads(path, quick=True))
    assert [name for name, _ in found[:2]] == ["one", "many"]
    assert found[1][1].tolist() == [[3] * 4] * 2


def test_table_is_aligned() -> None:
    assert measure.table(["a", "long"], [["xyz", "1"]]) == "| a   | long |\n|-----|-----:|\n| xyz |    1 |"


def test_times_leave_the_first_call_out() -> None:
    numbers = itertools.count(1)
    answer, times = measure.timed(lambda: next(numbers), calls=5, budget_s=100.0)
    assert (answer, times.calls, next(numbers)) == (1, 5, 7)
    assert times.minimum <= times.median


def test_a_record_of_schedules_is_not_added_up_twice(tmp_path: Path) -> None:
    from benchmarks import record_faults

    numbers = {"schedules": 5, "pool": 1, "calls": 9, "events": {}, "faults": {}, "failed": [], "seconds": 1.0}
    same = {"summary": [], "steps": 1, "environment": {"commit": "a", "cpu": "b"}}
    for seed in (0, 5):
        (tmp_path / f"{seed}.json").write_text(json.dumps({**numbers, **same, "first_seed": [seed]}))
    one, other = str(tmp_path / "0.json"), str(tmp_path / "5.json")
    assert record_faults.main(["--merge", one, other]) == 0
    with pytest.raises(SystemExit):
        record_faults.main(["--merge", one, one])
