"""Copies within one process: in which order slots may overwrite each other, and bytes from address to address."""

from __future__ import annotations

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


@kernel
def label_groups(copies: IntArray, group: IntArray) -> None:
    """Split copies into groups that have no written place in common.

    Args:
        copies: As `order_copies` gives them, int64 `[m, 2]`.
        group: Filled with the group of each, int64 `[m]`: the number of its first copy.
    """
    for k in range(len(copies)):
        group[k] = k
        for j in range(k):
            written = copies[j, 1] >= 0 and (copies[k, 0] == copies[j, 1] or copies[k, 1] == copies[j, 1])
            if (written or (copies[k, 1] >= 0 and copies[k, 1] == copies[j, 0])) and group[j] != group[k]:
                low, high = min(group[j], group[k]), max(group[j], group[k])
                for i in range(k + 1):
                    if group[i] == high:
                        group[i] = low


@kernel
def fill_jobs(
    copies: IntArray,
    group: IntArray,
    addresses: IntArray,
    row_bytes: IntArray,
    tile: int,
    at: IntArray,
    table: IntArray,
    tiles: IntArray,
    counts: IntArray,
) -> None:
    """Write the copies of one block as jobs, a group of one tensor each, and jobs as tiles.

    Args:
        copies: As `order_copies` gives them.
        group: As `label_groups` gives them.
        addresses: First byte of each place, int64 `[places, tensors]`.
        row_bytes: Bytes of a row, int64 `[tensors]`.
        tile: Words, or bytes of odd rows, of a tile.
        at: Where jobs and copies begin in `table`, and how many there are; the latter go on.
        table: Gets (entry, copies, bytes) of each job, and (from, to) of each copy; 0 is the spare place.
        tiles: Scratch and result `[2, n]`: aligned and odd tiles, each part | job << 32.
        counts: How many of them, int64 `[2]`; go on.
    """
    for first in range(len(copies)):
        if group[first] != first:
            continue
        for tensor in range(len(row_bytes)):
            size, job, entry, length, odd = row_bytes[tensor], at[2], at[3], 0, row_bytes[tensor] % 16 != 0
            for k in range(first, len(copies)):
                if group[k] == first:
                    for side in range(2):
                        place = copies[k, side]
                        address = addresses[place, tensor] if place >= 0 else 0
                        table[at[1] + 2 * (entry + length) + side] = address
                        odd = odd or address % 16 != 0
                    length += 1
            table[at[0] + 3 * job], table[at[0] + 3 * job + 1], table[at[0] + 3 * job + 2] = entry, length, size
            kind = 1 if odd else 0
            reach = tile if odd else 4 * tile
            for part in range((size + reach - 1) // reach):
                tiles[kind, counts[kind]] = part + (job << 32)
                counts[kind] += 1
            at[2], at[3] = job + 1, entry + length


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
