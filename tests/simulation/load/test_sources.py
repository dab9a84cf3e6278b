"""Windows from memory, from a file bit by bit, from a function, from tokens: one replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eplb_core import FileFormatError, TokenTrace, Topology, Trace, save_trace, simulate, stream_trace
from eplb_core._arrays import IntArray
from eplb_core.simulation import Simulation, TraceStream

TWO = Topology(num_ranks=2)
LOAD = np.random.default_rng(0).integers(0, 50, (7, 2, 4))


def replay(source: object, **options: object) -> Simulation:
    return simulate(source, topology=TWO, num_slots=6, policy="place", interval=2, history=3, **options)  # type: ignore[arg-type]


def same(one: Simulation, other: Simulation) -> bool:
    return np.array_equal(one.max_load, other.max_load) and one.digests == other.digests


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4], [5, 0, 2]])
def test_a_stream_in_blocks_of_any_size_replays_as_the_whole(sizes: list[int]) -> None:
    def blocks() -> Iterator[IntArray]:
        ends = np.cumsum(sizes)
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            yield LOAD[start:end]

    assert same(replay(TraceStream(blocks)), replay(LOAD))


@pytest.mark.parametrize("windows", [1, 2, 16])
def test_a_file_that_is_read_bit_by_bit_replays_as_the_whole(tmp_path: Path, windows: int) -> None:
    save_trace(Trace(LOAD), tmp_path / "trace.npz")
    np.save(tmp_path / "load.npy", LOAD.astype(np.float32))
    stream = stream_trace(tmp_path / "trace.npz", windows=windows)
    assert stream.num_windows == 7
    assert same(replay(stream), replay(LOAD))
    assert same(replay(stream), replay(LOAD))  # once more from the start
    assert same(replay(stream_trace(tmp_path / "load.npy", windows=windows)), replay(LOAD.astype(np.float64)))


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", load=LOAD)
    with pytest.raises(FileFormatError, match=r"load\.npy"):
        stream_trace(tmp_path / "other.npz")
    assert stream_trace(tmp_path / "other.npz", key="load").num_windows == 7
    np.save(tmp_path / "flat.npy", LOAD[0])
    with pytest.raises(FileFormatError, match=r"shape \[2, 4\], int64"):
        stream_trace(tmp_path / "flat.npy")
    (tmp_path / "text.npy").write_text("expert load")
    with pytest.raises(FileFormatError, match="magic"):
        stream_trace(tmp_path / "text.npy")
    np.save(tmp_path / "cut.npy", LOAD)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    with pytest.raises(FileFormatError, match="ends in window 6"):
        replay(stream_trace(tmp_path / "cut.npy"))


def test_a_stream_that_changes_its_shape_or_ends_too_soon_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 2, 3\].*2 layers and 4 experts"):
        replay(TraceStream(lambda: [LOAD[:1], LOAD[:1, :, :3]]))
    with pytest.raises(ValueError, match=r"`interval` \(=2\)"):
        replay(TraceStream(lambda: [LOAD[:2]]))


def test_tokens_make_windows_and_what_is_left_over_is_dropped() -> None:
    ids = np.array([[[0, 1]], [[0, 2]], [[1, -1]], [[2, 0]], [[1, 2]]])
    trace = TokenTrace(ids, num_experts=3, window_tokens=2)
    assert trace.load.tolist() == [[[2, 1, 1]], [[1, 1, 1]]]
    (block,) = trace.blocks(5)
    assert block.by_source is not None
    sent = block.by_source(2)
    assert sent[0, :, 0].tolist() == [[1, 1, 0], [1, 0, 1]]  # the first token lies on rank 0, the second on rank 1
    assert np.array_equal(block.by_source(3).sum(axis=1), block.load)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([[0, 1]], ValueError, r"shape \[1, 2\]"),
        ([[[0]]], ValueError, "2 tokens or more"),
        ([[[0]], [[3]]], IndexError, "3"),
        ([[[0]], [[-2]]], IndexError, "-2"),
    ],
)
def test_bad_tokens_raise_with_the_numbers(ids: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TokenTrace(ids, num_experts=3, window_tokens=2)  # type: ignore[arg-type]


def test_tokens_without_layers_are_windows_all_the_same() -> None:
    assert TokenTrace(np.zeros((4, 0, 1), dtype=np.int64), num_experts=3, window_tokens=2).load.shape == (2, 0, 3)


@pytest.mark.parametrize("text", ["(-1, 2, 3)", "(9, 99999999, 99999999)", "(2, 2, 10**9)", "(" * 60])
def test_a_header_that_declares_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {text}, }}".ljust(117) + "\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.encode())
    with pytest.raises(FileFormatError, match=r"x.npy: expected an array `expert_load` \[T, L, E\]"):
        stream_trace(tmp_path / "x.npy")


def test_a_damaged_archive_is_refused_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    save_trace(Trace(LOAD), tmp_path / "x.npz")
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[:-30])
    with pytest.raises(FileFormatError, match=r"x.npz: expected .*, found BadZipFile"):
        stream_trace(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(whole[:80] + bytes(20) + whole[100:])
    with pytest.raises(FileFormatError, match=r"x.npz: expected .*, found"):
        replay(stream_trace(tmp_path / "x.npz"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="found a device or pipe"):
        stream_trace(tmp_path / "pipe")


def test_a_notebook_shows_tokens_and_how_uneven_they_are() -> None:
    shown = TokenTrace(np.array([[[0, 2]], [[0, 1]], [[0, 3]], [[0, 2]]]), 4, 2)._repr_html_()
    assert "4 tokens in windows of 2, 1 layers, 4 experts, top 2" in shown
    assert "<td>0</td><td>1</td><td>0</td><td>2.00</td>" in shown
