"""Two pages of one trace and one cost say the same: plan, demo, gain report, replays, sweeps and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core import CostModel, ExpertLayout, Topology, compare_policies, demo_trace, gain_report, place
from eplb_core.cli.plan import make_plan
from eplb_core.placement.worth.decision import WORTH, pays
from eplb_core.simulation import Comparison, ModelExperts, advise

SHARED = Path(__file__).parents[3] / "shared" / "data"
LAYERS, WINDOWS = 3, 24
COSTS: dict[str, CostModel | None] = {
    "tokens": None,
    "large passes": CostModel(token_s=1e-7, expert_s=2e-6, layer_s=1e-5),
    "small passes": CostModel(token_s=1e-9, expert_s=1e-4),
}


def walk(steps: float, sigma: float, seed: int = 5) -> Any:
    """Loads whose logs walk: from windows that are alike to ones that forget each other."""
    rng = np.random.default_rng(seed)
    logs = sigma * rng.normal(size=(1, LAYERS, 32)) + steps * rng.normal(size=(WINDOWS, LAYERS, 32)).cumsum(axis=0)
    return np.exp(logs).astype(np.float64) * 1000 // 1


GENERATED: dict[str, Callable[[], Any]] = {
    "steady": lambda: walk(0.0, 0.8),
    "drifting": lambda: walk(0.2, 0.8),
    "forgetful": lambda: np.random.default_rng(1).lognormal(0, 1.5, (WINDOWS, LAYERS, 32)) * 100 // 1,
    "even": lambda: walk(0.0, 0.0),
    "nearly even": lambda: walk(0.0, 0.03),
    "demo": lambda: demo_trace().load[:: 112 // WINDOWS, :LAYERS],
}


def shared_loads() -> Iterator[str]:
    """Names of files and arrays of load, where the data lie beside this checkout."""
    for path in sorted(SHARED.glob("*.npz")) if SHARED.is_dir() else ():
        with np.load(path) as arrays:
            found = [name for name in arrays.files if name.endswith("load") and arrays[name].ndim > 2]
        yield from (f"{path.name}:{name}" for name in found)
        if path.stem.startswith("deepseek"):
            yield f"{path.name}:"  # an array for each workload: windows of one trace


NAMES = [*GENERATED, *shared_loads()]


def load_of(name: str) -> Any:
    if name in GENERATED:
        return GENERATED[name]()
    file, _, key = name.partition(":")
    with np.load(SHARED / file) as arrays:
        load = (arrays[key] if key else np.stack([arrays[each] for each in arrays.files])).astype(np.float64)
    load = load.reshape(-1, *load.shape[-2:])
    return load[:: max(1, len(load) // WINDOWS)][:WINDOWS, :LAYERS]


def frame(load: Any) -> tuple[Topology, int, ExpertLayout]:
    experts = load.shape[2]
    ranks = 8 if experts >= 32 else 4
    slots = experts + ranks
    topology = Topology(ranks)
    return topology, slots, ExpertLayout.trivial(load.shape[1], experts, num_slots=slots, topology=topology)


def anew(windows: Any, live: ExpertLayout) -> ExpertLayout:
    return place(windows, live.topology, num_slots=live.num_slots).layout


def saved_in(runs: Comparison) -> float:
    return 1.0 - runs["anew"].total_s / runs["none"].total_s


@pytest.mark.parametrize("name", NAMES)
def test_plan_report_replay_and_sweep_agree_on_what_one_placement_saves(name: str) -> None:
    """One question, one placement of the first half judged on the second: one number and one verdict on every page."""
    load = load_of(name)
    topology, slots, trivial = frame(load)
    facts, _ = make_plan(eplb.Trace(load), topology, {"num_slots": slots, "slots_per_rank": None}, None, {})
    half, saved = facts["unseen"]["first_window"], facts["unseen"]["saved"]
    assert facts["conclusion"].startswith("Worth it: " if pays(saved) else "Hardly worth a move: ")
    even = load[: 2 * half]
    for cost in COSTS.values():
        report = gain_report(even, topology, num_slots=[slots], current=trivial, cost=cost)
        options: dict[str, Any] = {"topology": topology, "num_slots": slots, "interval": half, "cost": cost}
        runs = compare_policies(even, {"none": "none", "anew": anew}, **options)
        rows = eplb.sweep(even, {"policy": ["none", anew]}, **options)
        assert report.rows[0].saved == pytest.approx(saved_in(runs), abs=1e-9)
        assert 1.0 - rows.total_s[1] / rows.total_s[0] == pytest.approx(saved_in(runs), abs=1e-9)
        assert report.pays == pays(report.rows[0].saved)
        assert report.conclusion.startswith("Pays: " if report.pays else "Does not pay")
        assert runs.conclusion.startswith("Take `anew`") == (report.pays and runs.best.policy == "anew")
        assert runs.conclusion.startswith("Keep") or runs.best.policy == "anew"
        assert not (report.pays and runs.conclusion.startswith(("Keep", "It hardly pays")))
        if cost is None and len(load) % 2 == 0:
            assert saved == pytest.approx(saved_in(runs), abs=1e-9)
        for page in (report.conclusion, runs.conclusion):
            assert "Time is counted" in page
            assert str(half) in page


@pytest.mark.parametrize("name", NAMES)
def test_planning_again_never_turns_a_gain_of_one_placement_into_none(name: str) -> None:
    """What `plan` calls worth it, the default policies of a replay do not call the contrary."""
    load = load_of(name)
    topology, slots, _ = frame(load)
    facts, _ = make_plan(eplb.Trace(load), topology, {"num_slots": slots, "slots_per_rank": None}, None, {})
    saved = facts["unseen"]["saved"]
    for interval in (len(load) // 6, len(load) // 2):
        runs = compare_policies(load, ["none", "place"], topology=topology, num_slots=slots, interval=interval)
        if saved >= 2 * WORTH:
            assert runs.conclusion.startswith("Take ")


@pytest.mark.parametrize("name", NAMES)
def test_advice_says_what_replays_of_the_same_windows_say(name: str) -> None:
    """It takes the policy that a replay of the windows to choose on names, and quotes a replay of the later ones."""
    load = load_of(name)
    topology, _, _ = frame(load)
    model = ModelExperts("any", 2048, 768, load.shape[2], 1, 2.0, "bfloat16", load.shape[1])
    names: Any = ["none", "auto"]
    advice = advise(load, gpu="H200", model=model, ranks=[topology.num_ranks], policies=names)
    first, half, _ = advice.windows
    chosen = advice.candidates[advice.chosen]
    options: dict[str, Any] = {"topology": topology, "num_slots": chosen.num_slots, "interval": first}
    options["cost"] = advice.cost
    assert compare_policies(load[:half], names, **options).best.policy == chosen.policy
    runs = compare_policies(load, names, score_from=half, **options)
    assert chosen.saved_by_moves == pytest.approx(1.0 - runs[chosen.policy].total_s / runs["none"].total_s, abs=1e-9)
    assert chosen.judged.balancedness == pytest.approx(runs[chosen.policy].total_balancedness)
    assert advice.pays == pays(chosen.saved)
    assert advice.conclusion.startswith("Take ") == advice.pays
    if advice.pays and pays(chosen.saved_by_moves) and runs.best.policy == chosen.policy:
        assert runs.conclusion.startswith("Take `auto`")
