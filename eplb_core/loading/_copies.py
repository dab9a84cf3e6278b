"""Copies within one process: in which order slots may overwrite each other, and bytes from address to address."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._numba import kernel, memmove

CHUNK_BYTES = 256 << 10
"""How much of a row goes round a circle of places at a time: what a spare place needs."""


@kernel
def order_copies(source: IntArray, spare: int, users: IntArray, ready: IntArray, copies: IntArray) -> int:
    """Order copies that overwrite each other's sources, as if all were made at once.

    Args:
        source: Where each place's new content is, int64 `[n]`: a place, or -1 for a place that stays as it is.
        spare: Name of a place outside; a circle of places passes one content through it.
        users: Scratch `[n]`.
        ready: Scratch `[n]`.
        copies: Filled with (from, to), int64 `[at least 3 n / 2, 2]`.

    Returns:
        The number of copies. Those of circles come last.
    """
    places, waiting, count = len(source), 0, 0
    users[:places] = 0
    for place in range(places):
        if source[place] >= 0 and source[place] != place:
            users[source[place]] += 1
    for place in range(places):
        if source[place] >= 0 and source[place] != place and users[place] == 0:
            ready[waiting] = place
            waiting += 1
    while waiting:
        waiting -= 1
        place = ready[waiting]
        count = _add(copies, count, source[place], place)
        users[place] = -1
        users[source[place]] -= 1
        if users[source[place]] == 0 and source[source[place]] >= 0 and source[source[place]] != source[place]:
            ready[waiting] = source[place]
            waiting += 1
    # What is left are circles: each place has one user.
    for first in range(places):
        if source[first] < 0 or source[first] == first or users[first] <= 0:
            continue
        count = _add(copies, count, first, spare)
        place = first
        while source[place] != first:
            count = _add(copies, count, source[place], place)
            users[place] = -1
            place = source[place]
        count = _add(copies, count, spare, place)
        users[place] = -1
    return count


@kernel
def _add(copies: IntArray, count: int, source: int, to: int) -> int:
    copies[count, 0] = source
    copies[count, 1] = to
    return count + 1


def groups_of(copies: IntArray) -> list[IntArray]:
    """Split copies into groups that have no written place in common, each in the order given.

    Args:
        copies: As `order_copies` gives them.
    """
    written = {to for _, to in copies.tolist() if to >= 0}
    group_of: dict[int, int] = {}
    groups: list[list[list[int]]] = []
    for copy in copies.tolist():
        known = sorted({group_of[place] for place in copy if place in group_of})
        if not known:
            known = [len(groups)]
            groups.append([])
        first = known[0]
        for other in known[1:]:
            groups[first] += groups[other]
            groups[other] = []
            group_of.update({place: first for place, group in group_of.items() if group == other})
        groups[first].append(copy)
        group_of.update({place: first for place in copy if place in written})
    return [np.array(group, dtype=np.int64) for group in groups if group]


@kernel
def copy_rows(copies: IntArray, addresses: IntArray, nbytes: IntArray, spare: int, chunk: int) -> None:
    """Make copies in the order given, for every tensor.

    Args:
        copies: (from, to), int64 `[m, 2]`, as `order_copies` gives: rows of `addresses`, or -1 for the spare place.
        addresses: First byte of each place, int64 `[places, tensors]`.
        nbytes: Bytes of a row of each tensor, int64 `[tensors]`.
        spare: First byte of `chunk` bytes.
        chunk: Bytes of each row that go round a circle before the next ones. Other copies are whole rows: C libraries
            are faster on large ones.
    """
    plain = 0
    while plain < len(copies) and copies[plain, 1] >= 0:
        plain += 1
    for tensor in range(len(nbytes)):
        for k in range(plain):
            memmove(addresses[copies[k, 1], tensor], addresses[copies[k, 0], tensor], nbytes[tensor])
        for start in range(0, nbytes[tensor] if plain < len(copies) else 0, chunk):
            size = min(chunk, nbytes[tensor] - start)
            for k in range(plain, len(copies)):
                source, to = copies[k, 0], copies[k, 1]
                from_address = spare if source < 0 else addresses[source, tensor] + start
                to_address = spare if to < 0 else addresses[to, tensor] + start
                memmove(to_address, from_address, size)


@kernel
def copy_spans(to: IntArray, source: IntArray, nbytes: IntArray) -> None:
    """Copy span by span; addresses and sizes int64 `[n]`."""
    for k in range(len(nbytes)):
        memmove(to[k], source[k], nbytes[k])
