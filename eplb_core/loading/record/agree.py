"""Agree on the layout that an engine starts with: one decision, taken on every rank from the records of all."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from eplb_core._arrays import check_flag, check_kind, check_real
from eplb_core._text import plain
from eplb_core._version import __version__
from eplb_core.errors import EplbError, LayoutAgreementError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, check_agreement
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.state import RecordState

log = logging.getLogger("eplb_core")

PAUSE = 0.05
"""Seconds between two looks at records with a move under way."""


Shape: TypeAlias = tuple[int, int, int, int]
"""Layers, slots, experts and ranks."""


class Finding(NamedTuple):
    """What one rank says at start-up."""

    own: str
    """Digest of the layout that the engine would start with by itself."""
    shape: Shape
    """Of that layout."""
    adopts: bool = True
    """The engine can route by another layout than its own."""
    record: bool = False
    """This rank's keeper keeps a record, which was read."""
    version: int = 0
    digest: str = ""
    record_shape: Shape = (0, 0, 0, 0)
    pending: str = ""
    """The move that is under way, in words."""
    waited: float = 0.0
    """Seconds that this rank has looked for."""
    failure: str = ""
    """Why this rank cannot start: its record is dirty or cannot be read."""


class Decision(NamedTuple):
    """What every rank does."""

    action: Literal["wait", "own", "adopt", "fail"]
    reason: str = ""
    ranks: tuple[int, ...] = ()
    """For `fail`: ranks at fault."""
    version: int = 0


def agree_on_layout(
    client: LayoutClient | None,
    *,
    own: ExpertLayout,
    agreement: Agreement,
    deadline: float = 300.0,
    adopts: bool = True,
) -> tuple[ExpertLayout, int]:
    """Find the layout that this engine starts with, the same on every rank, before any weight is loaded.

    If every rank has a record, all at one version and digest, the answer is their layout. If some ranks have no record
    and no record has moved an expert yet, it is the engine's own layout; moves of shared weights are then off. If a
    record is dirty, cannot be read, is of another shape, or differs from another rank's, every rank raises. A move that
    another engine has under way is waited for.

    Args:
        client: This rank's presence at its keeper; None where there is none on this rank.
        own: The layout that the engine starts with otherwise; the same on every rank.
        agreement: How ranks exchange what they found; only `gather` is used.
        deadline: Seconds to wait for a move of another engine to end.
        adopts: The engine can route by a layout that is not `own` (it has load balancing, or was given a layout).

    Returns:
        The layout to route by and to load for, with `own`'s topology, and its version (0 without records). Where the
        record equals `own` it is `own` itself.

    Raises:
        LayoutAgreementError: The ranks cannot start on one layout, or run several versions of this library. On every
            rank, with the same text, which names ranks, versions, and the engine and layers of a move that does not
            end.
        ValueError: `deadline` is not positive.

    Cost:
        One query of the keeper and one `gather` of some 300 bytes, milliseconds; again each 50 ms while a move is
        under way.

    Threads:
        The one that may call `agreement.gather`; all ranks together.
    """
    limit = check_real(deadline, "deadline", above=0.0, at_most=1e9)
    check_kind(own, "own", ExpertLayout)
    check_agreement(agreement)
    adopts = check_flag(adopts, "adopts")
    start = time.monotonic()
    while True:
        state, finding = _look(client, own, adopts, time.monotonic() - start)
        told = agreement.gather(json.dumps([__version__, *finding]).encode())
        _check_versions(told)
        found = [_parse(blob, rank) for rank, blob in enumerate(told)]
        decision = decide(found, limit)
        if decision.action != "wait":
            break
        time.sleep(PAUSE)
    if decision.action == "fail":
        raise LayoutAgreementError(decision.reason, ranks=decision.ranks)
    if client is not None and not all(each.record for each in found):
        without = tuple(rank for rank, each in enumerate(found) if not each.record)
        client.refuse_moves(f"{name_ranks(without)} keep{'s' * (len(without) == 1)} no record of shared weights")
    if client is not None:
        client.adopted, client.rank = decision.version, agreement.rank
    if decision.action == "own" or state is None:
        log.info("starting on the engine's own layout %s, version %d", own.digest[:12], decision.version)
        return own, decision.version
    log.info("starting on the recorded layout %s, version %d", state.digest[:12], decision.version)
    return ExpertLayout(state.layout.physical_to_logical_map, own.num_experts, topology=own.topology), decision.version


