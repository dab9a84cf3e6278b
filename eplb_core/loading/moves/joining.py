"""What ranks tell each other before the first read: whether they fit, and where each row lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import IntArray, check_int, check_kind, to_list
from eplb_core._text import plain
from eplb_core._version import __version__
from eplb_core.errors import MigrationError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.store import ExpertStore, check_stores
from eplb_core.loading.transport import Region

_FORMAT = 1


class Hello(NamedTuple):
    """A rank's join message."""

    rank: int
    facts: dict[str, Any]
    """What must be equal on all ranks."""
    capacity: int
    region_offsets: IntArray
    """(region, offset) of every row that peers may read, int64 `[L, S, tensors, 2]`; -1 where the rank has no slot."""
    blob: bytes
    """What the transport exported."""


def regions_of(stores: Sequence[ExpertStore], staging: Staging, slots_per_rank: int) -> tuple[list[Region], IntArray]:
    """List what to export, staging first; and (region, offset) of each row, int64 `[L, S, tensors, 2]`.

    Slots that this rank lacks have -1. Adjacent rows of one storage are one region; adjacent allocations are not, since
    each is exported by itself.

    Raises:
        ValueError: Rows share memory: what is written to one would change the other.
    """
    _check_apart(stores, staging)
    memory = staging.memory
    regions = [Region(memory.data_ptr(), memory.numel(), str(memory.device))]
    first = stores[0]
    offsets = np.full((len(stores), slots_per_rank, len(first.names), 2), -1, dtype=np.int64)
    for layer, store in enumerate(stores):
        for tensor, (name, size) in enumerate(zip(store.names, store.row_bytes.tolist(), strict=True)):
            starts = store.addresses[:, tensor]
            order = np.argsort(starts, kind="stable")
            storages = [store.row(name, slot).untyped_storage().data_ptr() for slot in order.tolist()]
            begins = np.diff(starts[order], prepend=starts[order[0]] - size - 1) != size
            begins |= np.diff(storages, prepend=storages[:1]) != 0
            region = np.cumsum(begins) - 1
            base = starts[order][begins]
            offsets[layer, order, tensor, 0] = len(regions) + region
            offsets[layer, order, tensor, 1] = starts[order] - base[region]
            lengths = np.bincount(region) * size
            regions += [Region(*span, str(store.device)) for span in zip(base.tolist(), lengths.tolist(), strict=True)]
    return regions, offsets


def _check_apart(stores: Sequence[ExpertStore], staging: Staging) -> None:
    """Raise ValueError if rows share memory: a tensor that is in two layers would be moved twice."""
    names = [(layer, name) for layer, store in enumerate(stores) for name in store.names + store.whole_names]
    starts = [column for store in stores for table in (store.addresses, store.whole_addresses) for column in table.T]
    sizes = [size for store in stores for size in (*store.row_bytes.tolist(), *store.whole_row_bytes.tolist())]
    starts.append(np.array([staging.memory.data_ptr()]))
    sizes.append(staging.memory.numel())
    of = np.repeat(np.arange(len(starts)), [len(column) for column in starts])
    start, size = np.concatenate(starts), np.array(sizes)[of]
    order = np.argsort(start, kind="stable")
    start, size, of = start[order], size[order], of[order]
    bad = np.flatnonzero(start[:-1] + size[:-1] > start[1:])
    if len(bad):
        told = [
            "`staging`" if i == len(names) else f"{names[i][1]!r} of layer {names[i][0]}"
            for i in of[bad[0] : bad[0] + 2]
        ]
        raise ValueError(f"{told[0]} and {told[1]} share memory; give each tensor once, and staging of its own")


