"""Ranks that run two versions of the library: refused in words on both, and no weight is moved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eplb_core
from eplb_core import ExpertLayout, LayoutAgreementError, MigrationError, Topology
from eplb_core.loading.moves.joining import Hello, check_hellos, decode, encode, facts_of
from eplb_core.loading.record import agree
from tests.loading.worlds import stores_of

ROOT = Path(__file__).parents[3]
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
    with pytest.raises(MigrationError, match=r"cannot decode .*; install the same eplb_core .* on all ranks"):
        decode(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(MigrationError, match=f"this one: {eplb_core.__version__}"):
        decode(head)


def test_another_format_of_the_same_words_is_refused_after_the_version() -> None:
    told = [decode(encode(hello(rank, **changed), "")) for rank, changed in enumerate([{}, {"format": 2}])]
    with pytest.raises(MigrationError, match=r"format of rank 1 \(=2\) must be as on rank 0"):
        check_hellos(told, 2)
    assert list(hello(0).facts)[:2] == ["version of eplb_core", "format"]


OWN = eplb_core.__version__


@pytest.mark.parametrize(
    ("blobs", "said"),
    [
        ([["9.1", 1], [OWN, 1]], f"rank 1 runs eplb_core {OWN} and rank 0 9.1; install one"),
        ([[OWN], [OWN], ["9.1"]], f"rank 2 runs eplb_core 9.1 and rank 0 {OWN}; install one"),
        ([[OWN], {}], f"rank 1 runs eplb_core of an unknown version and rank 0 {OWN}; install one"),
        ([3, [OWN]], f"rank 1 runs eplb_core {OWN} and rank 0 of an unknown version; install one"),
    ],
)
def test_ranks_of_two_versions_do_not_start(blobs: list[object], said: str) -> None:
    """What ranks found may mean something else to another version: one would start, and the other not."""
    with pytest.raises(LayoutAgreementError, match=said):
        agree._check_versions([json.dumps(blob).encode() for blob in blobs])


@pytest.mark.parametrize("blob", [b"", b"{}", b"[1, 2]", b'["1", "a", [1], true, false, 0, "", [0, 0, 0, 0]]', b"3"])
def test_another_version_that_starts_is_named(blob: bytes) -> None:
    with pytest.raises(
        LayoutAgreementError, match=r"cannot decode what rank 1 says of its layout .*install the same eplb_core"
    ) as caught:
        agree._parse(blob, 1)
    assert caught.value.ranks == (1,)


# ---- two installations, each in a process of its own -----------------------------------------------------------------

FORMATS = {
    "loading/record/wire.py": ("PROTOCOL = 1", "PROTOCOL = 2"),
    "loading/moves/joining.py": ("_FORMAT = 1", "_FORMAT = 2"),
    "loading/transports/base.py": ("_FORMAT = 1", "_FORMAT = 2"),
    "loading/record/file.py": ("eplb-record-1", "eplb-record-2"),
    "files/layout_file.py": ('LAYOUT_FORMAT = "eplb-layout-1"', 'LAYOUT_FORMAT = "eplb-layout-2"'),
}


def install(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """A copy of the library as version 9.1."""
    shutil.copytree(ROOT / "eplb_core", folder / "eplb_core", ignore=shutil.ignore_patterns("__pycache__"))
    version = f'__version__ = "{OWN}"', '__version__ = "9.1"'
    for name, (before, after) in {"_version.py": version, **changes}.items():
        file = folder / "eplb_core" / name
        text = file.read_text()
        assert text.count(before) == 1, name
        file.write_text(text.replace(before, after))
    return folder


def run(folder: Path, installations: list[Path]) -> list[dict[str, Any]]:
    """What each rank says, and under "log" what it wrote beside."""
    ranks = []
    for rank, where in enumerate(installations):
        # Interpreted: a copy would compile all anew.
        environment = {**os.environ, "PYTHONPATH": str(where), "NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("version_process.py")), str(rank), str(folder)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
    said = []
    try:
        for process, where in zip(ranks, installations, strict=True):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-3000:]
            said.append({**json.loads(out.splitlines()[-1]), "log": err})
            assert said[-1]["path"] == str(where / "eplb_core" / "__init__.py")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return said


REFUSED = f"version of eplb_core of rank 1 (=9.1) must be as on rank 0 (={OWN}); no weight was moved"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, FORMATS], ids=["the same formats", "other formats"])
def test_two_installations_work_together_or_say_why_not(changes: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    """Moves and starts need one version. A record and files need one format: a keeper may be older than its engine."""
    (tmp_path / "run").mkdir()
    said = run(tmp_path / "run", [ROOT, install(tmp_path / "other", changes)])
    assert [each["version"] for each in said] == [OWN, "9.1"]
    assert [each["place"] for each in said] == [1, 1]
    for what in ("move", "migrate"):
        assert [each[what] for each in said] == [f"MigrationError: {REFUSED}"] * 2
        assert [each[f"{what} left"] for each in said] == [[0, 1, 2], [3, 3, 0]]
    starts = f"LayoutAgreementError: rank 1 runs eplb_core 9.1 and rank 0 {OWN}; install one version on all ranks"
    assert [each["agree"] for each in said] == [starts] * 2
    if not changes:
        assert [each["commit"] for each in said] == [["ok", "ok", 1, True, "None"]] * 2
        assert [each["record"] for each in said] == [[True, 5, ""]] * 2
        assert [(each["json"], each["npz"]) for each in said] == [(True, True)] * 2
        return
    one, two = (f"{number}, of eplb_core {version}" for number, version in ((1, OWN), (2, "9.1")))
    for each, mine, other in zip(said, (one, two), (two.replace(",", ""), one.replace(",", "")), strict=True):
        begun, done, version, _, error = each["commit"]
        assert (begun, done, version) == ("refused", "refused", None)
        assert f"answers with protocol {other}; this side speaks {mine}" in error
        assert f"refused a client that speaks protocol {other}; this side speaks {mine}" in each["log"]
        format_number = other[0]
        assert f"another kind of file (format 'eplb-record-{format_number}')" in each["record"][2]
        for kind in ("json", "npz"):
            assert f"found 'eplb-layout-{format_number}'; it is no layout, or of another version" in each[kind]


@pytest.mark.slow
def test_two_installations_of_one_version_are_one(tmp_path: Path) -> None:
    """So that what the tests above refuse is refused for the version alone."""
    (tmp_path / "run").mkdir()
    said = run(tmp_path / "run", [ROOT, ROOT])
    for what in ("move", "migrate", "json", "npz"):
        assert [each[what] for each in said] == [True, True]
    assert [each["move left"] for each in said] == [[3, 0, 1], [2, 2, 1]] == [each["migrate left"] for each in said]
    assert [each["agree"] for each in said] == [3, 3]
