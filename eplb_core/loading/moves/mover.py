"""Moving experts while nothing else runs: stage, agree, install, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from eplb_core._arrays import ArrayLike, IntArray, check_kind, check_real
from eplb_core.errors import AgreementError, MigrationError
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install.installer import Installer, Staging
from eplb_core.loading.moves.joining import check_frame, lacks_room_on_the_way
from eplb_core.loading.moves.pull import RAISED, Backup, Pull, Puller, Trouble
from eplb_core.loading.moves.recorder import MoveRecord, Recorder
from eplb_core.loading.moves.stage import check_staged, to_reference
from eplb_core.loading.moves.steps import Step, plan_steps
from eplb_core.loading.pull_plan import RESTORE, check_senders
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
    """Bring the weights of all ranks from `old` to `new`, and dispatch with them; every rank calls it at once.

    For each layer all ranks read what they lack into staging; when all have, all install. If one cannot, the move ends
    there on every rank: layers installed before are new, the others old.

    Args:
        stores: One a layer, of this rank.
        old: Layout that the weights are in.
        new: Layout to reach.
        rank: This rank.
        transport: How to read other ranks' memory.
        agreement: Of all ranks, or of those that live: others are not read from. Its `gather` alone is used.
        tables: Dispatch tables to keep in step, or None.
        layers: Rows to move, ints or bools, the same in the same order on every rank. Default: all.
        record: Keeper to tell of every step, or None.
        staging: Memory for incoming slots: bytes, or uint8 `[bytes]` on the stores' device. With less than what any
            rank reads for a layer, the layer is moved in parts; one slot is always enough. Default: S slots.
        backup: Where experts come from that no live rank holds.
        reference: `by_expert` of `verify_weights`: what arrives is printed and compared before it is installed.
        senders: As in `plan_pull`, the same on every rank.
        deadline: Seconds for the reads of one step.

    Returns:
        The layout reached: `new` in `layers`, else `old`.

    Raises:
        MigrationError: On every rank: a read failed or took too long, a peer was lost, a record refused, or ranks do
            not fit each other; or tables raised: install those of `layout` anew. `layout` is the one reached, `rank`
            who gave up, `reason` why in one word.
        ValueError: Stores, layouts, tables or rank do not fit each other.

    Cost:
        Two blocking gathers a step and the reads one after the other. Waits for the device.

    Threads:
        One, between passes: nobody may compute with the weights meanwhile.
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
    recorder = Recorder(record)
    steps = plan_steps(
        old, new, rank=rank, capacity=puller.capacity, layers=layers, avoid_ranks=puller.avoid_ranks, senders=told
    )
    return _carry_out(steps, old, puller, installer, recorder, agreement, tables, backup, prints, seconds)


def _carry_out(
    steps: Iterator[Step],
    live: ExpertLayout,
    puller: Puller,
    installer: Installer,
    recorder: Recorder,
    agreement: Agreement,
    tables: Tables | None,
    backup: Backup | None,
    prints: IntArray | None,
    seconds: float,
) -> ExpertLayout:
    device = puller.staging.memory.device
    for step in steps:
        pull, trouble = _stage(puller, recorder, tables, backup, prints, step, seconds)
        try:
            failures = _tell(agreement, trouble, puller.rank, live)
        except MigrationError:
            if trouble is None:
                recorder.abort(step)
            raise
        if failures or pull is None:
            if trouble is None:
                recorder.abort(step)
            _raise(failures, live)
        installer.run(step.layer, installer.plan(step, pull.place_of))
        puller.release(pull)
        live = step.after
        trouble = _change_tables(tables, step)
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
    """Install a layer's tables; what they raise all ranks must hear: the weights are new, and the others wait."""
    try:
        if tables is not None:
            tables.install(step.after, layers=[step.layer])
    except Exception as error:
        trouble = Trouble("failed", f"layer {step.layer}: the tables were not installed: {error}")
        trouble.__cause__ = error
        return trouble
    return None


def _stage(
    puller: Puller,
    recorder: Recorder,
    tables: Tables | None,
    backup: Backup | None,
    prints: IntArray | None,
    step: Step,
    seconds: float,
) -> tuple[Pull | None, Trouble | None]:
    pull = None
    try:
        why = lacks_room_on_the_way(tables, step)
        if why:
            raise Trouble("plan", why)
        pull = puller.begin(step, seconds)
        puller.wait(pull, step.layer, seconds)
        restore(puller, backup, step, pull)
        check_staged(puller, step, pull, prints)
        recorder.begin(step)
    except BaseException as error:
        if pull is not None:
            puller.give_up(pull)
        if isinstance(error, Trouble):
            return None, error
        if isinstance(error, RAISED):  # a transport's own, a record's: the other ranks wait for a word
            return None, Trouble("read", f"layer {step.layer}: {type(error).__name__}: {error}")
        raise
    return pull, None


def restore(puller: Puller, backup: Backup | None, step: Step, pull: Pull) -> None:
    """Fill the staging rows of slots that no rank can give, from the backup."""
    row = step.after.physical_to_logical_map[step.layer]
    for slot in (step.kind == RESTORE).nonzero()[0].tolist():
        expert = int(row[puller.rank * len(step.kind) + slot])
        try:
            if backup is None:
                raise KeyError(f"there is no backup of layer {step.layer}, expert {expert}")
            backup.fetch(step.layer, expert, puller.staging.row(int(pull.place_of[slot]), puller.stores[step.layer]))
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            raise Trouble(
                "backup", f"no live rank holds expert {expert} of layer {step.layer}, and its backup: {error}"
            ) from error


def _tell(agreement: Agreement, trouble: Trouble | None, rank: int, live: ExpertLayout) -> list[tuple[int, str, str]]:
    """Tell all ranks how it went here; who failed, by (rank, cause, reason)."""
    own: list[Any] = [] if trouble is None else [rank, trouble.cause, trouble.reason]
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
