"""What a transfer costs by where it comes from, and how many each link may carry."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel, lean_kernel
from eplb_core.placement.search.state import NEVER, Work

# So many transfers are no limit.
NO_LIMIT = 1 << 40

Step: TypeAlias = tuple[float, int, int, int, float, int]
"""Net gain by cost; 0 = exchange of the two slots that follow, 1 = the second is given to the expert in the first, -1 =
no step; cost and number of its transfers."""


class Ask(NamedTuple):
    """What is asked of a step."""

    price: float
    """Gain in balancedness that a transfer of cost 1 must bring."""
    budget: int
    """Most transfers."""
    unit: float
    """Gain in balancedness for each unit of power that goes."""
    refund: float
    """Most that a step back can give back."""
    weighted: bool
    """Shares are solved in each window; else replicas share evenly."""


class Links(NamedTuple):
    """Costs and limits of transfers, and the room that is left on one layer."""

    cost: FloatArray
    """Of a transfer from rank to rank `[R, R]`."""
    cheapest: float
    """Least cost of a transfer between two ranks; 0 where there is one rank."""
    dearest: float
    """The most; also what an expert without a holder costs, which comes from elsewhere."""
    node: IntArray
    """Node of each rank `[R]`."""
    rank_limit: IntArray
    """Most transfers of a layer from rank to rank `[R, R]`; `[0, 0]` = no link has a limit."""
    node_limit: IntArray
    """Most transfers of a layer from node to node `[N, N]`, likewise."""
    rank_room: IntArray
    """What is left of `rank_limit`."""
    node_room: IntArray
    """What is left of `node_limit`."""


def new_links(cost: FloatArray, node: IntArray, rank_limit: IntArray, node_limit: IntArray) -> Links:
    """With all room left."""
    between = cost[~np.eye(len(cost), dtype=np.bool_)]
    cheapest, dearest = (float(between.min()), float(between.max())) if between.size else (0.0, 0.0)
    return Links(cost, cheapest, dearest, np.array(node), rank_limit, node_limit, rank_limit.copy(), node_limit.copy())


@lean_kernel
def mark(row: IntArray, value: int, held: npt.NDArray[np.int8]) -> None:
    """Write `value` for each expert of a row and each rank that holds it there."""
    stride = row.size // held.shape[1]
    for p in range(row.size):
        if row[p] >= 0:
            held[row[p], p // stride] = value


@lean_kernel
def find_sender(e: int, to: int, held: npt.NDArray[np.int8], links: Links) -> int:
    """The cheapest holder whose links to rank `to` have room, the lowest of equals, or -1."""
    best = -1
    for r in range(links.cost.shape[0]):
        if (
            held[e, r] > 0
            and links.rank_room[r, to] > 0
            and links.node_room[links.node[r], links.node[to]] > 0
            and (best < 0 or links.cost[r, to] < links.cost[best, to])
        ):
            best = r
    return best


@lean_kernel
def book(sender: int, to: int, number: int, links: Links) -> None:
    """Take room for so many transfers, or give it back; a sender of -1 takes none."""
    if sender >= 0:
        links.rank_room[sender, to] -= number
        links.node_room[links.node[sender], links.node[to]] -= number


@lean_kernel
def book_row(senders: IntArray, links: Links) -> None:
    """Leave the room that the transfers of a row leave; `senders` says of each slot where its expert comes from."""
    if links.rank_limit.size == 0:
        return
    ranks = links.cost.shape[0]
    stride = senders.size // ranks
    for r in range(ranks):
        for q in range(ranks):
            links.rank_room[r, q] = links.rank_limit[r, q]
    for n in range(links.node_limit.shape[0]):
        for m in range(links.node_limit.shape[0]):
            links.node_room[n, m] = links.node_limit[n, m]
    for p in range(senders.size):
        book(senders[p], p // stride, 1, links)


@lean_kernel
def book_step(
    kind: int, a: int, p: int, keep: bool, row: IntArray, senders: IntArray, work: Work, links: Links
) -> bool:
    """Have the links room for what a step transfers, once those that it undoes have given theirs back?

    Args:
        kind: As of `Step`.
        a: As of `Step`.
        p: As of `Step`.
        keep: Book the step if they have; else leave everything as it was.
        row: Before the step `[P]`.
        senders: Where the expert of each slot comes from `[P]`, -1 = nowhere.
        work: Of the row.
        links: Their room.
    """
    stride = row.size // links.cost.shape[0]
    e, f, full, r = row[a], row[p], a // stride, p // stride
    book(senders[p], r, -1, links)
    if kind == 0:
        book(senders[a], full, -1, links)
    to_there = to_here = -1
    fits = True
    if work.held[e, r] == 0:
        to_there = find_sender(e, r, work.held, links)
        fits = to_there >= 0
        book(to_there, r, 1, links)
    if fits and kind == 0 and work.held[f, full] == 0:
        to_here = find_sender(f, full, work.held, links)
        fits = to_here >= 0
        book(to_here, full, 1, links)
    if fits and keep:
        senders[p] = to_there
        if kind == 0:
            senders[a] = to_here
        return True
    book(to_there, r, -1, links)
    book(to_here, full, -1, links)
    book(senders[p], r, 1, links)
    if kind == 0:
        book(senders[a], full, 1, links)
    return fits


@lean_kernel
def price_fetches(old: IntArray, links: Links, whole: bool, work: Work) -> None:
    """Cost for each rank to hold each expert `[E, R]`: 0 where it does, else that of the cheapest holder's link."""
    cost, fetch = links.cost, work.fetch
    ranks = cost.shape[0]
    stride = old.size // ranks
    fetch[:] = links.dearest
    work.held[:] = 0
    for p in range(old.size if links.cheapest < links.dearest else 0):
        e, source = old[p], p // stride
        if e >= 0:
            for r in range(ranks):
                fetch[e, r] = min(fetch[e, r], cost[source, r])
    for p in range(old.size):
        if old[p] >= 0:
            fetch[old[p], p // stride] = 0.0
            work.held[old[p], p // stride] = 1
    if whole:
        for e in range(work.home.size):
            for r in range(ranks):
                if work.home[e] >= 0 and links.node[r] != work.home[e]:
                    fetch[e, r] = NEVER


@lean_kernel
def keeps_home(e: int, leaves: int, to: int, work: Work, links: Links) -> bool:
    """Is a copy of `e` left in its home node, if one slot of rank `leaves` goes to rank `to`, or -1, to none?"""
    home, node = work.home[e], links.node
    if home < 0 or node[leaves] != home or work.holds[e, leaves] > 1 or (to >= 0 and node[to] == home):
        return True
    found = False
    for i in range(work.num_holders[e]):
        r = work.holders[e, i]
        found = found or (r != leaves and node[r] == home)
    return found


@lean_kernel
def is_allowed(kind: int, a: int, p: int, row: IntArray, senders: IntArray, work: Work, links: Links) -> bool:
    """Does a step leave every expert at home, on links with room?"""
    stride = row.size // links.cost.shape[0]
    e, f, full, r = row[a], row[p], a // stride, p // stride
    if kind == 0 and not (keeps_home(e, full, r, work, links) and keeps_home(f, r, full, work, links)):
        return False
    return links.rank_limit.size == 0 or book_step(kind, a, p, False, row, senders, work, links)


@kernel
def book_layers(old: IntArray, new: IntArray, num_experts: int, links: Links, senders: IntArray) -> None:
    """Choose where each transfer comes from, slot by slot; -1 where no link has room. Written `[L, P]`."""
    ranks = links.cost.shape[0]
    stride = old.shape[1] // ranks
    held = np.zeros((num_experts, ranks), np.int8)
    for layer in range(old.shape[0]):
        senders[layer] = -1
        book_row(senders[layer], links)
        mark(old[layer], 1, held)
        for p in range(old.shape[1]):
            e, r = new[layer, p], p // stride
            known = e < 0 or held[e, r] > 0
            for q in range(r * stride, p):
                known = known or new[layer, q] == e
            if not known:
                senders[layer, p] = find_sender(e, r, held, links)
                book(senders[layer, p], r, 1, links)
        mark(old[layer], 0, held)


@kernel
def follow(before: IntArray, after: IntArray, num_ranks: int, senders: IntArray) -> None:
    """Take the senders along after slots have changed places inside their ranks. All `[L, P]`."""
    stride = before.shape[1] // num_ranks
    mine = np.zeros(stride, np.int64)
    for layer in range(before.shape[0]):
        for first in range(0, before.shape[1], stride):
            mine[:] = senders[layer, first : first + stride]
            senders[layer, first : first + stride] = -1
            for s in range(stride):
                for q in range(stride):
                    if mine[s] >= 0 and after[layer, first + q] == before[layer, first + s]:
                        senders[layer, first + q] = mine[s]
