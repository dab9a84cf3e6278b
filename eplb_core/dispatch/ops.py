"""From (token, expert) to slots: operators of torch, a loop on the host and Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from eplb_core._arrays import check_kind
from eplb_core._text import quoted
from eplb_core.dispatch import host
from eplb_core.dispatch.constants import SOLVED_MODES, Mode


class LayerTables(NamedTuple):
    """Tensors that the dispatch of one layer reads and writes; addresses, shapes and types are fixed for life.

    An engine's own kernel may do what `topk_to_slots` does: the mode makes a number u in [0, 2^32) from a token row and
    its expert e (docs/dispatch.md). With `first, n = runs[e] & 0xFFFFF, runs[e] >> 20`, u * n in 64 bits gives an entry
    i = first + (u * n >> 32) and a rest r = (u * n & 0xFFFFFFFF) >> 2. The token goes to `candidates[i, 0]` if
    r < `thresholds[i]`, else to `candidates[i, 1]`. It adds 1 to `count[state[0], e]` if `state[1]` is not 0.
    """

    table: torch.Tensor
    """int32: the packed row, of which the next four, `shared`, `arm_rank` and `on_rank` are parts."""
    candidates: torch.Tensor
    """int32 `[P, 2]`: an entry's own slot, by expert and ascending within each, and the slot that it shares its part of
    [0, 1) with; -1 after the last. Static modes: `[E, 1]`, the expert's only slot."""
    runs: torch.Tensor
    """int32 `[E]`: where the expert's entries begin, and in bits 20 to 30 how many there are. Static modes: `[0]`; mode
    near: `[N * E]`, those in each node."""
    thresholds: torch.Tensor
    """int32 `[P]`, in units of 2^-30: the own slot's part of an entry. Static modes: `[0]`."""
    span: torch.Tensor
    """int32 `[1]`: the largest power of two below the most entries that an expert has, or 0. Static modes: `[0]`."""
    settings: torch.Tensor
    """int32 `[4]`: phase of the layer, phase of the rank, key of the random mode, first expert of the fake one."""
    draws: torch.Tensor
    """int32 `[2]`: calls that the random mode has made, and scratch."""
    count: torch.Tensor  # type: ignore[assignment]
    """int64 `[T + 1, E]`: the counter's windows of this layer; `[0, E]` where nothing is counted."""
    state: torch.Tensor
    """int32 `[4]`: the counter's current window, and whether calls count."""
    errors: torch.Tensor
    """int32 `[2]`: ids out of range and ids mapped twice, where a debugging table has seen any."""
    masks: torch.Tensor
    """int32 `[E]`: nodes that hold each expert, as bits (mode near; else `[0]`)."""
    orders: torch.Tensor
    """int32 `[64]`: the orders of nodes that rows take (mode near; else `[0]`)."""
    sends: torch.Tensor
    """int64 `[1]`: nodes besides the rank's own that tokens have been sent to, each once per token (mode near)."""
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
    """P, or 0 where `table` is one slot per expert and nothing else."""
    num_nodes: int
    """N for mode near, else 0."""
    mode: Mode
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
    """Map each (token, expert) to a slot, and count the experts.

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
        One launch (`random`, `row`, `weighted`, `near`, `static`, `even`, `fake`), three with `quota` and `fewest`. No
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
    t, ops = tables, torch.ops.eplb_core
    rest = (num_tokens, num_shared, t.num_experts, t.num_entries)
    if t.mode in SOLVED_MODES:
        counters = (t.batch, t.blocks, t.count, t.state, t.errors)
        ops.count_batch(topk_ids, *counters, num_tokens, num_shared, t.rank, t.debug)
        if t.all_reduce is not None:
            try:
                t.all_reduce(t.batch)
            except BaseException:
                t.batch.zero_()  # the next batch starts from nothing
                raise
        solver = (t.runs, t.span, t.shared, t.arm_rank, t.on_rank)
        ops.solve_batch(t.batch, t.bounds, t.blocks, *solver, topk_ids, num_shared, t.rank, t.mode)
        solved = (t.table, t.bounds, t.blocks, *rest, t.debug)
        ops.map_solved_(out, *solved) if out is topk_ids else ops.map_solved(topk_ids, out, *solved)
    elif t.mode == "near":
        near = (t.table, t.settings, t.count, t.state, t.errors, t.sends, *rest, t.num_nodes, t.debug)
        ops.map_near_(out, *near) if out is topk_ids else ops.map_near(topk_ids, out, *near)
    else:
        drawn = (t.table, t.settings, t.draws, t.count, t.state, t.errors, *rest, t.mode, t.debug)
        ops.map_(out, *drawn) if out is topk_ids else ops.map(topk_ids, out, *drawn)
    return out


# ---- registration ----------------------------------------------------------------------------------------------------

# "mode" is a name that torch passes by itself, hence "how".
_TABLES = "Tensor? num_tokens, int num_shared, int num_experts, int num_entries"
_MAP = f"Tensor table, Tensor settings, Tensor(b!) draws, Tensor(c!) count, Tensor state, Tensor(d!) errors, {_TABLES}"
_NEAR = "Tensor table, Tensor settings, Tensor(b!) count, Tensor state, Tensor(c!) errors, Tensor(d!) sends"
_SCHEMAS = {
    "map_near": f"Tensor ids, Tensor(a!) out, {_NEAR}, {_TABLES}, int num_nodes, bool debug",
    "map_near_": f"Tensor(a!) ids, {_NEAR}, {_TABLES}, int num_nodes, bool debug",
    "map": f"Tensor ids, Tensor(a!) out, {_MAP}, str how, bool debug",
    "map_": f"Tensor(a!) ids, {_MAP}, str how, bool debug",
    "map_solved": f"Tensor ids, Tensor(a!) out, Tensor table, Tensor bounds, Tensor blocks, {_TABLES}, bool debug",
    "map_solved_": f"Tensor(a!) ids, Tensor table, Tensor bounds, Tensor blocks, {_TABLES}, bool debug",
    "count_batch": "Tensor ids, Tensor(a!) batch, Tensor(b!) blocks, Tensor(c!) count, Tensor state, "
    "Tensor(d!) errors, Tensor? num_tokens, int num_shared, int rank, bool debug",
    "solve_batch": "Tensor(a!) batch, Tensor(b!) bounds, Tensor(c!) blocks, Tensor runs, Tensor span, Tensor shared, "
    "Tensor arm_rank, Tensor on_rank, Tensor ids, int num_shared, int rank, str how",
}
# define and impl of a library, not custom_op: a call then costs 3 us of host time and not 20.
_library = torch.library.Library("eplb_core", "DEF")  # type: ignore[no-untyped-call]
_define: Callable[..., object] = _library.define
_impl: Callable[..., object] = _library.impl


def _on_gpu(name: str) -> Callable[..., None]:
    def call(*args: object) -> None:  # pragma: no cover  needs a GPU
        from eplb_core.dispatch import gpu

        getattr(gpu, name)(*args)

    return call


def _in_place(map_to: Callable[..., None]) -> Callable[..., None]:
    return lambda ids, *args: map_to(ids, ids, *args)


def _nothing(*args: object) -> None:
    """Shapes are the caller's: nothing to infer."""


for _name, _schema in _SCHEMAS.items():
    _define(f"{_name}({_schema}) -> ()")
    _plain = _name.rstrip("_")
    for _device, _launch in (("CPU", getattr(host, _plain)), ("CUDA", _on_gpu(_plain))):
        _impl(_name, _launch if _plain == _name else _in_place(_launch), _device)
    _impl(_name, _nothing, "Meta")
