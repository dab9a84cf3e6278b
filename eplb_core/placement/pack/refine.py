"""Local search on one block: take load off the fullest rank until a certificate says stop, or the budget of work ends.

Steps, cheapest first: exchange a replica of the fullest rank for a lighter one of another rank, so that most of the
excess over the target goes; failing that, the exchange that lowers the two most; failing that, give a slot of some
other expert to an expert of the fullest rank. Where nothing helps, the best assignment is kept aside, a few random
exchanges are made, and the search goes on from there. Work is counted in rank pairs looked at, never in time, so the
answer is the same on any machine; a larger budget runs the same steps and then more, so it is never worse.
"""

from __future__ import annotations

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.placement.pack.block import (
    BEST_EXPERT,
    BEST_LOAD,
    BEST_REPLICAS,
    BEST_SHARE,
    EXPERT,
    EXPERT_LOAD,
    HOME,
    HOME_COUNT,
    NODE,
    NONE,
    ORDER,
    PACE,
    QUEUE,
    QUEUE_TIME,
    RANK_LOAD,
    REPLICAS,
    SHARE,
    SPEED,
    WORK,
    Scratch,
    holds,
    put,
)

# A step must lower the time by more than rounding can: exchanges that mirror two loads would go on for ever.
_LESS = 1.0 - 2.0**-40


@kernel
def refine(num_experts: int, cap: IntArray, stride: int, target: float, most: int, scratch: Scratch) -> float:
    """Lower the largest time of any rank towards `target`; returns the time reached.

    Args:
        num_experts: Experts of the block.
        cap: Slots of each rank `[R]`.
        stride: Places a rank S.
        target: Stop when no rank's load / speed is above this.
        most: An expert gets no more replicas than this.
        scratch: The assignment (`share`, `expert`, `load`, `count`), changed in place; `work` limits the search.
    """
    work = scratch.ints[WORK]
    reached = _descend(num_experts, cap, stride, target, most, scratch)
    if reached <= target or work[0] >= work[1]:
        return reached
    best = reached
    _keep(num_experts, cap, stride, scratch)
    while work[0] < work[1]:
        _kick(num_experts, cap, stride, most, scratch)
        reached = _descend(num_experts, cap, stride, target, most, scratch)
        if reached <= best:
            best = reached
            if best <= target:
                return best
            _keep(num_experts, cap, stride, scratch)
        else:
            _restore(num_experts, cap, stride, scratch)
    return best


@kernel
def _descend(num_experts: int, cap: IntArray, stride: int, target: float, most: int, scratch: Scratch) -> float:
    """Steps from the fullest rank while they help; returns the largest time."""
    while True:
        full, time = _exchange_while_better(cap, stride, target, scratch)
        if time <= target or scratch.ints[WORK, 0] >= scratch.ints[WORK, 1]:
            return time
        if not (
            _give_slot(full, time, cap, stride, most, scratch)
            or _take_slot(num_experts, full, time, cap, stride, most, scratch)
        ):
            return time


@kernel
def _exchange_while_better(cap: IntArray, stride: int, target: float, scratch: Scratch) -> tuple[int, float]:
    """Exchange a replica of the fullest rank for a lighter one of another as long as that lowers both below its time.

    The first exchange that takes off three quarters of the excess over the target is made; the lightest ranks are asked
    first, since they have the most room. Where none does, the best one is made. Returns the fullest rank and its time.
    """
    # Taken out of the tuple before the loop: each access to one of its arrays counts a reference in and out.
    reals, ints = scratch.reals, scratch.ints
    share, expert, load, work = reals[SHARE], ints[EXPERT], reals[RANK_LOAD], ints[WORK]
    speed, pace, queue, queue_time = reals[SPEED], reals[PACE], ints[QUEUE], reals[QUEUE_TIME]
    last = cap.size - 1
    for k in range(cap.size):
        queue[k] = k
        _requeue(k, k, load[k] * pace[k], queue, queue_time)
    while True:
        full = queue[last]
        time = queue_time[last]
        if time <= target or work[0] >= work[1]:
            return full, time
        enough = target + 0.25 * (time - target)
        best = time * _LESS
        at = place = other = -1
        for k in range(last):
            r = queue[k]
            if load[full] + load[r] >= best * (speed[full] + speed[r]):
                continue
            work[0] += 1
            reached, i, j = _best_pair(full, r, best, target, cap, stride, share, expert, reals, ints)
            if i >= 0:
                best = reached
                at, place, other = k, i, j
                if best <= enough:
                    break
        if at < 0:
            return full, time
        r = queue[at]
        _exchange(full, place, r, other, cap, stride, reals, ints)
        # The others are in order: first the one rank among them, then the other among all.
        _requeue(at, last - 1, load[r] * pace[r], queue, queue_time)
        _requeue(last, last, load[full] * pace[full], queue, queue_time)


