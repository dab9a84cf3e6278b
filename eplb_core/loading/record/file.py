"""A record on disk, so that its keeper may die and come back while the weights' memory lives on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eplb_core._text import quoted
from eplb_core.errors import SocketOwnerError
from eplb_core.files import reading
from eplb_core.layout import ExpertLayout
from eplb_core.loading.record import wire
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.socket_path import check_owner
from eplb_core.loading.record.state import RecordState

FORMAT = "eplb-record-1"
_BEGIN = b'{"format": "eplb-record-'
_WANTED = f"a record ({FORMAT})"
_MEND = "remove it, and restart the keeper of the weights with memory that was loaded anew"


def save_record(path: reading.PathLike, state: RecordState, *, memory: str) -> None:
    """Write the state whole or not at all, for this user alone; on return it survives a crash of the machine.

    Args:
        path: File to write.
        state: What the record knows.
        memory: Name of the memory that it speaks of.
    """
    content = json.dumps({"format": FORMAT, "memory": memory, **wire.encode_state(state)}).encode()
    reading.write_atomic(path, content, mode=0o600)
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def check_replaceable(path: reading.PathLike) -> None:
    """Refuse a file that no keeper wrote: the record would take its place.

    Raises:
        FileFormatError: It does not begin as a record does.
    """
    try:
        if not Path(path).is_file():
            return
        with open(path, "rb") as file:
            begins = file.read(len(_BEGIN))
    except OSError:  # whoever writes it says what is wrong
        return
    if not _BEGIN.startswith(begins):
        raise reading.bad_file(path, _WANTED, "another kind of file", "name another file, or move this one away")


def load_record(path: reading.PathLike) -> tuple[RecordState, str]:
    """The state and the name of the memory that it speaks of.

    Raises:
        FileFormatError: Truncated, foreign, or of a layout with another digest.
        OSError: No such file, or no permission.
    """
    message = reading.read_json(path)
    with reading.reading(path, _WANTED, _MEND):
        kind = message.get("format") if isinstance(message, dict) else None
        if kind != FORMAT:
            raise ValueError(f"another kind of file (format {quoted(kind, 40)})")
        return wire.decode_state(message), str(message["memory"])


def open_record(path: reading.PathLike, layout: ExpertLayout, *, memory: str) -> LayoutRecord:
    """The record to start with: the one that the file left, if it speaks of this memory.

    Args:
        path: File of `save_record`; it may be absent.
        layout: What the weights hold if they were loaded anew.
        memory: Name of the memory's life, for instance the id that its owner drew when it allocated: equal to the
            file's means that it was kept, another one that it was loaded anew. Empty: nobody knows, so after a restart
            the record is dirty.

    Returns:
        The record. After a restart with kept memory: at the version it had, with the engines of then as non-followers,
        dirty if a move was pending.
    """
    try:
        check_owner(os.path.realpath(path))
        state, former = load_record(path)
    except FileNotFoundError:  # and nothing else: a file that cannot be seen may well be there
        return LayoutRecord(layout)
    except (OSError, ValueError, SocketOwnerError) as error:  # FileFormatError is a ValueError
        return LayoutRecord.of_state(RecordState(layout, dirty=f"the record's file cannot be read: {error}"))
    if memory and memory != former:
        return LayoutRecord(layout)
    record = LayoutRecord.restarted(state)
    if not memory and not record.state.dirty:
        doubt = f"its keeper restarted, and nobody said whether the memory was kept (it was at version {state.version})"
        return LayoutRecord.of_state(record.state._replace(dirty=doubt))
    return record
