"""`eplb advise`, `eplb gain` and `eplb sweep` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eplb_core import Topology, advise, gain_report, load_trace, save_trace, simulate
from eplb_core.cli.inputs import to_json
from eplb_core.files.formats import demo_trace
from eplb_core.simulation import cost_preset
from eplb_core.trace import Trace
from tests.cli.commands import Commands

QWEN = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144},
    **{"num_experts": 16, "num_experts_per_tok": 8, "num_hidden_layers": 2, "torch_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corner of the demo trace: 8 windows, 2 layers, 16 experts."""
    path = tmp_path_factory.mktemp("cli") / "trace.npz"
    save_trace(Trace(demo_trace().load[:8, :2, :16], top_k=8), path)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return str(path)


@pytest.mark.slow
def test_gain_prints_the_report_of_the_library(trace: str, model: str, eplb: Commands) -> None:
    cost = cost_preset("H200", hidden_size=2048, intermediate_size=768, weight_bytes=2.0).model
    report = gain_report(load_trace(trace), Topology(4), num_slots=[16, 20], cost=cost, window_passes=2.0)
    command = ["gain", trace, "--ranks", "4", "--slots", "16,20", "--hardware", "H200", "--model", model]
    said = eplb(*command, "--window-passes", "2")
    assert said.out == f"{report}\n"
    assert "all-to-all" in said.err
    facts = eplb(*command, "--window-passes", "2", "--json").facts
    assert [tuple(row.values()) for row in facts["rows"]] == [tuple(row) for row in report.rows]


@pytest.mark.slow
def test_sweep_ties_slots_to_ranks_and_has_the_figures_of_simulate(trace: str, model: str, eplb: Commands) -> None:
    command = ["sweep", trace, "--ranks", "2,4", "--ranks-per-node", "2", "--redundant-per-rank", "1"]
    command += ["--policy", "none,place", "--interval", "2,4", "--hardware", "H200", "--model", model]
    rows = eplb(*command, "--json").facts
    assert [row["num_slots"] for row in rows] == [18] * 4 + [20] * 4
    assert [row["num_nodes"] for row in rows] == [1] * 4 + [2] * 4
    cost = cost_preset("H200", hidden_size=2048, intermediate_size=768, weight_bytes=2.0)
    options = {"topology": Topology(4, 2), "num_slots": 20, "policy": "place", "interval": 2, "score_from": 4}
    assert rows[5] == simulate(load_trace(trace), cost=cost, **options).summary()  # type: ignore[arg-type]
    text = eplb(*command).out
    assert "windows 4-7" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_model_needs_hardware_and_sweeps_need_slots(trace: str, model: str, eplb: Commands) -> None:
    assert "--hardware NAME" in eplb("gain", trace, "--ranks", "4", "--model", model, status=2).err
    assert "--redundant-per-rank" in eplb.exits("sweep", trace, "--ranks", "4").err
    assert "1 or more" in eplb.exits("sweep", trace, "--ranks", "4,0", "--slots", "16").err
    few = eplb("sweep", trace, "--ranks", "4", "--redundant-per-rank", "-1", "--interval", "2", status=2)
    assert "`redundant_per_rank` (=-1)" in few.err


@pytest.mark.slow
def test_advise_prints_the_advice_of_the_library(trace: str, model: str, eplb: Commands) -> None:
    command = ["advise", trace, "--gpu", "H200", "--model", model, "--ranks", "2,4", "--policy", "place"]
    command += ["--interval", "2", "--window-passes", "2", "--buffer-tokens", "0"]
    options = {"ranks": [2, 4], "policies": ["place"], "interval": 2, "window_passes": 2.0, "buffer_tokens": 0}
    found = advise(load_trace(trace), gpu="H200", model=model, **options)  # type: ignore[arg-type]
    said = eplb(*command)
    assert said.out == f"{found}\n"
    assert "..." in said.err
    page = Path(model).with_name("page.html")
    assert eplb(*command, "--json", "--report", str(page)).facts == json.loads(to_json(found.to_dict()))
    assert page.read_text("utf-8") == found.to_html()
    assert eplb(*command, "--pass-ms", "1e-9", status=2).err.count("`pass_limit_s`") == 1
    assert "--gpu" in eplb.exits("advise", trace, "--model", model).err
    Path(model).write_text("{}")
    assert "n_routed_experts" in eplb(*command, status=2).err
