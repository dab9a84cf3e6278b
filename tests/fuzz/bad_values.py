"""Other values for a valid argument: of the wrong kind, shape or dtype, far too large, empty, of a foreign order."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

import eplb_core as eplb


class Foreign:
    """An object that knows nothing, not even how to say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Liar:
    """Says that it is an array and fails."""

    shape = (2, 4)
    dtype = np.dtype(np.int64)

    def __array__(self, *args: object, **options: object) -> Any:
        raise RuntimeError("no array")


HUGE = 10**5000
NUMBERS = (None, True, 0, -1, 1, 2**31, 2**62, 2**63, -(2**63) - 1, 0.5, 1e308, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (*NUMBERS, -float("inf"), 1j, "", "x", "\x1b[2J", "\ud800", b"x", [], {}, (), {"a": 1}, set())
LISTS: tuple[Any, ...] = (
    [[1, 2], [3]],
    [None],
    ["a"],
    [float("nan")],
    [-1],
    [0.5],
    [1, 1],
    [2**62],
    range(3),
    {"a": 1},
)


def bad_values(value: object) -> dict[str, Any]:
    """Other values for a valid one, by what they are."""
    found: dict[str, Any] = {repr(other): other for other in (*OTHERS, *LISTS)} | {
        "a huge int": HUGE,
        "a huge negative int": -HUGE,
        "a list of a huge int": [HUGE],
        "long text": "A" * 5000,
        "an object": Foreign(),
        "a failing array": Liar(),
        "a function": lambda *args, **options: None,
        "a generator": (number for number in (0, 1)),
        "an object array": np.array([None, "x"], dtype=object),
        "an array of text": np.array(["a"]),
        "an array of dates": np.array([1], dtype="M8[s]"),
        "a 0-d array": np.array(1),
        "an empty array": np.zeros((0, 4)),
        "a huge view": np.broadcast_to(np.int64(1), (1 << 20, 1 << 20)),
        "a meta tensor": torch.ones(2, 4, device="meta"),
        "a sparse tensor": torch.ones(2, 4).to_sparse(),
        "a tensor that records gradients": torch.ones(2, 4, requires_grad=True),
        "a tensor of booleans": torch.ones(2, 6, dtype=torch.bool),
        "another layout": eplb.ExpertLayout([[0, 1, 2]], 3, topology=eplb.Topology(3)),
        "a layout of no layers": eplb.ExpertLayout(np.empty((0, 6), np.int64), 4, topology=eplb.Topology(2)),
        "another topology": eplb.Topology(rank_to_node=[0, 0, 1]),
    }
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found |= {"float of it": float(value), "more": value + 1, "text of it": str(value)}
        found |= {"numpy's": np.float32(value), "an array of it": np.array([value])}
    if isinstance(value, str) and value:
        found |= {"upper": value.upper(), "longer": value + "x"}
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and np.isscalar(value[0])):
        found |= bad_arrays(np.asarray(value))
    if isinstance(value, torch.Tensor):
        for name, other in bad_arrays(value.numpy().copy()).items():
            with contextlib.suppress(TypeError, ValueError):  # what torch does not have
                found[f"tensor, {name}"] = torch.from_numpy(np.array(other))
    return found


def bad_arrays(value: Any) -> dict[str, Any]:
    """Other arrays for a valid one."""
    found = {
        "a dimension more": value[None],
        "swapped bytes": value.astype(value.dtype.newbyteorder()),
        "zeros": np.zeros_like(value),
    }
    if value.ndim:
        read_only = value.copy()
        read_only.flags.writeable = False
        found |= {
            "a row fewer": value[:-1],
            "a column fewer": value[..., :-1],
            "a row more": np.concatenate([value, value[:1]]),
            "a dimension fewer": value[0],
            "no columns": value[..., :0],
            "reversed": value[..., ::-1],
            "Fortran's order": np.asfortranarray(value),
            "every second": np.repeat(value, 2, axis=-1)[..., ::2],
            "read-only": read_only,
        }
    for dtype in ("O", "U9", "u1", "u8", "f2", "f4", "f8", "i1", "c16", "?"):
        found[f"of {dtype}"] = value.astype(dtype)
    numbers: list[tuple[Any, float]] = [(np.float64, each) for each in (np.nan, np.inf, -np.inf, -1.0, 1e308, 5e-324)]
    if value.dtype.kind == "i":
        numbers += [(np.int64, each) for each in (-1, -2, 2**31, 2**62, -(2**63), 2**63 - 1)]
    for kind, number in numbers:
        other = value.astype(kind)
        other.reshape(-1)[-1:] = number
        found[f"with {number!r}"] = other
    return found
