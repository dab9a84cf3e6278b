"""The Triton kernels: what `ops` and `quota` do in torch, bit for bit, in one launch each.

No argument is specialized on its value or alignment, so that a new number of tokens compiles nothing while serving.
"""

# The kernels' language is not quite Python: no types, and names that a kernel does not use cost nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: RUF059, SIM102
from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from eplb_core.dispatch.constants import FIRST_BITS, MOST_PAIR_TOKENS, NUM_BLOCKS, WINDOWS, Mode, row_parts
from eplb_core.dispatch.quota import SCALE_BITS, SHORTEST_STEP, STEP_BITS, STEPS

_FIRST_BITS: tl.constexpr = tl.constexpr(FIRST_BITS)
_FIRST: tl.constexpr = tl.constexpr((1 << FIRST_BITS) - 1)
DIRECT_ELEMENTS = 8192
"""Up to so many elements are added to the counts one by one."""
BLOCKS = ((DIRECT_ELEMENTS, 128, 4), (65536, 256, 4), (float("inf"), 1024, 4))
"""Up to how many elements a program takes how many, with how many warps: about one program for each multiprocessor."""
NEAR_BLOCK = 128
"""Elements of a program where sets of nodes are chosen, one for each thread; twice as many where there are many."""
NARROW = 8
"""Candidates up to which the solver takes a way of its own: layouts rarely have experts with more."""
SUB_BLOCK = 128
"""Elements whose places among each other are found by comparing all pairs."""

PAIR_CELLS = 4096
"""Pairs of ids that are looked at together where pairs are counted."""

_NO_VALUES = ["rows", "ids_row", "ids_column", "out_row", "out_column"]
_NO_ALIGNMENT = ["ids", "out", "table", "settings", "draws", "count", "state", "errors", "num_tokens", "batch"]
_NO_ALIGNMENT += ["sends"]
_NO_ALIGNMENT += ["bounds", "blocks", "runs", "span", "shared", "arm_rank", "on_rank"]


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _load_ids(
    ids, num_tokens, errors, element, rows, ids_row, ids_column,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr, DEBUG: tl.constexpr,
):  # fmt: skip
    """(row, column, whether the row is real, the raw id, whether it is a routed expert)."""
    row = element // COLUMNS
    column = element % COLUMNS
    inside = row < rows
    value = tl.load(ids + row.to(tl.int64) * ids_row + column * ids_column, mask=inside, other=-1)
    real = inside
    if MASKED:
        real = real & (row < tl.load(num_tokens))
    routed = real & (column < COLUMNS - SHARED)
    valid = routed & (value >= 0) & (value < E)
    if DEBUG:
        bad = routed & ((value < -1) | (value >= E))
        twice = bad & (value >= 1073741824)
        num_twice = tl.sum(twice.to(tl.int32), 0)
        num_bad = tl.sum(bad.to(tl.int32), 0) - num_twice
        if num_twice > 0:
            tl.atomic_add(errors + 1, num_twice, sem="relaxed")
        if num_bad > 0:
            tl.atomic_add(errors, num_bad, sem="relaxed")
    return row, column, inside, real, value, valid


@triton.jit
def _add_counts(
    count, window, recording, expert, valid, E: tl.constexpr, BINS: tl.constexpr, DIRECT: tl.constexpr
):  # fmt: skip
    """One add per element for few elements; else a histogram of the block first, then one add per expert."""
    if DIRECT:
        tl.atomic_add(count + window * E + expert, 1, mask=valid & (recording != 0), sem="relaxed")
    else:
        if recording != 0:
            number = tl.histogram(expert, BINS, mask=valid)
            bins = tl.arange(0, BINS)
            tl.atomic_add(count + window * E + bins, number.to(tl.int64), mask=(bins < E) & (number > 0), sem="relaxed")