def decide(found: Sequence[Finding], deadline: float) -> Decision:
    """Decide what all ranks do; pure, so that equal findings give equal decisions.

    Args:
        found: What each rank found, by rank.
        deadline: Seconds after which a move that is still under way is a failure.
    """
    failed = _where(found, lambda each: each.failure)
    if failed:
        return _fail(failed, "; ".join(f"rank {rank}: {found[rank].failure}" for rank in failed[:4]))
    pending = _where(found, lambda each: each.pending)
    if pending:
        if max(each.waited for each in found) < deadline:
            return Decision("wait")
        return _fail(
            pending,
            f"rank {pending[0]}: {found[pending[0]].pending} has not ended for {deadline:g} s; stop that engine",
        )
    recorded = _where(found, lambda each: each.record)
    others = _where(found, lambda each: not each.record)
    if recorded and not others:
        return _decide_recorded(found)
    if recorded:
        moved = _where(found, lambda each: each.record and each.version > 0)
        if moved:
            return _fail(
                moved,
                f"{name_ranks(others)} keep{'s' * (len(others) == 1)} no record, and the weights of rank {moved[0]} "
                f"are at version {found[moved[0]].version}; give every rank a record, or restart all keepers",
            )
    differ = _where(found, lambda each: (each.own, each.shape) != (found[0].own, found[0].shape))
    if differ:
        return _fail(
            differ, f"rank {differ[0]} starts from layout {found[differ[0]].own[:12]}, rank 0 from {found[0].own[:12]}"
        )
    return Decision("own", version=0)


def _decide_recorded(found: Sequence[Finding]) -> Decision:
    """Every rank has a record that can be read."""
    version = found[0].version
    differ, why = compare_records([(each.version, each.digest) for each in found])
    if differ:
        return _fail(differ, why)
    misfits = _where(found, lambda each: each.shape != each.record_shape)
    if misfits:
        mine, theirs = found[misfits[0]].shape, found[misfits[0]].record_shape
        words = ("layers", "slots", "experts", "ranks")
        what = next(f"{b} {word}, the engine {a}" for word, a, b in zip(words, mine, theirs, strict=True) if a != b)
        return _fail(misfits, f"rank {misfits[0]}: the record has {what}; give both the same redundant experts")
    stuck = _where(found, lambda each: each.own != each.digest and not each.adopts)
    if stuck:
        return _fail(
            stuck,
            f"rank {stuck[0]}: experts have moved (version {version}), and the engine routes by its initial "
            "layout only; turn its load balancing on, or restart the keepers of the weights",
        )
    action: Literal["own", "adopt"] = "own" if all(each.own == each.digest for each in found) else "adopt"
    return Decision(action, version=version)


def compare_records(found: Sequence[tuple[int, str]]) -> tuple[tuple[int, ...], str]:
    """Ranks whose record is at another version or digest than rank 0's, and that in words.

    Args:
        found: Version and digest of each rank's record.
    """
    differ = tuple(rank for rank, each in enumerate(found) if each != found[0])
    if not differ:
        return (), ""
    (version, digest), (other, others) = found[0], found[differ[0]]
    return differ, (
        f"the records differ: rank 0 is at version {version}, digest {digest[:12]}, rank {differ[0]} at version "
        f"{other}, digest {others[:12]}; restart the keepers of the weights"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words."""
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _fail(ranks: Sequence[int], reason: str) -> Decision:
    return Decision("fail", reason, tuple(ranks))


def _where(found: Sequence[Finding], condition: Callable[[Finding], object]) -> list[int]:
    return [rank for rank, each in enumerate(found) if condition(each)]


def _shape(layout: ExpertLayout) -> Shape:
    return layout.num_layers, layout.num_slots, layout.num_experts, layout.topology.num_ranks


def _look(
    client: LayoutClient | None, own: ExpertLayout, adopts: bool, waited: float
) -> tuple[RecordState | None, Finding]:
    """This rank's record now, and what to tell the others."""
    finding = Finding(own.digest, _shape(own), adopts, waited=waited)
    if client is None or not client.present:
        return None, finding
    try:
        state = client.query()
    except EplbError as error:
        return None, finding._replace(failure=str(error))
    if state is None:
        return None, finding
    finding = finding._replace(record=True, version=state.version, digest=state.digest)
    if state.dirty:
        return state, finding._replace(failure=f"nobody knows what the slots hold: {state.dirty}")
    return state, finding._replace(record_shape=_shape(state.layout), pending=str(state.pending or ""))


def _check_versions(told: Sequence[bytes]) -> None:
    """Raise on every rank where two versions meet: another one may decide otherwise on what ranks found."""
    versions = [_version_of(blob) for blob in told]
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise LayoutAgreementError(
                f"rank {rank} runs eplb_core {version} and rank 0 {versions[0]}; install one version on all ranks",
                ranks=(rank,),
            )


def _version_of(blob: bytes) -> str:
    try:
        return plain(json.loads(blob)[0], 40)
    except (ValueError, TypeError, LookupError):
        return "of an unknown version"


def _parse(blob: bytes, rank: int) -> Finding:
    try:
        finding = Finding(*json.loads(blob)[1:])
        return finding._replace(shape=_to_shape(finding.shape), record_shape=_to_shape(finding.record_shape))
    except (ValueError, TypeError, LookupError) as error:
        raise LayoutAgreementError(
            f"cannot decode what rank {rank} says of its layout ({error}); install the same eplb_core (this one: "
            f"{__version__}) on all ranks",
            ranks=(rank,),
        ) from error


def _to_shape(numbers: Sequence[int]) -> Shape:
    layers, slots, experts, ranks = numbers
    return layers, slots, experts, ranks
