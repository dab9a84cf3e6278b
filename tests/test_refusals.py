"""Arguments that no other file gives: each is refused by its name, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eplb_core
from eplb_core.cli import main as cli
from eplb_core.simulation.policies import to_options

torch = pytest.importorskip("torch")

from eplb_core.loading.install.staging import Staging  # noqa: E402
from eplb_core.loading.record.client import _ints  # noqa: E402
from eplb_core.loading.transports import LocalCopy  # noqa: E402

eplb: Any = eplb_core  # what is given here is of the wrong type
TOPOLOGY = eplb.Topology(num_ranks=2)
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=TOPOLOGY)
ONE = eplb.ExpertLayout([[0, 1]], num_experts=2, topology=eplb.Topology(1))
LOAD = np.ones((4, 1, 3))
AN_AGREEMENT = r"\(=NoneType\) must be an Agreement, such as GroupAgreement"


def store() -> Any:
    return eplb.ExpertStore({"weight": torch.zeros(2, 4)})


def read_all() -> None:
    owner, reader = LocalCopy(), LocalCopy()
    reader.connect(1, owner.export([]))
    reader.read(1, "all")  # type: ignore[arg-type]


def mapped(shape: tuple[int, ...], **options: Any) -> None:
    tables = eplb.DispatchTables(LAYOUT, rank=0, mode="static").layer(0)
    eplb.topk_to_slots(torch.zeros(shape, dtype=torch.int64), tables, **options)


ALONE: Any = {"rank": 0, "transport": LocalCopy(), "agreement": None}
BOUND: Any = {"topology": TOPOLOGY, "num_slots": 4}
REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("forecasters", lambda: eplb.backtest(LOAD, "last", **BOUND), TypeError, r"\(='last'\) must be a dict"),
    ("device", lambda: eplb.LoadCounter(1, 3, device="gpu"), TypeError, r"\(='gpu'\) must be a device of torch"),
    ("topk_ids", lambda: mapped((1, 1, 1)), ValueError, r"\(shape \[1, 1, 1\]\) must be \[T, K\] or \[T\]"),
    ("num_tokens", lambda: mapped((1, 1), num_tokens=torch.ones(2)), ValueError, r".* must be int32 \[1\] or \[\]"),
    ("slots", lambda: eplb.DispatchTables.untag(torch.zeros(1)), TypeError, r"\(dtype torch.float32\) must be"),
    ("sample", lambda: eplb.fingerprints([store()], sample=(1, 2, 3)), ValueError, ".* a step and an offset"),
    ("sample", lambda: eplb.fingerprints([store()], sample=2**31), ValueError, r".* below 2\*\*31"),
    ("staging", lambda: Staging(1 << 60, [store()]), ValueError, ".* must be memory that exists"),
    ("layers", lambda: _ints([2**63]), ValueError, r"must be below 2\*\*63"),
    (
        "layer_ids",
        lambda: eplb.SlotResolver(LAYOUT, rank=0, layer_ids=np.eye(1, dtype=int)),
        ValueError,
        ".*a list of ids",
    ),
    ("tensors", lambda: eplb.ExpertStore([torch.zeros(2, 4)]), TypeError, r"\(=list\) must be a dict"),
    ("regions", lambda: LocalCopy().export([1]), TypeError, r"\(=\[1\]\) must be a list of Reg"),  # type: ignore[list-item]
    ("blob", lambda: LocalCopy().connect(1, 5), TypeError, r"\(=5\) of rank 1 must be bytes"),  # type: ignore[arg-type]
    ("batch", read_all, TypeError, r"\(='all'\) must be a ReadBatch"),
    ("agreement", lambda: eplb.move_experts([store()], ONE, ONE, **ALONE), TypeError, AN_AGREEMENT),
    ("agreement", lambda: eplb.Migrator([store()], ONE, **ALONE), TypeError, AN_AGREEMENT),
    ("agreement", lambda: eplb.agree_on_layout(None, own=ONE, agreement=None), TypeError, AN_AGREEMENT),
    ("prints_of_all_ranks", lambda: verified(np.zeros((2, 1, 2, 0))), ValueError, ".* must have a tensor or more"),
    ("shares", lambda: shared([np.nan, 1, 1, 0]), ValueError, r"\(=nan\) must be in \[0, 1\] at layer 0, slot 0"),
    ("grid", lambda: eplb.sweep(LOAD, "num_slots", topology=TOPOLOGY), TypeError, r"\(='num_slots'\) must be a dict"),
    ("window_tokens", lambda: eplb.generate_trace(2, window_tokens=2**60), ValueError, r".* must be below 2\*\*53"),
    ("place_options", lambda: to_options("none"), TypeError, r"\(='none'\) must be a dict"),  # type: ignore[arg-type]
]


def verified(prints: Any) -> None:
    eplb.verify_weights(prints.astype(np.int64), LAYOUT)


def shared(shares: list[float]) -> None:
    eplb.rank_load(LAYOUT, [[1, 1, 1]], shares=[shares])


@pytest.mark.parametrize(("name", "call", "error", "text"), REFUSED)
def test_an_argument_of_another_kind_is_refused_by_its_name(
    name: str, call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"`{name}` {text}"):
        call()


@pytest.mark.parametrize("amount", ["none", "0", "inf"])
def test_an_option_that_is_no_amount_is_refused_by_its_name(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "trace.npz", "--ranks", "2", "--slots", "4", "--window-passes", amount])
    assert f"--window-passes: '{amount}' must be a number above 0" in capsys.readouterr().err