@triton.jit
def _add_pairs(
    ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS: tl.constexpr, SHARED: tl.constexpr,
    E: tl.constexpr, MASKED: tl.constexpr, PAIR_WIDTH: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Pairs of some tokens, by one program, which has no other work: `host._add_pairs` says what is counted."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if tl.load(state + 1) != 0:
            windows, every = tl.load(state + 4).to(tl.int64), tl.load(state + 5)
            pairs = count + (windows + tl.load(state).to(tl.int64) * E) * E
            calls = count + (windows + windows * E) * E
            call = tl.load(calls)
            real = rows
            if MASKED:
                real = tl.minimum(tl.load(num_tokens), rows)
            if every > 1:
                every = tl.maximum(every, (real + MOST - 1) // MOST)
            first = (_mix(call.to(tl.uint32)) % every.to(tl.uint32)).to(tl.int32)
            column = tl.arange(0, PAIR_WIDTH)
            while first < real:
                row = first + every * tl.arange(0, TOKENS)
                inside = (row < real)[:, None] & (column < COLUMNS - SHARED)[None, :]
                place = row.to(tl.int64)[:, None] * ids_row + column[None, :] * ids_column
                value = tl.load(ids + place, mask=inside, other=-1)
                valid = inside & (value >= 0) & (value < E)
                expert = tl.where(valid, value, -1).to(tl.int32)
                earlier = column[None, None, :] < column[None, :, None]
                twice = (expert[:, :, None] == expert[:, None, :]) & earlier
                once = valid & (tl.sum(twice.to(tl.int32), 2) == 0)
                low = tl.minimum(expert[:, :, None], expert[:, None, :])
                high = tl.maximum(expert[:, :, None], expert[:, None, :])
                both = once[:, :, None] & once[:, None, :] & (column[None, None, :] <= column[None, :, None])
                tl.atomic_add(pairs + low * E + high, 1, mask=both, sem="relaxed")
                first += every * TOKENS
            tl.debug_barrier()
            tl.store(calls, call + 1)


@triton.jit(do_not_specialize=_NO_VALUES, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _pairs_kernel(
    ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS: tl.constexpr, SHARED: tl.constexpr,
    E: tl.constexpr, MASKED: tl.constexpr, PAIR_WIDTH: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    _add_pairs(
        ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, PAIR_WIDTH, TOKENS, MOST
    )


@triton.jit
def _pick(table, run, u, THRESHOLDS: tl.constexpr):
    """The slot for u: two loads that do not wait for each other, of an entry's threshold and its two names."""
    product = u.to(tl.uint64) * (run >> _FIRST_BITS).to(tl.uint64)
    entry = (run & _FIRST) + (product >> 32).to(tl.int32)
    threshold = tl.load(table + THRESHOLDS + entry)
    both = tl.load(table.to(tl.pointer_type(tl.int64), bitcast=True) + entry)
    own = (product.to(tl.uint32) >> 2).to(tl.int32) < threshold
    return tl.where(own, both.to(tl.int32), (both >> 32).to(tl.int32))


@triton.jit
def _last_start(table, bounds, expert, place, RUNS: tl.constexpr, SPAN: tl.constexpr):
    """The slot of the expert's last entry that begins at `place` or before."""
    run = tl.load(table + RUNS + expert)
    entry, end = run & _FIRST, (run & _FIRST) + (run >> _FIRST_BITS)
    span = tl.load(table + SPAN)
    while span > 0:
        further = entry + span
        start = tl.load(bounds + further, mask=further < end, other=2147483647)
        entry = tl.where(start <= place, further, entry)
        span = span >> 1
    return tl.load(table + 2 * entry)


@triton.jit(do_not_specialize=_NO_VALUES, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _map_kernel(
    ids, out, table, settings, draws, count, state, errors, num_tokens,
    rows, ids_row, ids_column, out_row, out_column,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, RUNS: tl.constexpr, THRESHOLDS: tl.constexpr,
    BINS: tl.constexpr, MODE: tl.constexpr, MASKED: tl.constexpr, COUNTS: tl.constexpr, DIRECT: tl.constexpr,
    DEBUG: tl.constexpr, BLOCK: tl.constexpr,
    PAIR_WIDTH: tl.constexpr, PAIR_TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    if PAIR_WIDTH > 0:
        _add_pairs(
            ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, PAIR_WIDTH,
            PAIR_TOKENS, MOST,
        )  # fmt: skip
    if COUNTS:  # asked for first, needed last
        window, recording = tl.load(state), tl.load(state + 1)
    index = tl.arange(0, BLOCK)
    if MODE == "random":
        # All programs read the number of calls and then arrive; the last to arrive moves it on. A thread's accesses of
        # one line stay in order, so each has read before it is counted, and nobody waits for the answer before the end.
        # One lane of a tensor and not a scalar: a scalar's answer would be sent to all threads, which wait for it.
        draw = tl.load(draws)
        tl.debug_barrier()
        arrived = tl.atomic_add(draws + 1 + tl.zeros_like(index), 1, mask=index == 0, sem="acq_rel")
    element = tl.program_id(0) * BLOCK + index
    row, column, inside, real, value, valid = _load_ids(
        ids, num_tokens, errors, element, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED,
        DEBUG and MODE != "fake",
    )  # fmt: skip
    place = (row * (COLUMNS - SHARED) + column).to(tl.uint32)
    if MODE == "fake":
        valid = real & (column < COLUMNS - SHARED) & (value >= 0)
        phase = tl.load(settings).to(tl.uint32, bitcast=True)
        first = tl.load(settings + 3).to(tl.uint32)
        expert = ((place % E + phase % E + first) % E).to(tl.int32)
    else:
        expert = tl.where(valid, value, 0).to(tl.int32)
    if RUNS == 0:
        slot = tl.load(table + expert)
    else:
        run = tl.load(table + RUNS + expert)
        if MODE == "random":
            key, call = tl.load(settings + 2).to(tl.uint32, bitcast=True), draw.to(tl.uint32, bitcast=True)
            u = _mix(_mix(key + call * 0x9E3779B9) + place * 0x9E3779B9)
        else:
            phase = tl.load(settings).to(tl.uint32, bitcast=True)
            u = row.to(tl.uint32) * 0x9E3779B9 + _mix(phase + expert.to(tl.uint32))
            if MODE == "weighted":
                u = u + tl.load(settings + 1).to(tl.uint32, bitcast=True)
            if MODE == "fake":
                u = u - tl.load(settings + 1).to(tl.uint32, bitcast=True)
        slot = _pick(table, run, u, THRESHOLDS)
    if DEBUG:
        slot = slot | 1073741824
    result = tl.where(valid, slot, -1).to(out.dtype.element_ty)
    if SHARED > 0:
        passed = real & (column >= COLUMNS - SHARED)
        result = tl.where(passed, value.to(out.dtype.element_ty), result)
    tl.store(out + row.to(tl.int64) * out_row + column * out_column, result, mask=inside)
    if COUNTS:
        _add_counts(count, window, recording, expert, valid, E, BINS, DIRECT)
    if MODE == "random":
        last = (index == 0) & (arrived == tl.num_programs(0) - 1)
        tl.store(draws + 1 + tl.zeros_like(index), tl.zeros_like(index), mask=last)
        tl.store(draws + tl.zeros_like(index), draw + 1 + tl.zeros_like(index), mask=last)


@triton.jit
def _and(x, y):
    return x & y


@triton.jit
def _bits_of(x):
    """Bits set in a word of 32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _place_of(x, last):
    """Number of the lowest bit set, or of the highest one."""
    x = x.to(tl.uint32, bitcast=True)
    below = x | (x >> 1)
    below = below | (below >> 2)
    below = below | (below >> 4)
    below = below | (below >> 8)
    below = below | (below >> 16)
    return _bits_of(tl.where(last, below >> 1, (x ^ (x - 1)) >> 1)).to(tl.int32)


@triton.jit
def _meeting(held):
    """Bit i: whether the set of nodes whose bits are those of the number i meets `held`, of the first five nodes."""
    bits = tl.where((held & 1) != 0, -1431655766, 0)
    bits = bits | tl.where((held & 2) != 0, -858993460, 0)
    bits = bits | tl.where((held & 4) != 0, -252645136, 0)
    bits = bits | tl.where((held & 8) != 0, -16711936, 0)
    return bits | tl.where((held & 16) != 0, -65536, 0)


@triton.jit
def _smaller(size, some, fits, members: tl.constexpr, of_size: tl.constexpr):
    """The sets of so many nodes, if any of them fits."""
    these = fits & of_size
    return tl.where(these != 0, members, size), tl.where(these != 0, these, some)


@triton.jit
def _least(fits, word, last, FULL: tl.constexpr):
    """The best set of each row: of those in `fits`, by words of 32, the fewest nodes, then the first or last number."""
    size, some = tl.where(fits != 0, 5, 64), fits
    size, some = _smaller(size, some, fits, 4, 1753251840)
    size, some = _smaller(size, some, fits, 3, 375941248)
    size, some = _smaller(size, some, fits, 2, 18224744)
    size, some = _smaller(size, some, fits, 1, 65814)
    size, some = _smaller(size, some, fits, 0, 1)
    flip = tl.where(last, FULL, 0)
    key = (size + _bits_of(word)) * 8 + (word ^ (flip >> 5)[:, None])
    least = tl.min(key, 1)
    some = tl.sum(tl.where(key == least[:, None], some, 0), 1)  # keys of words differ: one has the least
    return ((least & 7) ^ (flip >> 5)) * 32 + _place_of(some, last)


@triton.jit(do_not_specialize=_NO_VALUES, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _near_kernel(
    ids, out, table, settings, count, state, errors, sends, num_tokens,
    rows, ids_row, ids_column, out_row, out_column,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, N: tl.constexpr, RUNS: tl.constexpr,
    THRESHOLDS: tl.constexpr, MASKS: tl.constexpr, BINS: tl.constexpr, MASKED: tl.constexpr, COUNTS: tl.constexpr,
    DIRECT: tl.constexpr, DEBUG: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    PAIR_WIDTH: tl.constexpr, PAIR_TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    if PAIR_WIDTH > 0:
        _add_pairs(
            ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, PAIR_WIDTH,
            PAIR_TOKENS, MOST,
        )  # fmt: skip
    if COUNTS:
        window, recording = tl.load(state), tl.load(state + 1)
    base = tl.load(settings).to(tl.uint32, bitcast=True)
    own = tl.load(settings + 1).to(tl.uint32, bitcast=True)
    node = tl.load(settings + 4)
    # A thread has a (token, expert); sets of nodes are numbered by their bits and looked at 32 at once.
    FULL: tl.constexpr = (1 << N) - 1
    index = tl.arange(0, TOKENS * WIDTH)
    token, column = tl.program_id(0) * TOKENS + index // WIDTH, index % WIDTH
    element = tl.where(column < COLUMNS, token * COLUMNS + column, rows * COLUMNS)  # past the end: nothing there
    row, column, inside, real, value, valid = _load_ids(
        ids, num_tokens, errors, element, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, DEBUG
    )
    order = tl.load(table + MASKS + E + _order_of(token))
    order_of_row = tl.load(table + MASKS + E + _order_of(tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)))
    expert = tl.where(valid, value, 0).to(tl.int32)
    turn, last = order & 7, (order >> 3) != 0
    nodes = tl.load(table + MASKS + expert)
    held = ((nodes << turn) | (nodes >> (N - turn))) & FULL
    here = (turn * 0 + 1) << ((node + turn) % N)
    is_far = valid & ((held & here) == 0)
    meets = tl.reshape(tl.where(is_far, _meeting(held), -1), [TOKENS, WIDTH, 1])
    word = tl.arange(0, WORDS)
    high = tl.reshape(held >> 5, [TOKENS, WIDTH, 1]) & word[None, None, :]
    fits = tl.reduce(tl.where(high != 0, -1, meets), 1, _and)
    best = _least(fits, word[None, :], (order_of_row >> 3) != 0, FULL)
    sent = _bits_of(best)
    best = tl.reshape(tl.broadcast_to(best[:, None], [TOKENS, WIDTH]), [TOKENS * WIDTH])
    among = tl.where(is_far, held & best, here)
    there = (_place_of(among, last) + N - turn) % N
    run = tl.load(table + RUNS + there * E + expert, mask=valid, other=0)
    u = row.to(tl.uint32) * 0x9E3779B9 + own + _mix(base + expert.to(tl.uint32))
    slot = _pick(table, run, u, THRESHOLDS)
    if DEBUG:
        slot = slot | 1073741824
    result = tl.where(valid, slot, -1).to(out.dtype.element_ty)
    if SHARED > 0:
        passed = real & (column >= COLUMNS - SHARED)
        result = tl.where(passed, value.to(out.dtype.element_ty), result)
    tl.store(out + row.to(tl.int64) * out_row + column * out_column, result, mask=inside)
    tl.atomic_add(sends, tl.sum(sent, 0).to(tl.int64), sem="relaxed")
    if COUNTS:
        _add_counts(count, window, recording, expert, valid, E, BINS, DIRECT)


@triton.jit
def _order_of(token):
    """Place of a row's order of nodes among the orders."""
    return ((token.to(tl.uint32) * 0x6A09E667) >> 26).to(tl.int32)


@triton.jit(do_not_specialize=[*_NO_VALUES, "chunk", "rank"], do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _count_kernel(
    ids, batch, blocks, count, state, errors, num_tokens,
    rows, ids_row, ids_column, chunk, rank,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, MASKED: tl.constexpr,
    COUNTS: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
    PAIR_WIDTH: tl.constexpr, PAIR_TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    if PAIR_WIDTH > 0:
        _add_pairs(
            ids, count, state, num_tokens, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, PAIR_WIDTH,
            PAIR_TOKENS, MOST,
        )  # fmt: skip
    block = tl.program_id(0)
    number = tl.zeros((BINS,), dtype=tl.int32)
    start = 0
    while start < chunk:
        offset = start + tl.arange(0, BLOCK)
        element = tl.where(offset < chunk, block * chunk + offset, rows * COLUMNS)  # past the end: nothing there
        row, column, inside, real, value, valid = _load_ids(
            ids, num_tokens, errors, element, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, DEBUG
        )
        number += tl.histogram(tl.where(valid, value, 0).to(tl.int32), BINS, mask=valid)
        start += BLOCK
    bins = tl.arange(0, BINS)
    tl.store(blocks + block * E + bins, number, mask=(bins < E) & (block * chunk < rows * COLUMNS))
    some = (bins < E) & (number > 0)
    tl.atomic_add(batch + rank * E + bins, number, mask=some, sem="relaxed")
    if COUNTS:
        if tl.load(state + 1) != 0:
            tl.atomic_add(count + tl.load(state) * E + bins, number.to(tl.int64), mask=some, sem="relaxed")


@triton.jit
def _by_rank(x, place, held, ARMS: tl.constexpr, R2: tl.constexpr, S2: tl.constexpr):
    """Sum `[N2, W2]` over the slots of each rank."""
    flat = tl.gather(tl.reshape(x, [ARMS]), place, 0)
    return tl.sum(tl.where(held, tl.reshape(flat, [R2, S2]), 0), 1)


@triton.jit
def _quotas(
    total, before, what, bounds, runs, shared, arm_rank,
    R: tl.constexpr, N: tl.constexpr, W: tl.constexpr, R2: tl.constexpr, N2: tl.constexpr, W2: tl.constexpr,
    S2: tl.constexpr, STEPS: tl.constexpr, SCALE_BITS: tl.constexpr, STEP_BITS: tl.constexpr,
    SHORTEST_STEP: tl.constexpr,
):  # fmt: skip
    """Starts for mode quota where no expert has more than W2 candidates; `quota._fill_ranks` says what is done."""
    k = tl.arange(0, W2)
    n = tl.arange(0, N2)
    all_tokens = tl.sum(total.to(tl.int64), 0)
    scaled = ((total.to(tl.int64) << SCALE_BITS) // (all_tokens + 1)).to(tl.int32)
    expert = tl.load(shared + n, mask=n < N, other=-1)
    known = expert >= 0
    expert = tl.maximum(expert, 0)
    run = tl.load(runs + expert, mask=known, other=0)
    number = run >> _FIRST_BITS
    is_arm = k[None, :] < number[:, None]
    rank_of = tl.load(arm_rank + n[:, None] * W + k[None, :], mask=is_arm, other=0)
    rank_of = tl.reshape(rank_of, [N2 * W2])
    held = what >= 0
    place = tl.maximum(what, 0)
    place = tl.reshape((place // W) * W2 + place % W, [R2 * S2])
    alone = tl.reshape(tl.maximum(-2 - what, 0), [R2 * S2])
    wanted = tl.where(known, tl.gather(scaled, expert, 0), 0)
    x = tl.where(is_arm, (wanted // tl.maximum(number, 1))[:, None], 0)
    load = tl.sum(tl.where(what <= -2, tl.reshape(tl.gather(scaled, alone, 0), [R2, S2]), 0), 1)
    load += _by_rank(x, place, held, N2 * W2, R2, S2)
    level = tl.full((N2,), 1 << (SCALE_BITS + 1), dtype=tl.int32)
    for _ in range(STEPS):
        others = tl.reshape(tl.gather(load, rank_of, 0), [N2, W2]) - x
        filled = is_arm & (others < level[:, None])
        num_filled = tl.sum(filled.to(tl.int32), 1)
        filled = tl.where((num_filled == 0)[:, None], is_arm, filled)
        num_filled = tl.maximum(tl.where(num_filled == 0, number, num_filled), 1)
        level = (wanted + tl.sum(tl.where(filled, others, 0), 1)) // num_filled
        step = tl.where(is_arm, tl.maximum(level[:, None] - others, 0), 0) - x
        change = _by_rank(step, place, held, N2 * W2, R2, S2).to(tl.int64)
        gain = tl.maximum(tl.sum(((1 << SCALE_BITS) // R - load).to(tl.int64) * change, 0), 0)
        squares = tl.maximum(tl.sum(change * change, 0), 1)
        ratio = tl.div_rn(gain.to(tl.float32) * (1 << STEP_BITS), squares.to(tl.float32))
        ratio = tl.minimum(tl.maximum(ratio, SHORTEST_STEP * 1.0), (1 << STEP_BITS) * 1.0)
        length = ratio.to(tl.int32)
        moved = (step * length + (1 << (STEP_BITS - 1))) >> STEP_BITS
        x = tl.maximum(x + moved, 0)
        load += ((change * length + (1 << (STEP_BITS - 1))) >> STEP_BITS).to(tl.int32)
    x = tl.where((tl.sum(x, 1) == 0)[:, None], is_arm.to(tl.int32), x)
    until = tl.cumsum(x, 1)
    whole = tl.maximum(tl.sum(x, 1), 1).to(tl.int64)
    tokens = tl.gather(total, expert, 0).to(tl.int64)
    start = (tokens[:, None] * (until - x).to(tl.int64) + (whole // 2)[:, None]) // whole[:, None]
    start = start.to(tl.int32) - tl.gather(before, expert, 0)[:, None]
    tl.store(bounds + (run & _FIRST)[:, None] + k[None, :], start, mask=is_arm)


@triton.jit(do_not_specialize=["num_blocks", "rank"], do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _solve_kernel(
    batch, bounds, blocks, runs, span, shared, arm_rank, on_rank, num_blocks, rank,
    R: tl.constexpr, E: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    R2: tl.constexpr, E2: tl.constexpr, N2: tl.constexpr, W2: tl.constexpr, S2: tl.constexpr,
    STEPS: tl.constexpr, SCALE_BITS: tl.constexpr, STEP_BITS: tl.constexpr, SHORTEST_STEP: tl.constexpr,
    FEWEST: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, E2)
    if tl.program_id(0) == 1:
        # Counts of blocks become counts of what is before each block.
        b = tl.arange(0, 16)
        before_block = tl.zeros((E2,), dtype=tl.int32)
        first = 0
        while first < num_blocks:
            where = blocks + (first + b)[:, None] * E + e[None, :]
            inside = ((first + b) < num_blocks)[:, None] & (e < E)[None, :]
            number = tl.load(where, mask=inside, other=0)
            tl.store(where, before_block[None, :] + tl.cumsum(number, 0) - number, mask=inside)
            before_block += tl.sum(number, 0)
            first += 16
    else:
        total = tl.zeros((E2,), dtype=tl.int32)
        before = tl.zeros((E2,), dtype=tl.int32)
        for first in range(0, R, 8):
            r8 = first + tl.arange(0, 8)
            where = batch + r8[:, None] * E + e[None, :]
            inside = (r8 < R)[:, None] & (e < E)[None, :]
            number = tl.load(where, mask=inside, other=0)
            total += tl.sum(number, 0)
            before += tl.sum(tl.where((r8 < rank)[:, None], number, 0), 0)
            tl.store(where, tl.zeros_like(number), mask=inside)
        r = tl.arange(0, R2)
        s = tl.arange(0, S2)
        what = tl.load(on_rank + r[:, None] * S + s[None, :], mask=(r < R)[:, None] & (s < S)[None, :], other=-1)
        if FEWEST:
            k = tl.arange(0, W2)
            used = (total > 0).to(tl.int32)
            alone = tl.reshape(tl.maximum(-2 - what, 0), [R2 * S2])
            load = tl.sum(tl.where(what <= -2, tl.reshape(tl.gather(used, alone, 0), [R2, S2]), 0), 1)
            for n in range(0, N):
                expert = tl.load(shared + n)
                if expert >= 0:
                    wanted = tl.sum(tl.where(e == expert, used, 0), 0)
                    run = tl.load(runs + expert)
                    is_arm = k < (run >> _FIRST_BITS)
                    rank_of = tl.load(arm_rank + n * W + k, mask=is_arm, other=0)
                    there = tl.where(is_arm, tl.gather(load, rank_of, 0), 2147483647)
                    best = tl.min(tl.where(there == tl.min(there, 0), k, W2), 0)
                    best_rank = tl.sum(tl.where(k == best, rank_of, 0), 0)
                    load += tl.where(r == best_rank, wanted, 0)
                    tl.store(bounds + (run & _FIRST) + k, tl.where(k <= best, 0, 2147483647), mask=is_arm)
        elif W2 <= NARROW:
            _quotas(
                total, before, what, bounds, runs, shared, arm_rank,
                R, N, W, R2, N2, W2, S2, STEPS, SCALE_BITS, STEP_BITS, SHORTEST_STEP,
            )  # fmt: skip
        elif tl.load(span) * 2 <= NARROW:  # what the layout has decides the work, not what it could have
            _quotas(
                total, before, what, bounds, runs, shared, arm_rank,
                R, N, W, R2, N2, NARROW, S2, STEPS, SCALE_BITS, STEP_BITS, SHORTEST_STEP,
            )  # fmt: skip
        else:
            _quotas(
                total, before, what, bounds, runs, shared, arm_rank,
                R, N, W, R2, N2, W2, S2, STEPS, SCALE_BITS, STEP_BITS, SHORTEST_STEP,
            )  # fmt: skip


@triton.jit(do_not_specialize=[*_NO_VALUES, "chunk"], do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _map_solved_kernel(
    ids, out, table, bounds, blocks, num_tokens,
    rows, ids_row, ids_column, out_row, out_column, chunk,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, E: tl.constexpr, RUNS: tl.constexpr, SPAN: tl.constexpr,
    BINS: tl.constexpr, MASKED: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    before = tl.load(blocks + block * E + bins, mask=bins < E, other=0)
    index = tl.arange(0, BLOCK)
    first = 0
    while first < chunk:
        element = block * chunk + first + index
        row, column, inside, real, value, valid = _load_ids(
            ids, num_tokens, blocks, element, rows, ids_row, ids_column, COLUMNS, SHARED, E, MASKED, False
        )
        expert = tl.where(valid, value, 0).to(tl.int32)
        label = tl.where(valid, expert, -1)
        earlier = (label[:, None] == label[None, :]) & (index[None, :] < index[:, None])
        place = tl.gather(before, expert, 0) + tl.sum(earlier.to(tl.int32), 1)
        before += tl.histogram(expert, BINS, mask=valid)
        if RUNS == 0:
            slot = tl.load(table + expert)
        else:
            slot = _last_start(table, bounds, expert, place, RUNS, SPAN)
        if DEBUG:
            slot = slot | 1073741824
        result = tl.where(valid, slot, -1).to(out.dtype.element_ty)
        if SHARED > 0:
            passed = real & (column >= COLUMNS - SHARED)
            result = tl.where(passed, value.to(out.dtype.element_ty), result)
        tl.store(out + row.to(tl.int64) * out_row + column * out_column, result, mask=inside)
        first += BLOCK


@triton.jit(do_not_specialize=["windows", "stride"], do_not_specialize_on_alignment=_NO_ALIGNMENT)
def _roll_kernel(count, state, windows, stride, E: tl.constexpr, BINS: tl.constexpr):
    window = (tl.load(state) + 1) % windows
    bins = tl.arange(0, BINS)
    tl.store(
        count + tl.program_id(0).to(tl.int64) * stride + window * E + bins,
        tl.zeros((BINS,), dtype=tl.int64),
        mask=bins < E,
    )
    tl.debug_barrier()
    arrived = tl.atomic_add(state + 3, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state + 3, 0)
        tl.store(state + 2, tl.minimum(tl.load(state + 2) + 1, windows - 1))
        tl.store(state, window)


# ---- launches --------------------------------------------------------------------------------------------------------


def _strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows, columns and their strides; a vector is one column."""
    if x.ndim == 1:
        return x.shape[0], 1, x.stride(0), 1
    return x.shape[0], x.shape[1], x.stride(0), x.stride(1)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _pair_parts(state: torch.Tensor, columns: int) -> dict[str, int]:
    """What a kernel needs to count pairs as well; it then has one program more."""
    if state.shape[0] <= WINDOWS or columns == 0:
        return {"PAIR_WIDTH": 0, "PAIR_TOKENS": 0, "MOST": 0}
    width = _power(columns)
    return {"PAIR_WIDTH": width, "PAIR_TOKENS": max(PAIR_CELLS // (width * width), 1), "MOST": MOST_PAIR_TOKENS}


def _pairs_first(
    ids: torch.Tensor, out: torch.Tensor, count: torch.Tensor, state: torch.Tensor, num_tokens: torch.Tensor | None,
    num_shared: int, num_experts: int, parts: dict[str, int],
) -> dict[str, int]:  # fmt: skip
    """Ids that are written over are counted in a launch of their own, before."""
    if not parts["PAIR_WIDTH"] or out.data_ptr() != ids.data_ptr():
        return parts
    rows, columns, ids_row, ids_column = _strides(ids)
    _pairs_kernel[(1,)](
        ids, count, state, state if num_tokens is None else num_tokens, rows, ids_row, ids_column,
        COLUMNS=columns, SHARED=num_shared, E=num_experts, MASKED=num_tokens is not None,
        PAIR_WIDTH=parts["PAIR_WIDTH"], TOKENS=parts["PAIR_TOKENS"], MOST=parts["MOST"], num_warps=4,
    )  # fmt: skip
    return {"PAIR_WIDTH": 0, "PAIR_TOKENS": 0, "MOST": 0}


def _blocks_of(elements: int) -> tuple[int, int]:
    """Into how many blocks a batch is cut where places are counted through, and how many elements each has."""
    chunk = SUB_BLOCK * max(1, -(-elements // (NUM_BLOCKS * SUB_BLOCK)))
    return -(-elements // chunk), chunk


def _where_tensors_are(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton launches on the calling thread's device, wherever the tensors are."""

    @functools.wraps(launch)
    def on_their_device(first: torch.Tensor, *others: object) -> None:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            launch(first, *others)
        else:
            with torch.cuda.device(first.device):
                launch(first, *others)

    return on_their_device


@_where_tensors_are
def map(
    ids: torch.Tensor, out: torch.Tensor, table: torch.Tensor, settings: torch.Tensor, draws: torch.Tensor,
    count: torch.Tensor, state: torch.Tensor, errors: torch.Tensor, num_tokens: torch.Tensor | None, num_shared: int,
    num_experts: int, num_entries: int, mode: Mode, debug: bool,
) -> None:  # fmt: skip
    """The operator `map` in one launch."""
    rows, columns, ids_row, ids_column = _strides(ids)
    _, _, out_row, out_column = _strides(out)
    elements = rows * columns
    if elements == 0:
        return
    runs, thresholds, _, _ = row_parts(num_entries, num_experts)
    # About one block for each multiprocessor; few elements are added one by one.
    block, warps = next((block, warps) for most, block, warps in BLOCKS if elements <= most)
    pairs = _pair_parts(state, 0 if mode == "fake" else columns)
    pairs = _pairs_first(ids, out, count, state, num_tokens, num_shared, num_experts, pairs)
    _map_kernel[(-(-elements // block) + (pairs["PAIR_WIDTH"] > 0),)](
        ids, out, table, settings, draws, count, state, errors, state if num_tokens is None else num_tokens,
        rows, ids_row, ids_column, out_row, out_column,
        COLUMNS=columns, SHARED=num_shared, E=num_experts, RUNS=runs, THRESHOLDS=thresholds, BINS=_power(num_experts),
        MODE=mode, MASKED=num_tokens is not None, COUNTS=count.shape[0] > 0, DIRECT=elements <= DIRECT_ELEMENTS,
        DEBUG=debug, BLOCK=block, **pairs, num_warps=warps,
    )  # fmt: skip


@_where_tensors_are
def map_near(
    ids: torch.Tensor, out: torch.Tensor, table: torch.Tensor, settings: torch.Tensor, count: torch.Tensor,
    state: torch.Tensor, errors: torch.Tensor, sends: torch.Tensor, num_tokens: torch.Tensor | None, num_shared: int,
    num_experts: int, num_entries: int, num_nodes: int, debug: bool,
) -> None:  # fmt: skip
    """The operator `map_near` in one launch."""
    rows, columns, ids_row, ids_column = _strides(ids)
    _, _, out_row, out_column = _strides(out)
    if rows * columns == 0:
        return
    runs, thresholds, _, masks = row_parts(num_entries, num_experts * num_nodes)
    few, width = rows * columns <= DIRECT_ELEMENTS, _power(columns)
    tokens = max(1, (NEAR_BLOCK if few else 2 * NEAR_BLOCK) // width)
    pairs = _pairs_first(ids, out, count, state, num_tokens, num_shared, num_experts, _pair_parts(state, columns))
    _near_kernel[(-(-rows // tokens) + (pairs["PAIR_WIDTH"] > 0),)](
        ids, out, table, settings, count, state, errors, sends, state if num_tokens is None else num_tokens,
        rows, ids_row, ids_column, out_row, out_column,
        COLUMNS=columns, SHARED=num_shared, E=num_experts, N=num_nodes, RUNS=runs, THRESHOLDS=thresholds, MASKS=masks,
        BINS=_power(num_experts), MASKED=num_tokens is not None, COUNTS=count.shape[0] > 0,
        DIRECT=few, DEBUG=debug, TOKENS=tokens, WIDTH=width, WORDS=max(1, (1 << num_nodes) // 32), **pairs,
        num_warps=4 if few else 8,
    )  # fmt: skip


@_where_tensors_are
def map_solved(
    ids: torch.Tensor, out: torch.Tensor, table: torch.Tensor, bounds: torch.Tensor, blocks: torch.Tensor,
    num_tokens: torch.Tensor | None, num_shared: int, num_experts: int, num_entries: int, debug: bool,
) -> None:  # fmt: skip
    """The operator `map_solved` in one launch."""
    rows, columns, ids_row, ids_column = _strides(ids)
    _, _, out_row, out_column = _strides(out)
    if rows * columns == 0:
        return
    runs, _, span, _ = row_parts(num_entries, num_experts)
    num_blocks, chunk = _blocks_of(rows * columns)
    _map_solved_kernel[(num_blocks,)](
        ids, out, table, bounds, blocks, blocks if num_tokens is None else num_tokens,
        rows, ids_row, ids_column, out_row, out_column, chunk,
        COLUMNS=columns, SHARED=num_shared, E=num_experts, RUNS=runs, SPAN=span, BINS=_power(num_experts),
        MASKED=num_tokens is not None, DEBUG=debug, BLOCK=SUB_BLOCK, num_warps=4,
    )  # fmt: skip


@_where_tensors_are
def count_batch(
    ids: torch.Tensor, batch: torch.Tensor, blocks: torch.Tensor, count: torch.Tensor, state: torch.Tensor,
    errors: torch.Tensor, num_tokens: torch.Tensor | None, num_shared: int, rank: int, debug: bool,
) -> None:  # fmt: skip
    """The operator `count_batch` in one launch."""
    rows, columns, ids_row, ids_column = _strides(ids)
    if rows * columns == 0:
        return
    num_blocks, chunk = _blocks_of(rows * columns)
    experts = batch.shape[1]
    pairs = _pair_parts(state, columns)
    _count_kernel[(num_blocks + (pairs["PAIR_WIDTH"] > 0),)](
        ids, batch, blocks, count, state, errors, num_tokens if num_tokens is not None else state,
        rows, ids_row, ids_column, chunk, rank,
        COLUMNS=columns, SHARED=num_shared, E=experts, BINS=_power(experts), MASKED=num_tokens is not None,
        COUNTS=count.shape[0] > 0, DEBUG=debug, BLOCK=SUB_BLOCK if chunk == SUB_BLOCK else 512, **pairs,
        num_warps=4,
    )  # fmt: skip


@_where_tensors_are
def solve_batch(
    batch: torch.Tensor, bounds: torch.Tensor, blocks: torch.Tensor, runs: torch.Tensor, span: torch.Tensor,
    shared: torch.Tensor, arm_rank: torch.Tensor, on_rank: torch.Tensor, ids: torch.Tensor, num_shared: int, rank: int,
    mode: Mode,
) -> None:  # fmt: skip
    """The operator `solve_batch` in one launch."""
    ranks, experts = batch.shape
    (num, width), per_rank = arm_rank.shape, on_rank.shape[1]
    rows, columns, _, _ = _strides(ids)
    num_blocks, _ = _blocks_of(rows * columns)
    narrow = _power(num) * min(NARROW, _power(width))
    warps = 4 if mode == "fewest" or narrow < 1024 else (8 if narrow < 4096 else 16)
    _solve_kernel[(2,)](
        batch, bounds, blocks, runs, span, shared, arm_rank, on_rank, num_blocks, rank,
        R=ranks, E=experts, N=num, W=width, S=per_rank, R2=_power(ranks), E2=_power(experts), N2=_power(num),
        W2=_power(width), S2=_power(per_rank), STEPS=STEPS, SCALE_BITS=SCALE_BITS, STEP_BITS=STEP_BITS,
        SHORTEST_STEP=SHORTEST_STEP, FEWEST=mode == "fewest", NARROW=NARROW, num_warps=warps,
    )  # fmt: skip


@_where_tensors_are
def roll(count: torch.Tensor, state: torch.Tensor) -> None:
    """`LoadCounter.roll` in one launch."""
    layers, windows, experts = count.shape
    if layers:
        _roll_kernel[(layers,)](count, state, windows, count.stride(0), E=experts, BINS=_power(experts), num_warps=4)
