"""Pickles that would keep a reader busy are refused before torch sees them; what torch writes passes."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import load_trace
from eplb_core.errors import FileFormatError
from eplb_core.files.pickles import check_pickle


def data_of(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


RECORD = {"rids": ["a"] * 9, "rank": 0, "counts": torch.ones(2, 3), "size": torch.Size([2, 3]), "none": None}


@pytest.mark.parametrize(
    "value",
    [
        {"records": [RECORD, dict(RECORD, rank=1)] * 2, "dtype": torch.int64, "device": torch.device("cpu")},
        OrderedDict(a=torch.ones(3, dtype=torch.bfloat16), b=torch.nn.Parameter(torch.ones(2))),
        Counter("ab"),
        [(1, 2, 3, 4), (), (1,), {}, 2**70, 1.5, True, "x" * 4096, {1}, b"x"],
        torch.ones(4)[1:3],
    ],
)
def test_what_torch_writes_passes(value: object) -> None:
    check_pickle(data_of(value))


def laughing(levels: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (data_of("x" * 5000), "a pickled text of 5,000 characters"),
        (b"\x80\x02c" + b"m" * 5000 + b"\nx\n.", "a pickled text of 5,002 characters"),
        (data_of(laughing(9)), "more than 4 repeated references to lists"),
        (b"\x80\x02](K\x01K\x02e)R.", "calls appends|calls empty_list"),
        (b"\x80\x02]q\x00h\x00)\x81.", "calls empty_list"),
        (b"\x80\x02)R.", "calls nothing"),
    ],
)
def test_what_would_keep_a_reader_busy_is_refused(raw: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_pickle(raw)


def test_a_file_whose_refusal_torch_would_search_for_hours_is_refused_at_once(tmp_path: Path) -> None:
    """A call of a long text: torch quotes it, and looks for words in the quotation in quadratic time."""
    path = tmp_path / "counts.pt"
    raw = b"\x80\x02X" + (1 << 24).to_bytes(4, "little") + b"a" * (1 << 24) + b")R."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3")
    with pytest.raises(FileFormatError, match=r"counts\.pt: .* a pickled text of 16,777,216 characters"):
        load_trace(path)


def test_small_pickles_of_plain_python_pass() -> None:
    for protocol in range(2, 5):
        check_pickle(pickle.dumps({"a": [1, (2, 3)], "b": np.int64(3).item()}, protocol=protocol))
