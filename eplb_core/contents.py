"""What does an array hold: expert load, top-k ids of tokens, a layout's map, or something else? Decided here alone.

Values decide, with the name that a file gives where that says something. The signs of each kind:

* load: the layers of a window have equal totals, since every token passes all of them;
* top-k ids: no row repeats a number, though the rows would by chance, were they counts;
* a map: every row holds every number from 0 to its largest.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray, to_ids, to_numpy

AnyArray: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["load", "tokens", "map", "other"]

MAX_ID = 8192
"""Ids lie below this: no model has as many experts."""
MAX_LAYERS, MANY_LAYERS, MANY_EXPERTS = 1024, 128, 1024
"""More layers are no model's, and above the others the name of the array, or the caller, must say that it is a load."""
SURE, HINT = 10.0, 4.0
"""Expected repeats within rows, were an array without any counts: e**-10 and e**-4 is the chance of none."""
EQUAL, UNLIKE = 0.005, 0.25
"""Largest difference of equal totals, and least deviation of numbers that differ, relative to their mean."""
_MOST_ROWS, _MOST_LINES, _FEW_LINES = 4096, 64, 8
_BY_HAND = 4096
"""Numbers of which nobody writes as many."""

_NAMES: tuple[tuple[Kind, str], ...] = (
    ("map", r"physical_to_logical(_map)?|phy2log|phy_to_log|p2l|expert_map"),
    (
        "other",
        r"logical_to_physical|log2phy|dispatch|replica|logcnt|top_?k_weights|logits|prob|scores|seq_?lens?|layer_ids",
    ),
    ("other", r"(physical|slot)_(loads?|counts?)"),
    ("tokens", r"top_?k(_?(ids?|idx|ind\w+|experts?))?$|routed_experts|selected_experts|experts?_(ids?|ind\w+|idx)"),
    ("load", r"(^|_)(loads?|counts?|tokens_per_expert)($|_)"),
)


class Contents(NamedTuple):
    """What an array holds, and why."""

    kind: Kind
    """load, tokens (top-k ids), map (of a layout), or other."""
    why: str
    """What speaks for it."""
    sure: bool = True
    """False where there are mere signs: a name, or the caller's word, that says load outweighs them."""
    doubt: str = ""
    """What speaks against a load, where it is taken for one."""


