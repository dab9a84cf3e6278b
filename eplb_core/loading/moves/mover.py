"""Moving experts while nothing else runs: stage, agree, install, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from eplb_core._arrays import ArrayLike, check_kind, check_real
from eplb_core.errors import AgreementError, MigrationError
from eplb_core.exposition import watch
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.joining import check_frame
from eplb_core.loading.moves.progress import Trouble, as_trouble
from eplb_core.loading.moves.pull import RAISED, Puller
from eplb_core.loading.moves.recorder import MoveRecord, Recorder
from eplb_core.loading.moves.stage import Backup, Stager, to_reference
from eplb_core.loading.moves.steps import Step, plan_steps
from eplb_core.loading.pull_plan import check_senders
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.tables import Tables, check_tables, lacks_room
from eplb_core.loading.transport import Transport


def move_experts(
    stores: Sequence[ExpertStore],
    old: ExpertLayout,
    new: ExpertLayout,
    *,
    rank: int,
    transport: Transport,
    agreement: Agreement,
    tables: Tables | None = None,
    layers: ArrayLike | None = None,
    record: MoveRecord | None = None,
    staging: int | torch.Tensor | None = None,
    backup: Backup | None = None,
    reference: ArrayLike | None = None,
    senders: ArrayLike | None = None,
    deadline: float = 60.0,
) -> ExpertLayout:
    """Move the weights and dispatch tables of all ranks from `old` to `new`; every rank calls it at once.

    For each layer all ranks read what they lack into staging; when all have it, all install. If one cannot, the move
    ends there on every rank: layers installed before are new, the others old.

    Args:
        stores: One per layer, of this rank.
        old: Layout that the weights are in.
        new: Layout to reach.
        rank: This rank.
        transport: Reads other ranks' memory.
        agreement: Of all ranks, or of the live ones: other ranks are not read from. Only its `gather` is used.
        tables: Dispatch tables to install with each layer, or None.
        layers: Rows to move, ints or bools, the same in the same order on every rank. Default: all.
        record: Keeper to tell of every step, or None.
        staging: Memory for incoming slots: bytes, or uint8 `[bytes]` on the stores' device. If it holds less than some
            rank reads for a layer, that layer is moved in parts; one slot is always enough. Default: S slots.
        backup: Where experts come from that no live rank holds.
        reference: `by_expert` of `verify_weights`: the fingerprint of what arrives is compared with it before an
            install.
        senders: As in `plan_pull`, the same on every rank.
        deadline: Seconds for the reads of one step.

    Returns:
        The layout reached: `new` in `layers`, else `old`.

    Raises:
        MigrationError: On every rank: a read failed or took too long, a peer was lost, a record refused, or ranks do
            not fit each other; or tables raised: install those of `layout` again. `layout` is the one reached, `rank`
            the rank that gave up, `reason` the cause in one word.
        ValueError: Stores, layouts, tables or rank do not fit each other; `new` uses slots that a rank does not have.

    Cost:
        Two blocking gathers a step and the reads one after the other. Waits for the device.

    Threads:
        One, between passes: nothing may compute with the weights meanwhile.
    """
    seconds = check_real(deadline, "deadline", above=0.0, at_most=1e9)
    check_kind(old, "old", ExpertLayout)
    check_kind(new, "new", ExpertLayout)
    stores = check_frame(stores, old, rank)
    old.check_same_frame(new)
    check_tables(tables, old)
    prints, told = to_reference(reference, old, len(stores[0].names)), check_senders(senders, old)
    space = Staging(staging, stores)
    installer = Installer(stores, space)
    rows = list(range(old.num_layers)) if layers is None else layer_rows(layers, old.num_layers).tolist()
    why = lacks_room(tables, new.replica_count[rows])
    if why:
        raise ValueError(f"{why}; make tables for more")
    facts = {"target": new.digest, "layers to move": rows, "record": record is not None}
    puller = Puller(stores, old, rank, transport, agreement, space, facts)
    puller.check_target(new)
    stager = Stager(puller, installer, Recorder(record), tables, backup, prints, seconds)
    watch(stager, counters=stager.counts.counters)
    steps = plan_steps(
        old, new, rank=rank, capacity=puller.capacity, layers=layers, avoid_ranks=puller.avoid_ranks, senders=told
    )
    return _carry_out(steps, old, stager, agreement)


def _carry_out(steps: Iterator[Step], live: ExpertLayout, stager: Stager, agreement: Agreement) -> ExpertLayout:
    puller, recorder, installer = stager.puller, stager.recorder, stager.installer
    device = puller.staging.memory.device
    for step in steps:
        staged, trouble = None, None
        try:
            stager.check(step)
            staged = stager.stage(step)
        except RAISED as error:  # of a transport or a record, too: the other ranks wait for a word
            trouble = as_trouble(error, f"layer {step.layer}: ")
        try:
            failures = _tell(agreement, trouble, puller.rank, live)
            if failures or staged is None:
                _raise(failures, live)
        except MigrationError:
            if staged is not None:
                recorder.abort(step)
            raise
        installer.run(step.layer, staged.copies)
        puller.release(staged.pull)
        stager.counts.layers += step.last
        live = step.after
        trouble = _change_tables(stager.tables, step)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        try:
            recorder.commit(step)
        except Trouble as why:
            trouble = why
        failures = _tell(agreement, trouble, puller.rank, live)
        if any(cause == "record" for _, cause, _ in failures):
            recorder.off(failures[0][2])
        if failures:
            _raise(failures, live, trouble)
    return live


def _change_tables(tables: Tables | None, step: Step) -> Trouble | None:
    """Install a layer's tables; all ranks must hear what they raise: the weights are new, and the others wait."""
    try:
        if tables is not None:
            tables.install(step.after, layers=[step.layer])
    except Exception as error:
        trouble = Trouble("failed", f"layer {step.layer}: the tables were not installed: {error}")
        trouble.__cause__ = error
        return trouble
    return None


def _tell(agreement: Agreement, trouble: Trouble | None, rank: int, live: ExpertLayout) -> list[tuple[int, str, str]]:
    """Tell all ranks how it went here; return who failed, as (rank, cause, reason)."""
    own = [] if trouble is None else [rank, trouble.cause, trouble.reason]
    try:
        told = agreement.gather(json.dumps(own).encode())
    except AgreementError as error:
        raise MigrationError(
            f"{error}; this rank has reached the layout {live.digest[:12]}", layout=live, reason="agreement"
        ) from error
    failures: list[tuple[int, str, str]] = [tuple(entry) for entry in map(json.loads, told) if entry]
    return failures


def _raise(failures: list[tuple[int, str, str]], live: ExpertLayout, own: Trouble | None = None) -> NoReturn:
    rank, cause, reason = failures[0]
    more = f" ({len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    raise MigrationError(f"rank {rank} gave up: {reason}{more}", layout=live, reason=cause, rank=rank) from own
