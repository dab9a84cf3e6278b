"""What operators read of SGLang's ranks: parts, placements, moves that were given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eplb_core.adapters import prometheus
from eplb_core.adapters.sglang import context, maps
from eplb_core.adapters.sglang import plugin as sglang
from eplb_core.exposition import Placements, samples
from tests.adapters.sglang.test_moves import Ranks

pytestmark = pytest.mark.usefixtures("own_numbers")


def test_a_part_whose_hook_did_not_take_effect_is_not_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr(sglang, "publish", lambda: published.append(prometheus))
    targets = {part: next(hook.target for hook in sglang._hooks() if hook.part == part) for part in sglang.PARTS}
    monkeypatch.setattr(context, "asked", ["placement", "maps", "tables"])
    monkeypatch.setattr(context, "registered", [targets["placement"], targets["maps"]])
    sglang._tell([targets["maps"]])
    assert published == []  # no rank yet
    monkeypatch.setattr(context, "rank", lambda: 0)
    sglang._tell([targets["maps"]])
    active = {labels[1]: value for (name, labels), value in samples().items() if name == "eplb_part_active"}
    assert active == {"placement": 1.0, "maps": 0.0, "tables": 0.0}
    assert len(published) == 1


def test_a_placement_tells_what_it_saw_in_all_windows() -> None:
    placements = Placements()
    passes = torch.tensor([[[90, 10, 10, 10]], [[0, 0, 0, 0]], [[10, 10, 10, 10]]])
    live = torch.tensor([[0, 1, 2, 3]])
    maps.rebalance(passes, 4, 2, num_nodes=1, live=live, placements=placements)
    told = samples()
    assert told["eplb_balancedness_seen_ratio", ("", "1x4")] == pytest.approx((60 / 100 + 1.0) / 2)
    assert told["eplb_placements_total", ("", "1x4")] == 1.0


def test_moves_that_sglang_makes_itself_are_told() -> None:
    ranks = Ranks()
    assert [samples()["eplb_moves_off", (rank,)] for rank in "01"] == [0.0, 0.0]
    ranks.do(lambda rank: rank.moves.close("the test ends them"))
    assert [samples()["eplb_moves_off", (rank,)] for rank in "01"] == [1.0, 1.0]