@inline_kernel
def _requeue(k: int, last: int, time: float, queue: IntArray, queue_time: FloatArray) -> None:
    """Move the rank at place `k` of the queue to where its new `time` fits, among the places up to `last`."""
    r = queue[k]
    while k > 0 and queue_time[k - 1] > time:
        queue[k] = queue[k - 1]
        queue_time[k] = queue_time[k - 1]
        k -= 1
    while k < last and queue_time[k + 1] < time:
        queue[k] = queue[k + 1]
        queue_time[k] = queue_time[k + 1]
        k += 1
    queue[k] = r
    queue_time[k] = time


@inline_kernel
def _best_pair(
    full: int,
    r: int,
    limit: float,
    target: float,
    cap: IntArray,
    stride: int,
    share: FloatArray,
    expert: IntArray,
    reals: FloatArray,
    ints: IntArray,
) -> tuple[float, int, int]:
    """Which exchange between ranks `full` and `r` leaves the larger of their times smallest, below `limit`?

    Both ranks' shares descend, so one walk along both meets for each share of `full` the two of `r` around the one that
    would make the times equal. Stops at the first that is good enough for the target. Places are -1 if there is none.
    """
    place = other = -1
    both = reals[SPEED, full] + reals[SPEED, r]
    # A difference of `ideal` would leave both at time `equal`; one above it leaves `r` later, one below it `full`.
    equal = (reals[RANK_LOAD, full] + reals[RANK_LOAD, r]) / both
    ideal = reals[RANK_LOAD, full] - equal * reals[SPEED, full]
    margin = limit - equal
    late_r, late_full = reals[PACE, r], reals[PACE, full]
    start = r * stride
    end = start + cap[r]
    k = start
    for i in range(full * stride, full * stride + cap[full]):
        wanted = share[i] - ideal
        while k < end and share[k] > wanted:
            k += 1
        if (
            k < end
            and (wanted - share[k]) * late_r < margin
            and share[k] < share[i]
            and may_move(i, full, r, stride, expert, ints)
            and may_move(k, r, full, stride, expert, ints)
        ):
            margin = (wanted - share[k]) * late_r
            place, other = i, k
            if equal + margin <= target:
                break
        if (
            k > start
            and (share[k - 1] - wanted) * late_full < margin
            and share[k - 1] < share[i]
            and may_move(i, full, r, stride, expert, ints)
            and may_move(k - 1, r, full, stride, expert, ints)
        ):
            margin = (share[k - 1] - wanted) * late_full
            place, other = i, k - 1
            if equal + margin <= target:
                break
    return equal + margin, place, other


@inline_kernel
def may_move(place: int, source: int, to: int, stride: int, expert: IntArray, ints: IntArray) -> bool:
    """May this replica go from rank `source` to rank `to`? Not onto a second one, and not the last one at home."""
    e = expert[place]
    if ints[WORK, 3] != 0:  # some expert has a home
        node = ints[NODE, source]
        if ints[HOME, e] == node and ints[NODE, to] != node and ints[HOME_COUNT, e] < 2:
            return False
    return ints[REPLICAS, e] == 1 or not holds(expert, to, stride, e)


@inline_kernel
def _exchange(a: int, i: int, b: int, j: int, cap: IntArray, stride: int, reals: FloatArray, ints: IntArray) -> None:
    """Exchange place `i` of rank `a` and place `j` of rank `b`."""
    from_a, share_a = ints[EXPERT, i], reals[SHARE, i]
    from_b, share_b = ints[EXPERT, j], reals[SHARE, j]
    if ints[NODE, a] != ints[NODE, b]:
        for e, source, to in ((from_a, a, b), (from_b, b, a)):
            if ints[HOME, e] == ints[NODE, source]:
                ints[HOME_COUNT, e] -= 1
            elif ints[HOME, e] == ints[NODE, to]:
                ints[HOME_COUNT, e] += 1
    put(a, i, share_b, from_b, cap, stride, reals, ints)
    put(b, j, share_a, from_a, cap, stride, reals, ints)


