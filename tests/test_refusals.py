"""Arguments that no other file gives: each is refused by its name, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core import simulation
from eplb_core.cli import main as cli
from eplb_core.simulation.policies import to_options

torch = pytest.importorskip("torch")

from eplb_core.loading.install.staging import Staging  # noqa: E402
from eplb_core.loading.record.client import _ints  # noqa: E402
from eplb_core.loading.transports import LocalCopy  # noqa: E402

TOPOLOGY = eplb.Topology(num_ranks=2)
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=TOPOLOGY)
ONE = eplb.ExpertLayout([[0, 1]], num_experts=2, topology=eplb.Topology(1))
LOAD = np.ones((4, 1, 3))
NO_AGREEMENT = r"`agreement` \(=NoneType\) must be an Agreement, such as GroupAgreement"


def store() -> Any:
    return eplb.ExpertStore({"weight": torch.zeros(2, 4)})


def read_all() -> None:
    owner, reader = LocalCopy(), LocalCopy()
    reader.connect(1, owner.export([]))
    reader.read(1, "all")  # type: ignore[arg-type]


def tables() -> Any:
    return eplb.DispatchTables(LAYOUT, rank=0, mode="static").layer(0)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "forecasters": (
        lambda: eplb.backtest(LOAD, "last", topology=TOPOLOGY, num_slots=4),  # type: ignore[arg-type]
        TypeError,
        r"`forecasters` \(='last'\) must be a dict",
    ),
    "device": (
        lambda: eplb.LoadCounter(1, 3, device="gpu"),
        TypeError,
        r"`device` \(='gpu'\) must be a device of torch",
    ),
    "topk_ids": (
        lambda: eplb.topk_to_slots(torch.zeros(1, 1, 1, dtype=torch.int64), tables()),
        ValueError,
        r"`topk_ids` \(shape \[1, 1, 1\]\) must be \[T, K\] or \[T\]",
    ),
    "num_tokens": (
        lambda: eplb.topk_to_slots(torch.zeros(1, 1, dtype=torch.int64), tables(), num_tokens=torch.ones(2)),
        ValueError,
        r"`num_tokens` \(torch.float32 \[2\]\) must be int32 \[1\] or \[\]",
    ),
    "slots": (lambda: eplb.DispatchTables.untag(torch.zeros(1)), TypeError, r"`slots` \(dtype torch.float32\) must be"),
    "sample": (lambda: eplb.fingerprints([store()], sample=(1, 2, 3)), ValueError, "`sample` .* a step and an offset"),  # type: ignore[arg-type]
    "large sample": (lambda: eplb.fingerprints([store()], sample=2**31), ValueError, r"`sample` .* below 2\*\*31"),
    "staging": (lambda: Staging(1 << 60, [store()]), ValueError, "`staging` .* must be memory that exists"),
    "layers": (lambda: _ints([2**63]), ValueError, r"`layers` must be below 2\*\*63"),
    "layer_ids": (
        lambda: eplb.SlotResolver(LAYOUT, rank=0, layer_ids=np.zeros((1, 1), np.int64)),
        ValueError,
        "must be a list of ids",
    ),
    "tensors": (lambda: eplb.ExpertStore([torch.zeros(2, 4)]), TypeError, r"`tensors` \(=list\) must be a dict"),  # type: ignore[arg-type]
    "regions": (lambda: LocalCopy().export([1]), TypeError, r"`regions` \(=\[1\]\) must be a list of Regions"),  # type: ignore[list-item]
    "blob": (lambda: LocalCopy().connect(1, 5), TypeError, r"`blob` \(=5\) of rank 1 must be bytes"),  # type: ignore[arg-type]
    "batch": (read_all, TypeError, r"`batch` \(='all'\) must be a ReadBatch"),
    "agreement of a move": (
        lambda: eplb.move_experts([store()], ONE, ONE, rank=0, transport=LocalCopy(), agreement=None),  # type: ignore[arg-type]
        TypeError,
        NO_AGREEMENT,
    ),
    "agreement of a Migrator": (
        lambda: eplb.Migrator([store()], ONE, rank=0, transport=LocalCopy(), agreement=None),  # type: ignore[arg-type]
        TypeError,
        NO_AGREEMENT,
    ),
    "agreement on a layout": (
        lambda: eplb.agree_on_layout(None, own=ONE, agreement=None),  # type: ignore[arg-type]
        TypeError,
        NO_AGREEMENT,
    ),
    "prints": (
        lambda: eplb.verify_weights(np.zeros((2, 1, 2, 0), np.int64), LAYOUT),
        ValueError,
        "`prints_of_all_ranks` .* must have a tensor or more",
    ),
    "shares": (
        lambda: eplb.rank_load(LAYOUT, [[1, 1, 1]], shares=[[np.nan, 1, 1, 0]]),
        ValueError,
        r"`shares` \(=nan\) must be in \[0, 1\] at layer 0, slot 0",
    ),
    "grid": (
        lambda: simulation.sweep(LOAD, "num_slots", topology=TOPOLOGY),  # type: ignore[arg-type]
        TypeError,
        r"`grid` \(='num_slots'\) must be a dict",
    ),
    "window_tokens": (
        lambda: simulation.generate_trace(2, window_tokens=2**60),
        ValueError,
        r"`window_tokens` .* must be below 2\*\*53",
    ),
    "place_options": (
        lambda: to_options("none"),  # type: ignore[arg-type]
        TypeError,
        r"`place_options` \(='none'\) must be a dict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_another_kind_is_refused_by_its_name(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("amount", ["none", "0", "inf"])
def test_an_option_that_is_no_amount_is_refused_by_its_name(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "trace.npz", "--ranks", "2", "--slots", "4", "--window-passes", amount])
    assert f"--window-passes: '{amount}' must be a number above 0" in capsys.readouterr().err
