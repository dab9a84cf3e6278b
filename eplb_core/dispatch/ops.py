"""From (token, expert) to slots: one operator with a plain torch path; CUDA tensors take the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from eplb_core._arrays import check_kind
from eplb_core._text import quoted
from eplb_core.dispatch import quota
from eplb_core.dispatch.constants import (
    BASE_PHASE,
    DRAWS,
    FIRST_BITS,
    GOLDEN,
    KEY,
    MAPPED_TWICE,
    MASK,
    MOST_REPLICAS,
    MOST_SLOTS,
    OUT_OF_RANGE,
    RANK_PHASE,
    RECORDING,
    SOLVED_MODES,
    TAG,
    WINDOW,
    has_triton,
)
from eplb_core.dispatch.host import map_rows


class LayerTables(NamedTuple):
    """What the dispatch of one layer reads and writes: tensors whose addresses, shapes and types stay for life.

    An engine's own kernel may do what `topk_to_slots` does: the mode makes a number u in [0, 2^32) from a token row and
    its expert e (docs/dispatch.md). With `first, n = runs[e] & 0xFFFFF, runs[e] >> 20`, u * n in 64 bits gives an entry
    i = first + (u * n >> 32) and a rest r = (u * n & 0xFFFFFFFF) >> 2. The token goes to `candidates[i, 0]` if
    r < `thresholds[i]`, else to `candidates[i, 1]`. It adds 1 to `count[state[0], e]` if `state[1]` is not 0.
    """

    table: torch.Tensor
    """int32: the memory of the next four, one after the other, and of what the solver reads."""
    candidates: torch.Tensor
    """int32 `[P, 2]`: names of the slots by expert, ascending within each, and the slot that an entry shares its part
    of [0, 1) with; -1 after the last. Static modes: `[E, 1]`, the expert's only one."""
    runs: torch.Tensor
    """int32 `[E]`: where the expert's entries begin, and in bits 20 to 30 how many there are. Static modes: `[0]`."""
    thresholds: torch.Tensor
    """int32 `[P]`, in units of 2^-30: the own slot's part of an entry. Static modes: `[0]`."""
    span: torch.Tensor
    """int32 `[1]`: the largest power of two below the most entries that an expert has, or 0. Static modes: `[0]`."""
    settings: torch.Tensor
    """int32 `[3]`: phase of the layer, phase of the rank, key of the random mode."""
    draws: torch.Tensor
    """int32 `[2]`: calls that the random mode has made, and scratch."""
    count: torch.Tensor  # type: ignore[assignment]
    """int32 `[T + 1, E]`: the counter's windows of this layer; `[0, E]` where nothing is counted."""
    state: torch.Tensor
    """int32 `[4]`: the counter's current window, and whether calls count."""
    errors: torch.Tensor
    """int32 `[2]`: ids out of range and ids mapped twice, where a debugging table has seen any."""
    batch: torch.Tensor
    """int32 `[R, E]`: this batch's counts of every rank (modes that solve the batch; else `[0, E]`)."""
    bounds: torch.Tensor
    """int32 `[P]`: place among this rank's tokens of the expert where each candidate's tokens begin."""
    blocks: torch.Tensor
    """int32 `[B, E]`: counts of blocks of the batch, then of what is before each block."""
    shared: torch.Tensor
    """int32 `[N]`: experts with several replicas, the fewest replicas first, padded with -1; what the solver reads."""
    arm_rank: torch.Tensor
    """int32 `[N, W]`: rank of each candidate of those; W is `max_replicas`."""
    on_rank: torch.Tensor
    """int32 `[R, S]`: each slot's place in `[N, W]`, -2 - e if its expert e has no other, or -1 if it is empty."""
    num_experts: int
    """E."""
    num_entries: int
    """P, or 0 where `table` is one slot an expert and nothing else."""
    mode: str
    """How candidates are chosen."""
    rank: int
    """Source rank."""
    debug: bool
    """Whether ids are checked and slots tagged."""
    all_reduce: Callable[[torch.Tensor], object] | None
    """Sums `batch` over ranks in place, on the current stream."""


