"""Hypothesis strategies: topologies, layouts, loads, top-k ids and shares as engines have them, odd ones included.

Needs the package hypothesis. All that is drawn is valid and shrinks to what is simple: few ranks of equal speed that
are all active, expert p in slot p, loads that are almost even. A size is a number, or a pair of the least and the most:
`num_experts=8` or `num_experts=(1, 8)`.

Counterexamples print as code, which needs `from eplb_core import ExpertLayout, Topology` and `from numpy import *`.
Arrays of more than 512 numbers repeat their first 512, as whole rows of a layout and whole layers or tokens where
these fit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.control import current_build_context
from hypothesis.vendor.pretty import IDKey, RepresentationPrinter, for_type_by_name

from eplb_core._arrays import FloatArray, IntArray, check_int, check_kind
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import even_shares
from eplb_core.topology import Topology

Size: TypeAlias = int | tuple[int, int]
"""A number, or the least and the most."""
BLOCK = 512
"""Numbers that are drawn one by one: some thousands are too many for Hypothesis."""
_SPARE = -2


@st.composite
def topologies(
    draw: st.DrawFn, *, num_ranks: Size = (1, 8), num_nodes: Size = (1, 4), speeds: bool = False
) -> Topology:
    """Draw ranks on nodes of equal or unequal size, in order or not.

    Args:
        draw: Given by Hypothesis.
        num_ranks: EP ranks R.
        num_nodes: Nodes N, at most R.
        speeds: Whether ranks may differ in speed.

    Raises:
        ValueError: There must be more nodes than there can be ranks.
    """
    fewest, most = size_range(num_nodes, "num_nodes")
    least, largest = size_range(num_ranks, "num_ranks")
    if fewest > largest:
        raise ValueError(f"`num_nodes` (={num_nodes}) must be at most `num_ranks` (={num_ranks})")
    ranks = draw(st.integers(max(least, fewest), largest))
    nodes = draw(st.integers(fewest, min(most, ranks)))
    speed = draw(rank_speeds(ranks)) if speeds else None
    if ranks % nodes == 0 and not draw(st.booleans()):
        return Topology(ranks, nodes, rank_speed=speed)
    others = st.lists(st.integers(0, nodes - 1), min_size=ranks - nodes, max_size=ranks - nodes)
    node_of = sorted([*range(nodes), *draw(others)])
    return Topology(rank_to_node=draw(st.just(node_of) | st.permutations(node_of)), rank_speed=speed)


@st.composite
def rank_speeds(draw: st.DrawFn, num_ranks: Size = (1, 8)) -> list[float]:
    """Draw `rank_speed`, relative, `[R]`; all 1 at the simplest."""
    ranks = draw(st.integers(*size_range(num_ranks, "num_ranks")))
    return draw(st.lists(st.sampled_from([1.0, 0.5, 2.0, 0.9, 3.0]), min_size=ranks, max_size=ranks))


@st.composite
def active_ranks(draw: st.DrawFn, num_ranks: Size = (1, 8), *, least: int = 1) -> list[bool]:
    """Draw `active_ranks`, bools `[R]`; all True at the simplest.

    Args:
        draw: Given by Hypothesis.
        num_ranks: EP ranks R, `least` or more.
        least: Fewest active ones: ceil(E / S) where ranks of S slots must hold E experts.
    """
    low, high = size_range(num_ranks, "num_ranks", check_int(least, "least", 0))
    ranks = draw(st.integers(low, high))
    out = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - least))
    return [rank not in out for rank in range(ranks)]


@st.composite
def slots_by_rank(
    draw: st.DrawFn, num_ranks: Size = (1, 8), *, num_experts: int = 1, slots_per_rank: Size = (1, 4)
) -> list[int]:
    """Draw slots of ranks that differ, ints `[R]`, as `place(slots_per_rank=)` takes them.

    Args:
        draw: Given by Hypothesis.
        num_ranks: EP ranks R.
        num_experts: Logical experts E: all slots together are as many or more.
        slots_per_rank: Slots of one rank.

    Raises:
        ValueError: So many experts can be too many for so few slots.
    """
    low, high = size_range(slots_per_rank, "slots_per_rank")
    least, most = size_range(num_ranks, "num_ranks")
    if most * high < num_experts:
        raise ValueError(f"`num_experts` (={num_experts}) must be at most the {most * high} slots of {most} ranks")
    ranks = draw(st.integers(max(least, -(-num_experts // high)), most))
    slots = draw(st.lists(st.integers(low, high), min_size=ranks, max_size=ranks))
    missing = num_experts - sum(slots)
    for rank in range(ranks):
        more = max(0, min(high - slots[rank], missing))
        slots[rank] += more
        missing -= more
    return slots


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    topology: Topology | st.SearchStrategy[Topology] | None = None,
    num_layers: Size = (1, 3),
    num_experts: Size = (1, 12),
    slots_per_rank: Size | list[int] | None = None,
    empty: bool = True,
    pairs: bool = True,
) -> ExpertLayout:
    """Draw layouts in which every expert has a slot: any order, any number of replicas.

    Args:
        draw: Given by Hypothesis.
        topology: Of the ranks, or a strategy for it; None: `topologies()`. One that has too few slots is drawn again.
        num_layers: Layers L.
        num_experts: Logical experts E; no more than there are slots.
        slots_per_rank: Slots S of each rank; a list of `[R]` where ranks differ: the others' last slots are empty.
            None: what the experts need, and up to 2 more.
        empty: Whether slots may be empty.
        pairs: Whether a rank may hold an expert twice where nothing forces it.

    Raises:
        ValueError: There are fewer slots than experts.

    Example:
        >>> eight_experts = layouts(topology=Topology(4), num_experts=8, slots_per_rank=(2, 4))
    """
    return _layout(draw, draw(_frames(topology, num_layers, num_experts, slots_per_rank)), empty, pairs)


@st.composite
def layout_pairs(
    draw: st.DrawFn,
    *,
    count: int = 2,
    topology: Topology | st.SearchStrategy[Topology] | None = None,
    num_layers: Size = (1, 3),
    num_experts: Size = (1, 12),
    slots_per_rank: Size | list[int] | None = None,
    empty: bool = True,
    pairs: bool = True,
) -> tuple[ExpertLayout, ...]:
    """Draw an old and a new layout of the same shape, experts and ranks, to move from one to the other.

    The arguments are those of `layouts`; `count` is how many layouts follow each other.
    """
    frame = draw(_frames(topology, num_layers, num_experts, slots_per_rank))
    return tuple(_layout(draw, frame, empty, pairs) for _ in range(count))


@st.composite
def expert_loads(
    draw: st.DrawFn,
    *,
    num_layers: Size = (1, 3),
    num_experts: Size = (1, 12),
    num_windows: Size | None = None,
    most: int = 1 << 20,
) -> IntArray:
    """Draw tokens per expert: even, almost even, very uneven, and layers without any.

    Args:
        draw: Given by Hypothesis.
        num_layers: Layers L.
        num_experts: Logical experts E.
        num_windows: Windows T; None: one, without its dimension.
        most: Most tokens of one expert. At the simplest each has 10.

    Returns:
        int64 `[L, E]` or `[T, L, E]`.
    """
    layers, experts = draw(st.integers(*size_range(num_layers, "num_layers", 0))), draw(_number(num_experts))
    shape: tuple[int, ...] = (layers, experts)
    if num_windows is not None:
        shape = (draw(st.integers(*size_range(num_windows, "num_windows", 0))), *shape)
    few = min(experts, BLOCK)
    rows = [draw(_one_load(few, most)) for _ in range(min(int(np.prod(shape[:-1])), BLOCK // few))]
    return _repeated(np.array(rows, dtype=np.int64), shape)


@st.composite
def topk_ids(
    draw: st.DrawFn,
    *,
    num_tokens: Size = (0, 16),
    num_experts: Size = (1, 12),
    top_k: Size = (1, 4),
    padding: bool = True,
    dtype: npt.DTypeLike = np.int64,
) -> npt.NDArray[Any]:
    """Draw the logical experts that tokens chose, `[tokens, top_k]`, distinct for each token.

    Args:
        draw: Given by Hypothesis.
        num_tokens: Tokens.
        num_experts: Logical experts E.
        top_k: Experts of each token, at most E.
        padding: Whether some tokens are padding: rows of -1.
        dtype: Of the ids, a signed one.

    Raises:
        ValueError: A token must have more experts than there are, or ids cannot be -1.
    """
    if not np.issubdtype(dtype, np.signedinteger):
        raise ValueError(f"`dtype` (={np.dtype(dtype)}) must be a signed integer type: padding is -1")
    low, high = size_range(top_k, "top_k")
    least, most = size_range(num_experts, "num_experts")
    if low > most:
        raise ValueError(f"`top_k` (={top_k}) must be at most `num_experts` (={num_experts})")
    tokens = draw(st.integers(*size_range(num_tokens, "num_tokens", 0)))
    experts = draw(st.integers(max(least, low), most))
    k = draw(st.integers(low, min(high, experts)))
    chosen = st.lists(st.integers(0, experts - 1), min_size=k, max_size=k, unique=True)
    row = st.one_of(chosen, chosen, chosen, st.just([-1] * k)) if padding else chosen
    rows = [draw(row) for _ in range(min(tokens, max(1, BLOCK // k)))]
    return _repeated(np.array(rows, dtype=dtype), (tokens, k))


@st.composite
def shares(draw: st.DrawFn, layout: ExpertLayout) -> FloatArray:
    """Draw the fraction of its expert's tokens that each slot takes, float64 `[L, P]`; even at the simplest.

    Some slots take none; the shares of an expert sum to 1, an empty slot has 0.
    """
    p2l, experts = check_kind(layout, "layout", ExpertLayout).physical_to_logical_map, layout.num_experts
    count = min(p2l.size, BLOCK)
    drawn = draw(st.lists(st.sampled_from([1.0, 0.0, 2.0, 3.0, 7.0]), min_size=count, max_size=count))
    weight = np.where(p2l >= 0, np.resize(drawn, p2l.shape), 0.0)
    bins = np.maximum(p2l, 0) + np.arange(len(p2l))[:, None] * experts
    total = np.bincount(bins.reshape(-1), weight.reshape(-1), minlength=len(p2l) * experts)[bins]
    fraction: FloatArray = np.divide(weight, total, out=even_shares(layout), where=total > 0)
    return fraction


# ---- parts -----------------------------------------------------------------------------------------------------------


def size_range(size: Size, name: str, least: int = 1) -> tuple[int, int]:
    """Check a number or a pair; the least and the most, the former raised to `least`."""
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) == 2:
        low, high = (check_int(number, name, 0) for number in pair)
        if high >= max(low, least):
            return max(low, least), high
    raise ValueError(f"`{name}` (={size}) must be a number of {least} or more, or a pair (least, most) of such")


def _number(size: Size, name: str = "num_experts") -> st.SearchStrategy[int]:
    return st.integers(*size_range(size, name))


class _Frame(NamedTuple):
    topology: Topology
    layers: int
    experts: int
    slots: list[int]
    """Slots that each rank may fill."""


@st.composite
def _frames(
    draw: st.DrawFn,
    topology: Topology | st.SearchStrategy[Topology] | None,
    num_layers: Size,
    num_experts: Size,
    slots_per_rank: Size | list[int] | None,
) -> _Frame:
    """What layouts that can be compared have in common."""
    least, most = size_range(num_experts, "num_experts")
    listed = slots_per_rank if isinstance(slots_per_rank, list) else None
    if listed is not None and min([check_int(slots, "slots_per_rank", 0) for slots in listed], default=0) < 1:
        raise ValueError(f"`slots_per_rank` (={listed}) must have a number of 1 or more for each rank")
    if topology is None:
        topology = topologies(num_ranks=len(listed)) if listed else topologies()
    low, high = 1, most
    if not (slots_per_rank is None or isinstance(slots_per_rank, list)):
        low, high = size_range(slots_per_rank, "slots_per_rank")

    def room(found: Topology) -> int:
        """Slots that there may be; 0 where the list is of other ranks."""
        if listed is None:
            return high * found.num_ranks
        return sum(listed) if len(listed) == found.num_ranks else 0

    if isinstance(topology, st.SearchStrategy):
        topology = draw(topology.filter(lambda found: room(found) >= least))
    elif room(check_kind(topology, "topology", Topology)) < least:
        raise ValueError(
            f"`slots_per_rank` (={slots_per_rank}) must have room for `num_experts` (={num_experts}) on {topology}"
        )
    ranks = topology.num_ranks
    layers = draw(st.integers(*size_range(num_layers, "num_layers", 0)))
    if listed is not None:
        return _Frame(topology, layers, draw(st.integers(least, min(most, sum(listed)))), listed)
    if slots_per_rank is None:
        experts = draw(st.integers(least, most))
        per_rank = -(-experts // ranks) + draw(st.integers(0, 2))
    else:
        per_rank = draw(st.integers(max(low, -(-least // ranks)), high))
        experts = draw(st.integers(least, min(most, ranks * per_rank)))
    return _Frame(topology, layers, experts, [per_rank] * ranks)


def _layout(draw: st.DrawFn, frame: _Frame, empty: bool, pairs: bool) -> ExpertLayout:
    slots = len(frame.slots) * max(frame.slots)
    rows = [_row(draw, frame, empty, pairs) for _ in range(min(frame.layers, max(1, BLOCK // slots)))]
    p2l = np.resize(np.array(rows, dtype=np.int64), (frame.layers, slots))
    return ExpertLayout(p2l, frame.experts, topology=frame.topology)


def _row(draw: st.DrawFn, frame: _Frame, empty: bool, pairs: bool) -> list[int]:
    """One layer: each expert once, anywhere, then the slots that are left."""
    everyone = list(range(frame.experts))
    dealt = iter(draw(st.permutations([*everyone, *[_SPARE] * (sum(frame.slots) - frame.experts)])))
    row = []
    for slots in frame.slots:
        held = [next(dealt) for _ in range(slots)]
        here = set(held)
        for i in [i for i, expert in enumerate(held) if expert == _SPARE]:
            others = everyone if pairs else [expert for expert in everyone if expert not in here]
            choices = others + [-1] * empty or everyone
            held[i] = choices[draw(st.integers(0, len(choices) - 1))]
            here.add(held[i])
        row += held + [-1] * (max(frame.slots) - slots)
    return row


@cache
def _one_load(experts: int, most: int) -> st.SearchStrategy[list[int]]:
    """One layer: a level, and how far experts are from it: not at all, a little, far."""
    level = st.just(min(10, most)) | st.just(0) | st.integers(0, most)
    near, far = (st.lists(st.integers(-off, off), min_size=experts, max_size=experts) for off in (9, most))
    return st.tuples(level, st.just([0] * experts) | near | far).map(
        lambda drawn: [max(0, min(most, drawn[0] + off)) for off in drawn[1]]
    )


def _repeated(block: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Repeat the block until the shape is full; numpy's own text of empty and of large arrays is no code."""
    if block.size == np.prod(shape) > 0:
        return block.reshape(shape)
    made, call = (np.resize(block, shape), "resize") if block.size else (np.zeros(shape, block.dtype), "zeros")
    arguments = (block, shape) if block.size else (shape, str(block.dtype))

    def as_call(_: object, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.repr_call(call, arguments, {})

    current_build_context().known_object_printers[IDKey(made)].append(as_call)
    return made


# ---- counterexamples as code -----------------------------------------------------------------------------------------


def _print_topology(topology: Topology, printer: RepresentationPrinter, cycle: bool) -> None:
    even = topology.num_ranks % topology.num_nodes == 0
    options: dict[str, Any] = {}
    if not (topology.rank_speed == 1.0).all():
        options["rank_speed"] = topology.rank_speed.tolist()
    if even and topology == Topology(topology.num_ranks, topology.num_nodes, **options):
        numbers = [topology.num_ranks, topology.num_nodes]
        printer.repr_call("Topology", numbers[: 1 + (topology.num_nodes > 1)], options)
    else:
        printer.repr_call("Topology", (), {"rank_to_node": topology.rank_to_node.tolist(), **options})


def _print_layout(layout: ExpertLayout, printer: RepresentationPrinter, cycle: bool) -> None:
    experts = layout.num_experts
    options: dict[str, Any] = {"topology": layout.topology}
    if layout.num_layers:
        printer.repr_call("ExpertLayout", (layout.physical_to_logical_map.tolist(), experts), options)
    else:
        printer.repr_call("ExpertLayout.trivial", (0, experts), {"num_slots": layout.num_slots, **options})


for_type_by_name("eplb_core.topology", "Topology", _print_topology)
for_type_by_name("eplb_core.layout", "ExpertLayout", _print_layout)
