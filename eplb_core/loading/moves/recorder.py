"""What a move tells the keeper of the weights' layout, before it changes a layer and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from eplb_core._arrays import ArrayLike
from eplb_core.loading.moves.progress import Trouble
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.record.state import Reply


class MoveRecord(Protocol):
    """A keeper that other engines read the layout from, such as `LayoutClient`.

    Methods may wait for the keeper, up to a deadline, and do not raise. They are called on a worker, except
    `refuse_moves`, which waits for nothing.
    """

    @property
    def adopted(self) -> int:
        """Version of the layout that the weights are in; a commit raises it."""
        ...

    def begin(self, layers: Iterable[int], version: int) -> Reply:
        """Ask to change `layers`; until commit or abort they count as undefined."""
        ...

    def commit(self, layers: Iterable[int], rows: ArrayLike) -> Reply:
        """Report that every byte of `layers` is in place; `rows` are their new rows, ints `[len(layers), P]`."""
        ...

    def abort(self, layers: Iterable[int]) -> object:
        """Report that nothing of `layers` was or will be changed."""
        ...

    def refuse_moves(self, reason: str) -> None:
        """Report that there will be no more moves."""
        ...


class Recorder:
    """Sends the messages of a step to a record, or to nobody."""

    def __init__(self, record: MoveRecord | None) -> None:
        self._record = record

    def begin(self, step: Step) -> None:
        """Call before a step counts as staged.

        Raises:
            Trouble: `busy` or `refused`.
        """
        if self._record is not None:
            reply = self._record.begin([step.layer], self._record.adopted)
            if reply.status != "ok":
                cause: Literal["busy", "refused"] = "busy" if reply.status == "busy" else "refused"
                raise Trouble(cause, f"layer {step.layer}: {reply.reason}")

    def commit(self, step: Step) -> None:
        """Call after the install has run on the device.

        Raises:
            Trouble: `record`: the keeper does not have the layout that the weights are in, and never will.
        """
        if self._record is None:
            return
        row = step.after.physical_to_logical_map[[step.layer]]
        try:
            reply = self._record.commit([step.layer], row)
        except Exception as error:  # the other ranks wait for a word, and the weights are new
            why = f"{type(error).__name__}: {error}"
            raise Trouble("record", f"layer {step.layer} could not be recorded: {why}") from error
        if reply.status != "ok":
            raise Trouble("record", f"layer {step.layer} could not be recorded: {reply.reason}; restart the keepers")
        if reply.digest != step.after.digest:
            raise Trouble(
                "record",
                f"the record's layout (={str(reply.digest)[:12]}) must be the engine's (={step.after.digest[:12]}) "
                f"after layer {step.layer}; restart the keepers",
            )

    def abort(self, step: Step) -> None:
        """Call after `begin`, if there will be no install."""
        if self._record is not None:
            self._record.abort([step.layer])

    def off(self, reason: str) -> None:
        """Call when there will be no more moves."""
        if self._record is not None:
            self._record.refuse_moves(reason)
