"""Pages of the command line about one trace never contradict each other: text and `--json`, and one command another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import ExpertLayout, Topology, demo_trace
from eplb_core.files.formats import write_layout
from eplb_core.placement.worth.decision import pays
from tests.cli.commands import Commands
from tests.simulation.test_decisions import load_of, shared_loads

LAYERS, EXPERTS = 2, 32


def skewed(seed: int) -> Any:
    """Tokens of each expert, the same in every window."""
    return np.random.default_rng(seed).lognormal(0, 1.2, (1, LAYERS, EXPERTS)) * 1000


MADE: dict[str, Callable[[], Any]] = {
    "demo": lambda: demo_trace().load[::7, :LAYERS, :EXPERTS],
    "nothing to gain": lambda: np.full((16, LAYERS, EXPERTS), 1000.0),
    "a gain that lasts": lambda: skewed(1).repeat(16, axis=0),
    "a gain that does not last": lambda: np.concatenate([skewed(1).repeat(8, axis=0), skewed(6).repeat(8, axis=0)]),
}
SPEEDS: dict[str, list[float]] = {"equal": [1.0] * 4, "unequal": [1.0, 1.0, 0.5, 2.0]}


VERDICTS = ("Take `place`: ", "Keep the layout: ", "It hardly pays: ")


def solid(text: str) -> str:
    """Without spaces, so that line breaks do not count."""
    return "".join(text.split())


class Pages:
    """One trace on four ranks, on all pages."""

    def __init__(self, eplb: Commands, folder: Path, load: Any, speeds: list[float], spare: int = 4) -> None:
        self.eplb, self.load = eplb, np.asarray(load, dtype=np.float64) // 1
        windows, layers, experts = self.load.shape
        self.half, self.slots, self.equal = windows // 2, experts + spare, len(set(speeds)) == 1
        self.trace, self.current = str(folder / "trace.npy"), str(folder / "current.json")
        np.save(self.trace, self.load)
        topology = Topology(4, rank_speed=speeds)
        write_layout(
            ExpertLayout.trivial(layers, experts, num_slots=self.slots, topology=topology), self.current, "eplb"
        )
        self.ranks = ["--ranks", "4", *([] if self.equal else ["--rank-speed", ",".join(map(str, speeds))])]
        self.model = str(folder / "config.json")
        config = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": experts, "num_experts_per_tok": 1}
        Path(self.model).write_text(json.dumps({**config, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}))

    def ask(self, command: str, *options: str) -> tuple[str, Any]:
        """What it prints as text, without spaces, and as `--json`."""
        argv = [command, self.trace, "--holds", "load", *options]
        text, facts = self.eplb(*argv).out, self.eplb(*argv, "--json").facts
        return solid(text), facts

    def check(self) -> str:
        """Compare all; return what they say in one word."""
        text, plan = self.ask("plan", *self.ranks, "--slots", str(self.slots))
        assert solid(plan["conclusion"]) in text
        saved = plan["unseen"]["saved"]
        worth = plan["conclusion"].startswith("Worth it: ")
        assert worth == pays(saved)
        assert plan["unseen"]["first_window"] == self.half
        self._gain(plan, worth)
        self._replays()
        if self.equal:  # advice and sweeps are for ranks of one speed
            self._advice(plan)
        return "worth" if worth else "not"

    def _gain(self, plan: Any, worth: bool) -> None:
        text, gain = self.ask("gain", *self.ranks, "--slots", str(self.slots), "--current", self.current)
        assert solid(gain["conclusion"]) in text
        assert gain["rows"][0]["saved"] == pytest.approx(plan["unseen"]["saved"], abs=1e-9)
        assert gain["ceiling"] == pytest.approx(1.0 - plan["unseen"]["before"], abs=1e-9)
        assert gain["pays"] == worth == gain["conclusion"].startswith("Pays: ")

    def _replays(self) -> None:
        """A plan for what is live is what a replay makes at half of the windows."""
        _, plan = self.ask("plan", *self.ranks, "--slots", str(self.slots), "--current", self.current)
        saved = plan["unseen"]["saved"]
        slots = ["--slots", str(self.slots), "--interval", str(self.half)]
        text, (none, place) = self.ask("simulate", *self.ranks, *slots, "--policy", "none,place")
        assert none["total_balancedness"] == pytest.approx(plan["unseen"]["before"], abs=1e-9)
        assert none["total_transfers"] == 0
        verdict = next(word for word in VERDICTS if solid(word) in text)
        assert saved == pytest.approx(1.0 - none["total_balancedness"] / place["total_balancedness"], abs=1e-9)
        assert (verdict == VERDICTS[0]) == pays(saved) == plan["conclusion"].startswith("Worth it: ")
        if pays(saved):
            assert solid(f"{saved:.1%} less time") in text
        if self.equal:
            said, rows = self.ask("sweep", "--ranks", "4", *slots, "--policy", "none,place")
            for row, replay in zip(rows, (none, place), strict=True):
                assert row["total_balancedness"] == pytest.approx(replay["total_balancedness"], abs=1e-12)
                assert row["node_transfers"] + row["network_transfers"] == replay["total_transfers"]
                assert f"{row['total_balancedness']:.3f}"[:4] in said

    def _advice(self, plan: Any) -> None:
        text, advice = self.ask(
            "advise", "--gpu", "H200", "--model", self.model, "--ranks", "4", "--policy", "place",
            "--redundant-per-rank", str(self.slots // 4 - self.load.shape[2] // 4), "--interval", str(self.half // 2),
        )  # fmt: skip
        assert solid(advice["conclusion"]) in text
        assert advice["conclusion"].startswith("Take ") == advice["pays"]
        same = [each for each in advice["candidates"] if each["num_slots"] == self.slots and each["policy"] == "none"]
        assert same[0]["judged"]["balancedness"] == pytest.approx(plan["unseen"]["before"], abs=1e-9)


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("name", MADE)
def test_all_pages_of_a_trace_agree(name: str, speeds: str, eplb: Commands, tmp_path: Path) -> None:
    said = Pages(eplb, tmp_path, MADE[name](), SPEEDS[speeds], 0 if name == "nothing to gain" else 4).check()
    if speeds == "equal":
        assert said == {"a gain that lasts": "worth", "demo": said}.get(name, "not")


@pytest.mark.long
@pytest.mark.parametrize("name", list(shared_loads()))
def test_all_pages_of_a_real_trace_agree(name: str, eplb: Commands, tmp_path: Path) -> None:
    for speeds in SPEEDS.values():
        load = load_of(name)
        Pages(eplb, tmp_path, load[: len(load) // 2 * 2], speeds).check()


@pytest.mark.long
def test_the_demo_is_a_plan_and_a_replay_of_its_trace(eplb: Commands, tmp_path: Path) -> None:
    path = str(tmp_path / "trace.npy")
    np.save(path, demo_trace().load)
    shape = [path, "--holds", "load", "--ranks", "16", "--nodes", "2", "--slots", "144"]
    demo = eplb("demo", "--json").facts
    plan = eplb("plan", *shape, "--json").facts
    for name in ("before", "after", "bound", "unseen", "transfers", "digest", "conclusion"):
        assert demo["plan"][name] == plan[name]
    assert eplb("simulate", *shape, "--json").facts == demo["simulate"]
