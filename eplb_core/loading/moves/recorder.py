"""What a move tells the keeper of the weights' layout, before it changes a layer and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from eplb_core._arrays import ArrayLike
from eplb_core.loading.moves.pull import Trouble
from eplb_core.loading.moves.steps import Step


class MoveRecord(Protocol):
    """A keeper that other engines read the layout from, as `LayoutClient` reaches it.

    A reply has `status` ("ok", "busy": ask again later, "refused": never), `reason`, and `version` and `digest` of the
    recorded layout. The methods may wait for the keeper, with an end, and do not raise; they are called on a worker,
    but for `refuse_moves`, which waits for nothing.
    """

    @property
    def adopted(self) -> int:
        """Version of the layout that the weights are in; a commit raises it."""
        ...

    def begin(self, layers: Iterable[int], version: int) -> Any:
        """Ask to change `layers`; until commit or abort they count as undefined."""
        ...

    def commit(self, layers: Iterable[int], rows: ArrayLike) -> Any:
        """Say that every byte of `layers` is in place; `rows` are their new rows, ints `[len(layers), P]`."""
        ...

    def abort(self, layers: Iterable[int]) -> Any:
        """Say that nothing of `layers` was or will be changed."""
        ...

    def refuse_moves(self, reason: str) -> None:
        """There will be no more moves."""
        ...


class Recorder:
    """The three messages of a step, to a record or to nobody."""

    def __init__(self, record: MoveRecord | None) -> None:
        self.record = record

    def begin(self, step: Step) -> None:
        """Before a step counts as staged.

        Raises:
            Trouble: `busy` or `refused`.
        """
        if self.record is not None:
            reply = self.record.begin([step.layer], self.record.adopted)
            if reply.status != "ok":
                cause = "busy" if reply.status == "busy" else "refused"
                raise Trouble(cause, f"layer {step.layer}: {reply.reason}")

    def commit(self, step: Step) -> None:
        """After the install has run on the device.

        Raises:
            Trouble: `record`: the keeper does not have what the weights are now; it will stay so.
        """
        if self.record is None:
            return
        row = step.after.physical_to_logical_map[[step.layer]]
        try:
            reply = self.record.commit([step.layer], row)
        except Exception as error:  # the other ranks wait for a word, and the weights are new
            raise Trouble(
                "record", f"layer {step.layer} could not be recorded: {type(error).__name__}: {error}"
            ) from error
        if reply.status != "ok":
            raise Trouble("record", f"layer {step.layer} could not be recorded: {reply.reason}; restart the keepers")
        if reply.digest != step.after.digest:
            raise Trouble(
                "record",
                f"the record's layout (={str(reply.digest)[:12]}) must be the engine's (={step.after.digest[:12]}) "
                f"after layer {step.layer}; restart the keepers",
            )

    def abort(self, step: Step) -> None:
        """After `begin`, if there will be no install."""
        if self.record is not None:
            self.record.abort([step.layer])

    def off(self, reason: str) -> None:
        """No more moves."""
        if self.record is not None:
            self.record.refuse_moves(reason)