def facts_of(stores: Sequence[ExpertStore], layout: ExpertLayout) -> dict[str, Any]:
    """List what must be equal on all ranks."""
    first = stores[0]
    return {
        "version of eplb_core": __version__,  # another one may take the same steps in another order
        "format": _FORMAT,
        "experts": layout.num_experts,
        "layers, slots": list(layout.physical_to_logical_map.shape),
        "nodes of the ranks": layout.topology.rank_to_node.tolist(),
        "tensors": list(first.names),
        "bytes of a slot": [store.row_bytes.tolist() for store in stores],
        "whole tensors": list(first.whole_names),
        "bytes of their rows": [store.whole_row_bytes.tolist() for store in stores],
        "layout": layout.digest,
    }


def encode(hello: Hello, failure: str) -> bytes:
    """Encode a join message; `failure` says why this rank cannot join, or is empty."""
    head = {
        "rank": hello.rank,
        "facts": hello.facts,
        "capacity": hello.capacity,
        "places": list(hello.region_offsets.shape),  # the word of all versions, so that each can read the other's
        "failure": failure,
    }
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + hello.region_offsets.astype("<i8").tobytes() + hello.blob


def decode(blob: bytes) -> tuple[Hello, str]:
    """Decode another rank's join message and failure.

    Raises:
        MigrationError: The bytes are of another version of this library.
    """
    try:
        end = 8 + int.from_bytes(blob[:8], "little")
        head = json.loads(blob[8:end])
        shape = head["places"]
        size = 8 * int(np.prod(shape))
        offsets = np.frombuffer(blob[end : end + size], dtype="<i8").astype(np.int64).reshape(shape)
        rank, capacity = check_int(head["rank"], "rank", 0), check_int(head["capacity"], "capacity", 0)
        return Hello(rank, dict(head["facts"]), capacity, offsets, blob[end + size :]), str(head["failure"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise MigrationError(
            f"cannot decode another rank's join message ({type(error).__name__}: {plain(str(error), 80)}); install the "
            f"same eplb_core (this one: {__version__}) on all ranks; no weight was moved",
            reason="join",
        ) from error


def check_hellos(joined: list[tuple[Hello, str]], num_ranks: int) -> list[Hello]:
    """Return the join messages if they fit; all ranks compare with the first and so raise the same error."""
    raise_if_any([failure for _, failure in joined])
    hellos = [hello for hello, _ in joined]
    ranks = [hello.rank for hello in hellos]
    if len(set(ranks)) < len(ranks) or max(ranks) >= num_ranks:
        raise MigrationError(f"`rank` (={ranks}) must be unique per member and in [0, {num_ranks})", reason="join")
    first = hellos[0]
    for hello in hellos[1:]:
        for what, value in first.facts.items():
            if hello.facts.get(what) != value:
                mine, theirs = plain(value, 80), plain(hello.facts.get(what), 80)
                raise MigrationError(
                    f"{what} of rank {hello.rank} (={theirs}) must be as on rank {first.rank} (={mine}); no weight was "
                    "moved",
                    reason="join",
                    rank=hello.rank,
                )
    return hellos


def raise_if_any(failures: Sequence[str]) -> None:
    """Raise the first failure, and how many more there are: the same error on all ranks."""
    told = [failure for failure in failures if failure]
    if told:
        more = f" ({len(told) - 1} more ranks)" if len(told) > 1 else ""
        raise MigrationError(f"no weight was moved: {told[0]}{more}", reason="join")


def check_frame(stores: Sequence[ExpertStore], layout: ExpertLayout, rank: int) -> list[ExpertStore]:
    """Raise ValueError or TypeError unless stores, layout and rank fit each other; the stores as a list."""
    stores = to_list(stores, "stores")
    check_kind(layout, "layout", ExpertLayout)
    if len(stores) != layout.num_layers or not stores:
        raise ValueError(
            f"`stores` (length {len(stores)}) must have one store per layer of the layout (={layout.num_layers})"
        )
    check_stores(stores)
    check_int(rank, "rank", 0)
    if rank >= layout.topology.num_ranks:
        raise ValueError(f"`rank` (={rank}) must be in [0, {layout.topology.num_ranks})")
    for store in stores:
        store.check_fits(layout, rank=rank)
    return stores
