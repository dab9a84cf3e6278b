"""Top-k ids by request: what vLLM's server returns (vllm-project/vllm pull requests 28284 and 44638), and its like."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_core import load_trace
from eplb_core.errors import FileFormatError
from eplb_core.files.formats import is_layout_file
from eplb_core.load import count_topk

Array = npt.NDArray[Any]
IDS: Array = np.argsort(np.random.default_rng(0).gumbel(size=(60, 3, 16)), axis=2)[:, :, :4].astype(np.uint8)
REQUESTS = [IDS[:25], IDS[25:26], IDS[26:]]
COUNTS = count_topk(IDS.astype(np.int64), 16).tolist()


def as_npy(ids: Array) -> str:
    stream = io.BytesIO()
    np.save(stream, ids)
    return base64.b64encode(stream.getvalue()).decode()


def as_dict(ids: Array) -> dict[str, Any]:
    data = base64.b64encode(ids.tobytes()).decode()
    return {"data": data, "shape": list(ids.shape), "dtype": str(ids.dtype), "start": 0}


@pytest.mark.parametrize("encode", [as_npy, as_dict, np.ndarray.tolist])
def test_responses_are_counted_line_by_line_and_alone(tmp_path: Path, encode: Any) -> None:
    path = tmp_path / "responses.jsonl"
    answers = [{"id": "x", "choices": [{"text": "", "routed_experts": encode(ids)}]} for ids in REQUESTS]
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    trace = load_trace(path, num_experts=16)
    assert trace.load.tolist() == [COUNTS]
    assert (trace.format, trace.top_k) == ("routed-experts", 4)
    assert "3 requests" in trace.notes[0]
    assert load_trace(path, num_experts=16, window_tokens=20).num_windows == 3
    assert not is_layout_file(path)
    with pytest.raises(FileFormatError, match="num_experts=E"):
        load_trace(path)
    path.write_text(json.dumps(answers))
    assert load_trace(path, num_experts=16).load.tolist() == [COUNTS]
    path.write_text(json.dumps(answers[0]))
    assert load_trace(path, num_experts=16).load.sum() == 25 * 3 * 4


def test_arrays_of_several_requests_in_an_npz_are_counted_together(tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", *REQUESTS)
    assert load_trace(tmp_path / "r.npz", num_experts=16).load.tolist() == [COUNTS]
    with pytest.raises(FileFormatError, match="num_experts=E"):
        load_trace(tmp_path / "r.npz")


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (['{"routed_experts": "AAAA"}'] * 2, r"bytes without a shape, as SGLang returns them.*in line 1"),
        (['{"routed_experts": "!"}'] * 2, "line 1"),
        (['{"routed_experts": [[[0.5]]]}'] * 2, "dtype float64"),
        (['{"routed_experts": {"data": "AAAA", "shape": [2, 1, 1], "dtype": "uint8"}}'] * 2, "3 bytes for shape"),
        (['{"routed_experts": {"data": "AAAA", "shape": [1, 1, 3], "dtype": "O"}}'] * 2, "3 bytes for shape|object"),
        (['{"routed_experts": [[[0, 1]]]}', '{"routed_experts": [[[0, 1, 2]]]}'], r"\[1, 1, 2\] and \[1, 1, 3\]"),
        (['{"a": 1}', '{"a": 2}'], "no request with it"),
        (['{"a": 1}', '{"a": '], "in line 2"),
    ],
)
def test_other_lines_are_refused_by_their_number(tmp_path: Path, lines: list[str], match: str) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(FileFormatError, match=match):
        load_trace(tmp_path / "bad.jsonl", num_experts=16)


def test_padding_that_wrapped_is_refused(tmp_path: Path) -> None:
    padded = np.where(np.arange(60)[:, None, None] < 50, IDS, 255).astype(np.uint8)
    (tmp_path / "p.json").write_text(json.dumps({"routed_experts": as_npy(padded)}))
    with pytest.raises(FileFormatError, match="255 twice in a row"):
        load_trace(tmp_path / "p.json", num_experts=256)