@kernel
def _give_slot(full: int, time: float, cap: IntArray, stride: int, most: int, scratch: Scratch) -> bool:
    """Give a slot of an expert with spare replicas to one of the fullest rank, if that lowers the largest time."""
    share, expert = scratch.reals[SHARE], scratch.ints[EXPERT]
    load, pace = scratch.reals[RANK_LOAD], scratch.reals[PACE]
    tokens, count, work = scratch.reals[EXPERT_LOAD], scratch.ints[REPLICAS], scratch.ints[WORK]
    node, home, home_count = scratch.ints[NODE], scratch.ints[HOME], scratch.ints[HOME_COUNT]
    best = time * _LESS
    gainer = best_rank = best_place = -1
    for i in range(full * stride, full * stride + cap[full]):
        g = expert[i]
        if count[g] >= most:
            continue
        less = tokens[g] / (count[g] + 1)
        relief = share[i] - less
        if (load[full] - relief) * pace[full] >= best:
            continue
        for r in range(cap.size):
            if holds(expert, r, stride, g):
                continue
            work[0] += 1
            for j in range(r * stride, r * stride + cap[r]):
                f = expert[j]
                if f != work[NONE] and (count[f] < 2 or (home[f] == node[r] and home_count[f] < 2)):
                    continue
                if (load[r] - share[j] + less) * pace[r] >= best:
                    continue
                taken = less - share[j]
                extra = tokens[f] / (count[f] - 1) - share[j] if f != work[NONE] else 0.0
                reached = _time_after(full, r, relief, taken, extra, g, f, best, cap, stride, scratch)
                if reached < best:
                    best = reached
                    gainer, best_rank, best_place = g, r, j
    if gainer < 0:
        return False
    _hand_over(best_rank, best_place, gainer, cap, stride, scratch)
    return True


@kernel
def _take_slot(
    num_experts: int, full: int, time: float, cap: IntArray, stride: int, most: int, scratch: Scratch
) -> bool:
    """Give a slot of the fullest rank to an expert that weighs less there, or to none, if that lowers the largest time.

    The expert that had it keeps its other replicas, whose shares grow.
    """
    share, expert = scratch.reals[SHARE], scratch.ints[EXPERT]
    load, pace = scratch.reals[RANK_LOAD], scratch.reals[PACE]
    tokens, count, work = scratch.reals[EXPERT_LOAD], scratch.ints[REPLICAS], scratch.ints[WORK]
    node, home, home_count = scratch.ints[NODE], scratch.ints[HOME], scratch.ints[HOME_COUNT]
    order = scratch.ints[ORDER]
    best = time * _LESS
    gainer = best_place = -1
    for i in range(full * stride, full * stride + cap[full]):
        f = expert[i]
        if count[f] < 2 or (home[f] == node[full] and home_count[f] < 2):
            continue
        work[0] += 1
        extra = tokens[f] / (count[f] - 1) - share[i]
        others: float = 0.0
        for r in range(cap.size):
            if r != full and (load[r] + extra) * pace[r] > others and holds(expert, r, stride, f):
                others = (load[r] + extra) * pace[r]
        if others >= best:
            continue
        for k in range(num_experts + (work[NONE] >= 0)):  # of equally good ones the heaviest
            g = order[k]
            if g != work[NONE] and (count[g] >= most or holds(expert, full, stride, g)):
                continue
            reached = max(others, (load[full] - share[i] + tokens[g] / (count[g] + 1)) * pace[full])
            if reached < best:
                best = reached
                gainer, best_place = g, i
    if gainer < 0:
        return False
    _hand_over(full, best_place, gainer, cap, stride, scratch)
    return True


