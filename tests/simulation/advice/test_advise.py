"""What `advise` recommends, on which windows, and from which numbers."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_core import Topology, Trace, simulate
from eplb_core.cli.inputs import to_json
from eplb_core.simulation import HARDWARE, Advice, ModelExperts, advise

EXPERTS, LAYERS, WINDOWS = 16, 2, 12
MODEL = ModelExperts("any", 2048, 768, EXPERTS, 2, 2.0, "bfloat16", LAYERS)
V3 = ModelExperts("deepseek_v3", 7168, 2048, EXPERTS, 2, 1.0, "fp8", 58)


def skewed(windows: int = WINDOWS, seed: int = 0) -> Any:
    hot = np.random.default_rng(seed).lognormal(0.0, 1.2, (1, LAYERS, EXPERTS)) * 20000
    return np.random.default_rng(seed + 1).poisson(np.broadcast_to(hot, (windows, LAYERS, EXPERTS)))


def advice(load: Any, **options: Any) -> Advice:
    given = {"gpu": "H200", "model": MODEL, "ranks": [2, 4], "policies": ["none", "place"], **options}
    return advise(load, **given)


def test_figures_are_those_of_a_replay_scored_on_the_later_half() -> None:
    load = skewed()
    found = advice(load, window_passes=2.0)
    first, half, end = found.windows
    assert (first, half, end) == (3, 6, 12)
    for each in found.candidates:
        sim = simulate(
            load,
            topology=Topology(each.num_ranks),
            num_slots=each.num_slots,
            policy=each.policy,  # type: ignore[arg-type]
            interval=first,
            score_from=half,
            cost=found.cost,
            window_passes=2.0,
        )
        assert each.judged.pass_s == pytest.approx(sim.total_s / (2.0 * (end - half)))
        assert each.judged.balancedness == pytest.approx(sim.total_balancedness)
        assert each.judged.transfers + each.chosen_on.transfers == sim.total_transfers
        assert each.gpu_s == each.num_ranks * each.judged.pass_s
    assert found.pays
    assert found.recommended.policy == "place"
    assert found.recommended.saved == 1.0 - found.recommended.judged.pass_s / found.now.judged.pass_s


def test_the_choice_has_not_seen_the_windows_that_judge_it() -> None:
    load = skewed()
    other = load.copy()
    other[WINDOWS // 2 :] = skewed(seed=9)[WINDOWS // 2 :]
    one, two = advice(load), advice(other)
    assert one.chosen == two.chosen
    assert [each.chosen_on for each in one.candidates] == [each.chosen_on for each in two.candidates]
    assert one.recommended.judged != two.recommended.judged


def test_where_nothing_is_gained_the_first_layout_stays() -> None:
    found = advice(np.full((8, LAYERS, EXPERTS), 5000))
    assert not found.pays
    assert found.recommended is found.now
    assert (found.now.policy, found.now.redundant_per_rank, found.now.saved) == ("none", 0, 0.0)
    assert found.conclusion.startswith("Keep ")


def test_what_pays_only_before_the_later_half_is_not_recommended() -> None:
    """Hot experts are gone from window 6 on."""
    load = skewed()
    load[WINDOWS // 2 :] = 5000
    found = advice(load, policies=["none", "once"])
    chosen = found.candidates[found.chosen]
    assert chosen.policy == "once"
    assert chosen.saved < 0.02
    assert found.recommended is found.now
    assert found.conclusion.startswith("Keep ")


def test_memory_counts_the_models_layers_and_buffers_that_grow_with_slots() -> None:
    found = advice(skewed(), model=V3, ranks=[4], memory_share=1.0)
    plain, redundant = found.candidates[0], found.candidates[-1]
    assert (plain.slots_per_rank, redundant.slots_per_rank) == (4, 5)
    assert plain.weights_bytes == 4 * 58 * 3 * 7168 * 2048
    assert redundant.redundant_bytes == 58 * 3 * 7168 * 2048
    # two buffers to send from, two to receive into, of 128 tokens a slot: bfloat16, and 16 bytes on what is received
    assert redundant.buffer_bytes == 20 * 128 * 2 * (2 * 7168 + 2 * 7168 + 16)
    assert redundant.buffer_growth_bytes == redundant.buffer_bytes - plain.buffer_bytes > 0
    assert "--buffer-tokens" in found.conclusion  # the passes have more tokens a rank
    fixed = advice(skewed(), model=V3, ranks=[4], memory_share=1.0, buffer_tokens=0)
    assert "--buffer-tokens" not in fixed.conclusion
    assert fixed.recommended.memory_bytes == fixed.recommended.weights_bytes


def test_ranks_on_which_experts_do_not_fit_are_shown_and_never_taken() -> None:
    share = 20e9 / HARDWARE["H200"].memory_bytes  # 16 experts are 41 GB: 20 GB a rank on two
    found = advice(skewed(), model=V3, memory_share=share)
    assert {each.num_ranks for each in found.candidates if each.fits} == {4}
    assert found.recommended.num_ranks == 4
    assert all(each.num_ranks == 4 for each in found.front)
    with pytest.raises(ValueError, match=r"`ranks`.*do not fit"):
        advice(skewed(), model=V3, memory_share=share, ranks=[2])
    with pytest.raises(ValueError, match=r"`ranks`.*do not fit"):
        advice(skewed(), model=V3, memory_share=1e-6, ranks=None)


def test_without_ranks_those_are_tried_that_fit() -> None:
    found = advice(skewed(), ranks=None, policies=["none"])
    assert sorted({each.num_ranks for each in found.candidates}) == [4, 8, 16]


def test_a_pass_limit_asks_for_more_ranks() -> None:
    load = skewed()
    free = advice(load)
    assert free.recommended.num_ranks == 2
    limit = 0.9 * min(each.chosen_on.pass_s for each in free.candidates if each.num_ranks == 2)
    assert advice(load, pass_limit_s=limit).recommended.num_ranks == 4
    with pytest.raises(ValueError, match=r"`pass_limit_s`.*fastest"):
        advice(load, pass_limit_s=1e-9)


def test_the_front_holds_what_no_other_beats() -> None:
    found = advice(skewed(), redundant_per_rank=[0, 1, 2])

    def aims(each: Any) -> tuple[float, float, float]:
        return each.judged.pass_s, each.gpu_s, each.memory_bytes

    assert len({aims(each) for each in found.front}) == len(found.front) > 0
    for each in found.candidates:
        beaten = any(
            aims(other) != aims(each) and all(a <= b for a, b in zip(aims(other), aims(each), strict=True))
            for other in found.candidates
        )
        assert not (each.on_front and beaten)
        assert each.on_front or beaten or aims(each) in map(aims, found.front)


def test_other_models_and_short_recordings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`model` .*64 experts.*16 experts"):
        advice(skewed(), model=replace(MODEL, num_experts=64))
    with pytest.raises(ValueError, match=r"`model` .*top-2.*top-8"):
        advice(Trace(skewed(), top_k=8))
    with pytest.raises(ValueError, match=r"`trace`.*four windows"):
        advice(skewed(3))
    with pytest.raises(ValueError, match="`interval`"):
        advice(skewed(), interval=6)
    idle = skewed()
    idle[6:] = 0
    with pytest.raises(ValueError, match="`trace`"):
        advice(idle)
    with pytest.raises(ValueError, match="`redundant_per_rank`"):
        advice(skewed(), redundant_per_rank=[])
    with pytest.raises(ValueError, match="`ranks`"):
        advice(skewed(), ranks=[])
    with pytest.raises(ValueError, match="at most"):
        advice(skewed(), ranks=[10**12])
    with pytest.raises(ValueError, match=r"`gpu`.*H200"):
        advice(skewed(), gpu="H2")


def test_without_torch_deepseek_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def hidden(name: str, *others: Any) -> Any:
        return None if name == "torch" else found(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    names = {each.policy for each in advice(skewed(), ranks=[2], policies=None).candidates}
    assert names == {"none", "auto"}


def test_it_is_a_table_words_and_plain_values() -> None:
    steps = []
    found = advice(skewed(), progress=lambda *step: steps.append(step))
    assert steps == [(done, 8) for done in range(1, 9)]
    text = str(found)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "windows 6-11" in text
    facts = json.loads(to_json(found.to_dict()))
    assert facts["pays"] is True
    assert facts["pass_limit_s"] is None
    assert facts["recommended"]["judged"]["transfers"] == found.recommended.judged.transfers
    assert len(facts["candidates"]) == 8
    columns = found._columns()
    assert columns["pass_s"].tolist() == [each.judged.pass_s for each in found.candidates]
    assert "chosen_on" not in columns
    page = found._repr_html_()
    assert "<code>place</code>" in page
    labels = re.findall("<title>(.*?)</title>", page)
    assert len(labels) == len(found.candidates)
    assert sum(f"{each.gpu_s * 1e3:.4g} GPU-ms" in " ".join(labels) for each in found.candidates) == len(labels)
    assert page.count("<circle") == len(labels) + 1  # a ring around the recommended one
    assert found.to_html().count(page) == 1
    hostile = replace(found, trace="<script>x</script>").to_html()
    assert "<script" not in hostile
