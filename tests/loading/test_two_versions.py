"""Ranks that run two versions of the library: refused in words on both, and no weight is moved."""

from __future__ import annotations

import json

import numpy as np
import pytest

import eplb_core
from eplb_core import ExpertLayout, LayoutAgreementError, MigrationError, Topology
from eplb_core.loading import agree
from eplb_core.loading._joining import Hello, check_hellos, decode, encode, facts_of
from tests.loading.worlds import stores_of

LAYOUT = ExpertLayout([[0, 1, 1, 0]], 2, topology=Topology(2))


def hello(rank: int, **changed: object) -> Hello:
    facts = facts_of(stores_of(LAYOUT, rank), LAYOUT) | changed
    return Hello(rank, facts, 4, np.zeros((1, 2, 3, 2), dtype=np.int64), b"blob")


def test_the_version_is_told() -> None:
    assert hello(0).facts["version of eplb_core"] == eplb_core.__version__ != ""


def test_another_version_with_the_same_words_is_refused_on_both_ranks() -> None:
    told = [encode(hello(0), ""), encode(hello(1, **{"version of eplb_core": "9.1"}), "")]
    with pytest.raises(
        MigrationError, match=r"version of eplb_core of rank 1 \(=9.1\) must be as on rank 0 .*no weight"
    ):
        check_hellos([decode(blob) for blob in told], 2)


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b"{}",
        b"\xff",
        b'{"rank": 0}',
        json.dumps({"rank": "0", "facts": {}, "capacity": 1, "places": [1], "failure": ""}).encode(),
        json.dumps({"rank": 0, "facts": {}, "capacity": 1, "places": [10**9, 10**9], "failure": ""}).encode(),
    ],
)
def test_another_version_with_other_words_is_refused(head: bytes) -> None:
    with pytest.raises(MigrationError, match=r"does not understand .*; install one version of eplb_core on all ranks"):
        decode(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(MigrationError, match=f"eplb_core {eplb_core.__version__} does not understand"):
        decode(head)


@pytest.mark.parametrize("blob", [b"", b"{}", b"[1, 2]", b'["a", [1], true, false, 0, "", [0, 0, 0, 0]]', b"3"])
def test_another_version_that_starts_is_named(blob: bytes) -> None:
    with pytest.raises(LayoutAgreementError, match=r"rank 1 says of its layout what .*install one version") as caught:
        agree._parse(blob, 1)
    assert caught.value.ranks == (1,)