def kind_by_name(name: str) -> Kind | None:
    """What the name of an array says it holds, or None."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return next((kind for kind, words in _NAMES if re.search(words, plain)), None)


def contents_of(array: AnyArray, name: str = "") -> Contents:
    """Say what an array holds.

    Args:
        array: Any array.
        name: What the file, or the caller, calls it; empty where nobody does.

    Returns:
        The kind, with the reason. `load` also where nothing speaks against it.

    Cost:
        Looks at 4,096 rows at most, and at sums over 64 x 64 lines of each axis.
    """
    named = kind_by_name(name)
    if named not in (None, "load"):
        return Contents(named, f"it is named `{name}`")
    found = _by_values(array)
    if named == "load" and found.kind != "load" and not found.sure:
        return Contents("load", f"it is named `{name}`", False, found.why)
    return found


def _by_values(array: AnyArray) -> Contents:
    shape = list(array.shape)
    if array.dtype.kind not in "iuf" or not array.size or array.ndim not in (2, 3):
        return Contents("other", f"it has shape {shape} of {array.dtype}")
    whole = array[None] if array.ndim == 2 else array
    rows = _sample(whole)
    least = rows.min()
    if not np.isfinite(rows).all() or least < -1 or -1 < least < 0:
        return Contents("other", "it has values that are no counts: negative, or not finite")
    if float(rows.max()) > 1e250:  # sums must not overflow
        whole, rows = np.ldexp(whole, -700), np.ldexp(rows, -700)
    totals = rows.sum(axis=2, dtype=np.float64)
    is_load = bool(least >= 0) and _is_equal(totals)
    if rows.max() < MAX_ID and (rows == np.floor(rows)).all():
        found = _as_ids(rows.astype(np.int64), is_load)
        if found is not None:
            return found
    if least < 0:
        return Contents("other", "it has negative values")
    return _as_load(whole, rows, totals, is_load)


def _sample(whole: AnyArray) -> AnyArray:
    """Windows and layers, evenly spaced, `_MOST_ROWS` rows at most."""
    across = -(-whole.shape[1] // _MOST_ROWS)
    step = -(-len(whole) * -(-whole.shape[1] // across) // _MOST_ROWS)
    return whole[::step, ::across]


# ---- ids -------------------------------------------------------------------------------------------------------------


def _as_ids(ids: IntArray, is_load: bool) -> Contents | None:
    if ids.shape[2] > 1:  # what a buffer of ids has beyond its tokens is 0
        ids = ids[ids.any(axis=(1, 2))]
        ids = ids[:, ids.any(axis=(0, 2))]
    if not ids.size:
        return None
    rows = ids.reshape(-1, ids.shape[2])
    for part in (rows[:16], rows):  # a few rows say it of most loads
        ordered = np.sort(part, axis=1)
        grows = (np.diff(ordered, axis=1) > 0) | (ordered[:, 1:] < 0)
        distinct = (grows & (ordered[:, 1:] >= 0)).sum(axis=1) + (ordered[:, 0] >= 0)
        is_map, no_repeat = (distinct == ordered.max(initial=0) + 1).all(), grows.all()
        if not (is_map or no_repeat):
            return None
    found = _as_map(rows, is_load) if is_map else None
    return found or (_as_tokens(ids) if no_repeat and not is_load else None)


def _as_map(rows: IntArray, is_load: bool) -> Contents | None:
    """Each row holds every number from 0 to the same largest one."""
    count, slots = int(rows.max()) + 1, rows.shape[1]
    few = slots >= 2 * count
    if count < 3 or slots > 4 * count or (few and len(rows) < 2):
        return None
    if is_load and count < 8:
        return None
    sure = count >= 8 and len(np.unique(rows, axis=0)) > 2  # a row or two that count up are as likely made by hand
    return Contents("map", f"every row holds each number from 0 to {count - 1}, as slots hold experts", sure)


def _as_tokens(ids: IntArray) -> Contents | None:
    """No row repeats a number; is that chance?"""
    width, top = ids.shape[2], int(ids.max()) + 1
    rows = ids.reshape(-1, width)
    if width == 1:
        if len(rows) < 8 or rows.min() == rows.max():
            return None
        return Contents("tokens", "one number a row, and one expert alone has nothing to place", len(rows) >= 64)
    if top <= 1:
        return None
    unlike = len(np.unique(rows, axis=0))
    evenly = unlike * width * (width - 1) / 2 / top
    # In a table from experts to slots each column has its own numbers, but a row fills what there is.
    dense = width >= 16 and top <= 4 * width
    expected = evenly if dense else min(evenly, _meetings(ids, top))
    if expected < HINT:
        return None
    what = f"no row repeats a number (0 to {top - 1}), where counts would {expected:,.0f} times"
    return Contents("tokens", what, expected >= SURE and (unlike > 2 or not dense))


def _meetings(ids: IntArray, top: int) -> float:
    """Repeats within rows to be expected, were each column drawn for itself: by layer where it has rows enough."""
    by_layer = ids.transpose(1, 0, 2) if len(ids) >= 16 else ids.reshape(1, -1, ids.shape[2])
    found = 0.0
    for rows in by_layer:
        counts = np.stack([np.bincount(column[column >= 0], minlength=top) for column in rows.T]).astype(np.float64)
        found += (np.square(counts.sum(axis=0)).sum() - np.square(counts).sum()) / 2 / len(rows)
    return found


# ---- loads -----------------------------------------------------------------------------------------------------------


def _as_load(whole: AnyArray, rows: AnyArray, totals: FloatArray, is_load: bool) -> Contents:
    layers, experts = whole.shape[1:]
    if layers > MANY_LAYERS or experts > MANY_EXPERTS:
        sure = layers > MAX_LAYERS or experts > MAX_ID
        return Contents("other", f"{layers:,} layers of {experts:,} experts are no model's", sure)
    found = None if is_load else _other_axis(whole)
    if found is not None:
        return found
    total = totals.mean()
    # Softmax, percent, top-k weights of a router that scales them, or shares of a mean expert.
    as_share = total < 1.001 * experts or abs(total - 100.0) < 1e-3
    is_share = abs(total - 1.0) < 1e-3 or (as_share and (rows != np.floor(rows)).any())
    if is_share and rows.dtype.kind == "f" and totals.size > 1 and (abs(totals - total) < 1e-3 * total).all():
        what = f"every row adds up to {total:.4g}: shares or probabilities, not tokens"
        return Contents("other", what, False)
    if totals.size >= 8 and any(_counts_up(rows[:, :, column].ravel()) for column in range(min(3, experts))):
        return Contents("other", "one of its first columns counts rows: a table, not an array of counts alone", False)
    least, mean = rows.min(), rows.mean()
    if experts >= 16 and rows.size >= 64 and 1 <= least < rows.max() and mean <= 4 and (rows == np.floor(rows)).all():
        return Contents("other", f"no number is 0, and they are {mean:.1f} in the mean: as replicas are counted", False)
    if not is_load and experts >= 8 and rows.size >= 64 and rows.max() == 1 and ((rows == 0) | (rows == 1)).all():
        return Contents("other", "all its numbers are 0 or 1, as in a mask", False)
    if len(rows) >= 3 and rows[0].size >= 64 and _adds_up(rows):
        what = "no number falls from a window to the next: they are added up, and numpy.diff(array, axis=0) undoes it"
        return Contents("other", what, False)
    margin = _margin(whole)
    if margin:
        return Contents("other", f"{margin}: totals beside what they add up, to be cut off", False)
    doubt = _doubt(whole, totals)
    if is_load:
        return Contents("load", "the layers of a window have equal totals", doubt=doubt)
    return Contents("load", "nothing speaks against it", False, doubt)


def _counts_up(column: AnyArray) -> bool:
    """0, 1, 2, .. or 0, 0, 1, 1, .., again and again."""
    steps, least = np.diff(column), column.min()
    return bool(column.max() >= least + 3 and ((steps == 0) | (steps == 1) | (column[1:] == least)).all())


def _adds_up(rows: AnyArray) -> bool:
    """Does no number fall, while half of them rise? Traffic may grow for a while, but hardly by equal steps."""
    later, before = rows[1:], rows[:-1]
    if not ((later >= before).all() and (later > before).mean() > 0.5):
        return False
    totals = rows.sum(axis=(1, 2), dtype=np.float64)
    steps = np.diff(totals)
    by_steps = np.ptp(steps) <= 0.5 * steps.mean() or totals[-1] < 2 * totals[0]
    return len(rows) >= 4 or bool(by_steps)


def _margin(whole: AnyArray) -> str:
    """Is the first or last of an axis the sum of the others, or their mean, as tables end in totals?"""
    for axis, name in enumerate(("window", "layer", "expert")):
        moved = np.moveaxis(whole, axis, 0)
        steps = [-(-length // _FEW_LINES) for length in moved.shape[1:]]
        lines = moved[:, :: steps[0], :: steps[1]].astype(np.float64)
        if len(lines) < 4:
            continue
        for end, rest in ((lines[0], lines[1:]), (lines[-1], lines[:-1])):
            if np.count_nonzero(end) < 4 or (rest == rest[:1]).all():  # what is all alike is its own mean
                continue
            if np.allclose(end, rest.sum(axis=0), rtol=1e-6, atol=0):
                return f"its {'first' if end is lines[0] else 'last'} {name} is the sum of the others"
            if axis < 2 and np.allclose(end, rest.mean(axis=0), rtol=1e-6, atol=0):
                return f"its {'first' if end is lines[0] else 'last'} {name} is the mean of the others"
    return ""


def _doubt(whole: AnyArray, totals: FloatArray) -> str:
    """What a recorded load would hardly show."""
    if totals.size == 1:
        return "one layer of one window shows nothing of its kind"
    if whole.min() == whole.max():
        return "all its numbers are equal"
    if whole.shape[2] >= 16 and (
        (whole[:, :, 1:] <= whole[:, :, :-1]).all() or (whole[:, :, 1:] >= whole[:, :, :-1]).all()
    ):
        return "every row is sorted, as if the order of the experts were lost"
    differs = float(_spread(totals).max())
    if differs > 2 * EQUAL:
        return f"layers' totals differ by up to {differs:.1%} in a window, though each token passes all layers"
    some = whole[:_MOST_LINES, :_MOST_LINES].astype(np.float64)
    between = [abs(np.diff(some, axis=axis)).mean() if some.shape[axis] > 1 else 0.0 for axis in (0, 1)]
    if some.shape[1] > 1 and between[1] < 0.6 * between[0]:
        return "layers are more alike than windows, as if the two were swapped"
    return ""


def _spread(totals: FloatArray) -> FloatArray:
    """(max - min) / mean of each row, over what is not zero."""
    used = totals > 0
    low = np.where(used, totals, np.inf).min(axis=1)
    mean = totals.sum(axis=1) / np.maximum(used.sum(axis=1), 1)
    spread: FloatArray = np.where(used.sum(axis=1) > 1, totals.max(axis=1) - low, 0.0) / np.where(mean > 0, mean, 1.0)
    return spread


def _is_equal(totals: FloatArray) -> bool:
    """Do the layers of every window have one total, or the windows of the only layer?"""
    given = totals if totals.shape[1] > 1 else totals.T
    return bool(given.shape[1] > 1 and (_spread(given) <= EQUAL).all())


def _other_axis(whole: AnyArray) -> Contents | None:
    """Are totals equal along another axis than a load's, so that axes are in another order?"""
    for axis, name in enumerate(("first", "second", "last")):
        moved = np.moveaxis(whole, axis, 0)
        steps = [-(-length // _MOST_LINES) for length in moved.shape[1:]]
        lines = moved[:, :: steps[0], :: steps[1]].astype(np.float64)
        lines /= max(lines.max(), 1.0)
        totals = lines.sum(axis=0)
        for along in (1, 2):
            if not 4 <= len(lines) <= 1024 or lines.shape[along] < 4:
                continue
            # Windows that are all alike have equal totals, too.
            unlike = lines.std(axis=along).mean() > UNLIKE * lines.mean()
            used = (totals > 0).mean() > 0.5  # experts that always or never get all tokens have equal totals, too
            if unlike and used and (_spread(totals if along == 2 else totals.T) <= EQUAL).all():
                what = "windows and layers seem swapped" if axis == 2 else f"its {name} axis seems to be the experts"
                return Contents("other", f"totals are equal along another axis than a load's: {what}", axis != 2)
    return None


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(found: Contents, array: AnyArray, path: str = "") -> tuple[str, str]:
    """Say what was found in place of a load, and the two calls of which one settles it.

    Args:
        found: What `contents_of` says.
        array: Of what.
        path: The file that it is in, or empty for an array in memory.
    """
    words = {"tokens": "top-k ids", "map": "a layout's map", "other": "no load", "load": "a load"}
    what = f"{words[found.kind]} {list(array.shape)} {array.dtype}: {found.why}"
    if path:
        as_load = 'holds="load" (--holds load) if it is one'
        ways = {
            "tokens": "count ids by load_trace(path, num_experts=E, window_tokens=N) (--experts E --window-tokens N)",
            "map": "read a layout by load_layout(path, topology) (eplb inspect FILE --ranks R)",
        }
    else:
        as_load = 'Trace(load, holds="load") if it is a load'
        ways = {
            "tokens": "count ids by TokenTrace(topk_ids, num_experts=E, window_tokens=N)",
            "map": "make a layout by ExpertLayout(map, num_experts=E, topology=..)",
        }
    way = ways.get(found.kind, "put the axes in the order [T, L, E] by numpy.moveaxis or reshape")
    return what, f"{way}, or give {as_load}"


def check_is_load(array: AnyArray, name: str) -> None:
    """Raise ValueError for an array in memory that is no load, with the calls that read it.

    Signs that are not sure are passed over where the numbers are so few that they may be made by hand.
    """
    found = contents_of(array, name if array.size < _BY_HAND else "")
    if found.kind != "load":
        what, mend = refused(found, array)
        raise ValueError(f"`{name}` must be tokens per expert, but looks like {what}; {mend}")


def to_tokens(value: object, name: str) -> IntArray:
    """Copy top-k ids of any integer dtype to int64.

    Raises:
        ValueError: Most rows repeat an id, as no token does, some are all 0, or -1 has become the top of an unsigned
            dtype.
        TypeError: Not integers.
    """
    array = to_numpy(value, name)
    ids = to_ids(array.astype(np.int64) if array.dtype.kind == "u" else array, name)
    if ids.ndim < 2 or not ids.size:
        return ids
    rows = ids.reshape(-1, ids.shape[-1])
    rows = rows[:: -(-len(rows) // _MOST_ROWS)]
    ordered = np.sort(rows, axis=1)
    repeats = (np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)
    if array.dtype.kind == "u" and (repeats & (ordered[:, 1:] == np.iinfo(array.dtype).max)).any():
        top = np.iinfo(array.dtype).max
        raise ValueError(f"`{name}` ({array.dtype}) has {top} twice in a row: padding that was -1; put -1 back, signed")
    share = repeats.any(axis=1).mean()
    unused = (len(rows) >= 8) * (repeats & (ordered[:, 1:] == 0)).all(axis=1).mean() if ids.shape[-1] > 1 else 0.0
    if unused > 0.02:
        raise ValueError(
            f"`{name}` (shape {list(ids.shape)}) must be distinct in a row, but {unused:.0%} of the rows are all 0, as "
            "the rest of a buffer is: cut it off, or put -1 there"
        )
    if len(rows) >= 8 and share > 0.5:
        raise ValueError(
            f"`{name}` (shape {list(ids.shape)}) must be distinct in a row, but {share:.0%} of the rows repeat an id: "
            "no router does; a load is read by Trace(load)"
        )
    return ids