@kernel
def _hand_over(rank: int, place: int, gainer: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Put `gainer` into the place of another expert and write the new shares of both on every rank."""
    reals, ints = scratch.reals, scratch.ints
    share, expert, tokens, count = reals[SHARE], ints[EXPERT], reals[EXPERT_LOAD], ints[REPLICAS]
    loser = expert[place]
    if ints[HOME, loser] == ints[NODE, rank]:
        ints[HOME_COUNT, loser] -= 1
    if ints[HOME, gainer] == ints[NODE, rank]:
        ints[HOME_COUNT, gainer] += 1
    none = ints[WORK, NONE]
    if gainer != none:
        count[gainer] += 1
    if loser != none:
        count[loser] -= 1
    put(rank, place, tokens[gainer] / count[gainer], gainer, cap, stride, reals, ints)
    for r in range(cap.size):
        for e in (gainer, loser):
            for i in range(r * stride, r * stride + cap[r]):
                if expert[i] == e and share[i] != tokens[e] / count[e]:
                    put(r, i, tokens[e] / count[e], e, cap, stride, reals, ints)
                    break


@kernel
def _time_after(
    full: int,
    r: int,
    relief: float,
    taken: float,
    extra: float,
    g: int,
    f: int,
    limit: float,
    cap: IntArray,
    stride: int,
    scratch: Scratch,
) -> float:
    """Largest time of the ranks that a slot of `f` on rank `r`, given to `g`, would change; stops at `limit`."""
    expert, load, pace = scratch.ints[EXPERT], scratch.reals[RANK_LOAD], scratch.reals[PACE]
    worst: float = 0.0
    for s in range(cap.size):
        change = 0.0
        if s == r:
            change = taken
        else:
            for i in range(s * stride, s * stride + cap[s]):
                if expert[i] == g:
                    change -= relief
                elif expert[i] == f:
                    change += extra
        # On the fullest rank the two may cancel: then nothing was gained there.
        if change != 0.0 or s == full:
            worst = max(worst, (load[s] + change) * pace[s])
            if worst >= limit:
                return worst
    return worst


@kernel
def _kick(num_experts: int, cap: IntArray, stride: int, most: int, scratch: Scratch) -> None:
    """Give random slots to other experts, or to none, and make random exchanges, one of them with the fullest rank."""
    reals, ints = scratch.reals, scratch.ints
    load, pace, expert, count = reals[RANK_LOAD], reals[PACE], ints[EXPERT], ints[REPLICAS]
    node, home, home_count, work = ints[NODE], ints[HOME], ints[HOME_COUNT], ints[WORK]
    ranks, none = cap.size, work[NONE]
    a = 0
    for r in range(1, ranks):
        if load[r] * pace[r] > load[a] * pace[a]:
            a = r
    for _ in range(_draw(4, work)):
        r = _draw(ranks, work)
        if cap[r] == 0:
            continue
        place = r * stride + _draw(cap[r], work)
        g = ints[ORDER, _draw(num_experts + (none >= 0), work)]
        f = expert[place]
        if (
            f != g
            and (f == none or (count[f] > 1 and not (home[f] == node[r] and home_count[f] < 2)))
            and (g == none or (count[g] < most and not holds(expert, r, stride, g)))
        ):
            _hand_over(r, place, g, cap, stride, scratch)
    for _ in range(_draw(4, work)):
        work[0] += 1
        b = _draw(ranks, work)
        if cap[a] == 0 or cap[b] == 0:
            a = b
            continue
        i = a * stride + _draw(cap[a], work)
        j = b * stride + _draw(cap[b], work)
        if (
            a != b
            and expert[i] != expert[j]
            and may_move(i, a, b, stride, expert, ints)
            and may_move(j, b, a, stride, expert, ints)
        ):
            _exchange(a, i, b, j, cap, stride, reals, ints)
        a = _draw(ranks, work)


@kernel
def _draw(below: int, work: IntArray) -> int:
    """Next number in [0, below) of the generator in `work[2]`: Lehmer's, modulo 2^31 - 1."""
    work[2] = work[2] * 48271 % 2147483647
    return int(work[2] % below)


@kernel
def _copy(reals: bool, source: int, to: int, size: int, scratch: Scratch) -> None:
    """Copy the start of one row of the scratch to another; a loop compiles faster than slices."""
    for i in range(size):
        if reals:
            scratch.reals[to, i] = scratch.reals[source, i]
        else:
            scratch.ints[to, i] = scratch.ints[source, i]


@kernel
def _keep(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    _copy(True, SHARE, BEST_SHARE, cap.size * stride, scratch)
    _copy(False, EXPERT, BEST_EXPERT, cap.size * stride, scratch)
    _copy(True, RANK_LOAD, BEST_LOAD, cap.size, scratch)
    _copy(False, REPLICAS, BEST_REPLICAS, num_experts, scratch)


@kernel
def _restore(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    _copy(True, BEST_SHARE, SHARE, cap.size * stride, scratch)
    _copy(False, BEST_EXPERT, EXPERT, cap.size * stride, scratch)
    _copy(True, BEST_LOAD, RANK_LOAD, cap.size, scratch)
    _copy(False, BEST_REPLICAS, REPLICAS, num_experts, scratch)
    home, home_count = scratch.ints[HOME], scratch.ints[HOME_COUNT]
    node, expert = scratch.ints[NODE], scratch.ints[EXPERT]
    for e in range(num_experts):
        home_count[e] = 0
    for r in range(cap.size):
        for i in range(r * stride, r * stride + cap[r]):
            e = expert[i]
            if home[e] == node[r]:
                home_count[e] += 1