def topk_to_slots(
    topk_ids: torch.Tensor,
    tables: LayerTables,
    *,
    num_tokens: torch.Tensor | None = None,
    num_shared: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which slot does each (token, expert) go to? Counts the experts on the way.

    Args:
        topk_ids: int32 or int64 `[T, K]` (or `[T]`): logical experts, -1 = none. T = 0 is valid. Any strides.
        tables: `DispatchTables.layer(l)`.
        num_tokens: int32 `[1]` or `[]` on the device: rows from it on become -1 and are not counted. Default: T.
        num_shared: Trailing columns that hold fused shared experts: copied, neither mapped nor counted.
        out: Where to write, of `topk_ids`' shape and any signed integer type; may be `topk_ids` itself.

    Returns:
        `out`, or a new contiguous tensor of `topk_ids`' shape and type. -1 stays -1.

    Raises:
        IndexError: On the CPU: an id that is neither -1 nor an expert, or with debugging tables one that is a slot
            already. On CUDA such an id becomes -1; debugging tables note it for `DispatchTables.check`.
        TypeError: Ids of another type, or tables that are not those of one layer.
        ValueError: `num_shared` or a shape does not fit.

    Cost:
        One launch (`random`, `row`, `weighted`, `static`, `even`, `fake`), three with `quota` and `fewest`. No
        allocation with `out`, no synchronization; may be captured in a CUDA graph and compiled.

    Example:
        >>> from eplb_core import DispatchTables, ExpertLayout, Topology
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> t = DispatchTables(layout, rank=1, mode="static").layer(0)
        >>> topk_to_slots(torch.tensor([[0, 3], [-1, -1], [1, 2]]), t).tolist()
        [[5, 3], [-1, -1], [1, 2]]
    """
    if not 1 <= check_kind(topk_ids, "topk_ids", torch.Tensor).dim() <= 2:
        raise ValueError(f"`topk_ids` (shape {list(topk_ids.shape)}) must be [T, K] or [T]")
    if not isinstance(tables, LayerTables):
        raise TypeError(f"`tables` (={type(tables).__name__}) must be one layer's: `DispatchTables.layer(layer)`")
    if num_tokens is not None:
        check_kind(num_tokens, "num_tokens", torch.Tensor)
        if num_tokens.dim() > 1 or num_tokens.numel() != 1 or num_tokens.dtype != torch.int32:
            kind = f"{num_tokens.dtype} {list(num_tokens.shape)}"
            raise ValueError(f"`num_tokens` ({kind}) must be int32 [1] or []")
    if out is not None:
        check_kind(out, "out", torch.Tensor)
    check_kind(num_shared, "num_shared", int)
    if not 0 <= num_shared <= topk_ids.shape[-1]:
        raise ValueError(
            f"`num_shared` (={quoted(num_shared, 40)}) must be in [0, {topk_ids.shape[-1]}], the columns of `topk_ids`"
        )
    for name, ids in (("topk_ids", topk_ids), ("out", topk_ids if out is None else out)):
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`{name}` (dtype {ids.dtype}) must be int32 or int64: it holds slots, and -1")
    if out is None:
        out = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)
    elif out.shape != topk_ids.shape:
        raise ValueError(f"`out` (shape {list(out.shape)}) must be {list(topk_ids.shape)}, as `topk_ids`")
    t = tables
    if t.mode in SOLVED_MODES:
        torch.ops.eplb_core.count_batch(
            topk_ids, t.batch, t.blocks, t.count, t.state, t.errors, num_tokens, num_shared, t.rank, t.debug
        )
        if t.all_reduce is not None:
            try:
                t.all_reduce(t.batch)
            except BaseException:
                t.batch.zero_()  # the next batch starts from nothing
                raise
        torch.ops.eplb_core.solve_batch(
            t.batch, t.bounds, t.blocks, t.runs, t.span, t.shared, t.arm_rank, t.on_rank, topk_ids, num_shared,
            t.rank, t.mode,
        )  # fmt: skip
    if out is topk_ids:
        torch.ops.eplb_core.map_(
            out, t.table, t.settings, t.draws, t.count, t.state, t.errors, t.bounds, t.blocks, num_tokens, num_shared,
            t.num_experts, t.num_entries, t.mode, t.debug,
        )  # fmt: skip
    else:
        torch.ops.eplb_core.map(
            topk_ids, out, t.table, t.settings, t.draws, t.count, t.state, t.errors, t.bounds, t.blocks, num_tokens,
            num_shared, t.num_experts, t.num_entries, t.mode, t.debug,
        )  # fmt: skip
    return out


# ---- the torch path --------------------------------------------------------------------------------------------------


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words that spreads every bit, on int64 in [0, 2^32).

    Source: the multipliers and shifts of "lowbias32" (C. Wellons, hash-prospector; public domain).
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _valid(
    ids: torch.Tensor, num_experts: int, num_tokens: torch.Tensor | None, errors: torch.Tensor, debug: bool
) -> torch.Tensor:
    """Which of the routed ids `[T, k]` are experts of real rows; on the CPU others than -1 raise."""
    valid = (ids >= 0) & (ids < num_experts)
    bad = (ids < -1) | (ids >= num_experts)
    if num_tokens is not None:
        real = torch.arange(len(ids), device=ids.device)[:, None] < num_tokens.reshape(())
        valid, bad = valid & real, bad & real
    if ids.device.type == "cpu":
        if bool(bad.any()):
            row, column = (int(i) for i in bad.nonzero()[0])
            value = int(ids[row, column])
            if debug and value >= TAG:
                raise IndexError(
                    f"`topk_ids` (={value}) is slot {value - TAG} at row {row}, column {column}: it was mapped before; "
                    "map each id once"
                )
            raise IndexError(
                f"`topk_ids` (={value}) must be -1 or a logical expert in [0, {num_experts}) at row {row}, column "
                f"{column}; {int(bad.sum()) - 1} more; fused shared experts need `num_shared`, slots are no experts"
            )
    elif debug:  # pragma: no cover  needs a GPU
        twice = bad & (ids >= TAG)
        errors[MAPPED_TWICE] += twice.sum()
        errors[OUT_OF_RANGE] += bad.sum() - twice.sum()
    return valid


def _as_2d(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-1) if x.ndim == 1 else x


def _count(
    count: torch.Tensor, state: torch.Tensor, expert: torch.Tensor, valid: torch.Tensor, num_experts: int
) -> None:
    if count.shape[0]:
        place = state[WINDOW] * num_experts + expert
        amount = valid.to(torch.int32) * (state[RECORDING] != 0)
        count.view(-1).index_add_(0, place.reshape(-1), amount.reshape(-1))


def _map_torch(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    bounds: torch.Tensor,
    blocks: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    mode: str,
    debug: bool,
) -> None:
    ids, out = _as_2d(ids), _as_2d(out)
    rows, columns = ids.shape
    if rows == 0:
        return
    routed = columns - num_shared
    row = torch.arange(rows, device=ids.device)[:, None]
    given = ids[:, :routed]
    setting = settings.to(torch.int64) & MASK
    if mode == "fake":  # ids are replaced, by each expert in turn
        valid = given >= 0
        if num_tokens is not None:
            valid = valid & (row < num_tokens.reshape(()))
        element = row * routed + torch.arange(routed, device=ids.device)
        expert = ((element & MASK) + setting[BASE_PHASE]) % num_experts
    else:
        valid = _valid(given, num_experts, num_tokens, errors, debug and mode not in SOLVED_MODES)
        expert = torch.where(valid, given, 0).to(torch.int64)
    if mode not in SOLVED_MODES:
        _count(count, state, expert, valid, num_experts)
    if num_entries == 0:
        slot = table[expert]
    else:
        run = table[2 * num_entries : 2 * num_entries + num_experts][expert].to(torch.int64)
        first, number = run & (MOST_SLOTS - 1), run >> FIRST_BITS
        if mode in SOLVED_MODES:
            place = quota.places(expert, valid, num_experts)
            slot = table[2 * _last_start(bounds, first, number, place)]
        else:
            product = _choice(mode, row, routed, expert, setting, draws) * number
            entry = first + (product >> 32)
            other = ((product & MASK) >> 2) >= table[2 * num_entries + num_experts :][entry]
            slot = table[2 * entry + other]
    if debug:
        slot = slot | TAG
    result = torch.where(valid, slot, -1)
    if num_shared:
        shared = ids[:, routed:]
        if num_tokens is not None:
            shared = torch.where(row < num_tokens.reshape(()), shared, -1)
        result = torch.cat([result, shared], dim=1)
    out.copy_(result)
    if mode == "random":
        draws[DRAWS] += 1


def _choice(
    mode: str, row: torch.Tensor, routed: int, expert: torch.Tensor, setting: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """The number u in [0, 2^32) that chooses among an expert's candidates."""
    if mode == "random":
        first = _mix((setting[KEY] + (draws[DRAWS].to(torch.int64) & MASK) * GOLDEN) & MASK)
        element = row * routed + torch.arange(routed, device=row.device)
        return _mix((first + element * GOLDEN) & MASK)
    # A rotation by the golden ratio: consecutive rows, and every other row, spread evenly; experts and layers start
    # apart.
    u = row * GOLDEN + _mix((setting[BASE_PHASE] + expert) & MASK)
    if mode == "weighted":
        u = u + setting[RANK_PHASE]
    return u & MASK


def _last_start(bounds: torch.Tensor, first: torch.Tensor, number: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The last of the expert's entries that begins at `place` or before; entries begin in ascending order."""
    pick = torch.zeros_like(place)
    for bit in reversed(range(min(bounds.numel(), MOST_REPLICAS).bit_length())):
        further = pick + (1 << bit)
        there = further < number
        start = bounds[torch.where(there, first + further, first)]
        pick = torch.where(there & (start <= place), further, pick)
    return first + pick


def _count_torch(
    ids: torch.Tensor,
    batch: torch.Tensor,
    blocks: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    rank: int,
    debug: bool,
) -> None:
    ids = _as_2d(ids)
    given = ids[:, : ids.shape[1] - num_shared]
    num_experts = batch.shape[1]
    valid = _valid(given, num_experts, num_tokens, errors, debug)
    expert = torch.where(valid, given, 0).to(torch.int64)
    batch[rank].index_add_(0, expert.reshape(-1), valid.to(torch.int32).reshape(-1))
    _count(count, state, expert, valid, num_experts)


def _solve_torch(
    batch: torch.Tensor,
    bounds: torch.Tensor,
    blocks: torch.Tensor,
    runs: torch.Tensor,
    span: torch.Tensor,
    shared: torch.Tensor,
    arm_rank: torch.Tensor,
    on_rank: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    rank: int,
    mode: str,
) -> None:
    quota.solve(batch, bounds, runs, shared, arm_rank, on_rank, rank, fewest=mode == "fewest")
    batch.zero_()


def _map_on_host(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    bounds: torch.Tensor,
    blocks: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    mode: str,
    debug: bool,
) -> None:
    """`_map_torch`, in one loop where the mode needs no more; an id that is no expert raises before anything counts."""
    rest = (num_shared, num_experts, num_entries, mode, debug)
    if mode not in SOLVED_MODES and len(ids):
        given, into = _as_2d(ids), _as_2d(out)
        if map_rows(given, into, table, settings, draws, count, state, num_tokens, *rest):
            return
    _map_torch(ids, out, table, settings, draws, count, state, errors, bounds, blocks, num_tokens, *rest)


# ---- registration ----------------------------------------------------------------------------------------------------

# "mode" is a name that torch passes by itself, hence "how".
_TABLES = (
    "Tensor table, Tensor settings, Tensor(b!) draws, Tensor(c!) count, Tensor state, Tensor(d!) errors, "
    "Tensor bounds, Tensor blocks, Tensor? num_tokens, int num_shared, int num_experts, int num_entries, str how, "
    "bool debug"
)
# define and impl of a library, not custom_op: a call then costs 3 us of host time and not 20.
_library = torch.library.Library("eplb_core", "DEF")  # type: ignore[no-untyped-call]
_define: Callable[..., object] = _library.define
_impl: Callable[..., object] = _library.impl
_define(f"map(Tensor ids, Tensor(a!) out, {_TABLES}) -> ()")
_define(f"map_(Tensor(a!) ids, {_TABLES}) -> ()")
_define(
    "count_batch(Tensor ids, Tensor(a!) batch, Tensor(b!) blocks, Tensor(c!) count, Tensor state, Tensor(d!) errors, "
    "Tensor? num_tokens, int num_shared, int rank, bool debug) -> ()"
)
_define(
    "solve_batch(Tensor(a!) batch, Tensor(b!) bounds, Tensor(c!) blocks, Tensor runs, Tensor span, Tensor shared, "
    "Tensor arm_rank, Tensor on_rank, Tensor ids, int num_shared, int rank, str how) -> ()"
)


def _on_cuda(name: str, plain: Callable[..., None]) -> Callable[..., None]:
    """The Triton kernel, or the torch path where there is no Triton."""

    def call(*args: object) -> None:  # pragma: no cover  needs a GPU
        if has_triton():
            from eplb_core.dispatch import gpu

            getattr(gpu, name)(*args)
        else:
            plain(*args)

    return call


def _in_place(map_to: Callable[..., None]) -> Callable[..., None]:
    return lambda ids, *args: map_to(ids, ids, *args)


def _nothing(*args: object) -> None:
    """Shapes are the caller's: nothing to infer."""


for _name, _plain in (("map", _map_torch), ("count_batch", _count_torch), ("solve_batch", _solve_torch)):
    _cuda, _host = _on_cuda(_name, _plain), _map_on_host if _name == "map" else _plain
    _impl(_name, _host, "CPU")
    _impl(_name, _cuda, "CUDA")
    _impl(_name, _nothing, "Meta")
    if _name == "map":
        _impl("map_", _in_place(_host), "CPU")
        _impl("map_", _in_place(_cuda), "CUDA")
        _impl("map_", _nothing, "Meta")
