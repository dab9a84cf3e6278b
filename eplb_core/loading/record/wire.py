"""The messages of the socket: a length of four bytes, then one JSON object.

Layouts and rows travel as base64 of little-endian int32, since a map in decimal digits takes milliseconds to read.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from eplb_core._arrays import IntArray, check_int
from eplb_core._text import plain
from eplb_core._version import __version__
from eplb_core.layout import ExpertLayout
from eplb_core.loading.record.state import Move, RecordState
from eplb_core.topology import Topology

Message: TypeAlias = dict[str, Any]

PROTOCOL = 1
"""Both sides put it into every message, with the library's version; a reply refuses any other protocol."""
LENGTH = struct.Struct("!I")
MAX_HELLO = 64 << 10
"""Longest request that needs no rows."""
MAX_REPLY = 64 << 20
"""Longest reply: the names and shapes of some hundred thousand tensors."""


class WireError(ValueError):
    """Bytes that are no message."""


class OtherProtocolError(WireError):
    """A message of another version of this library."""


def max_request(state: RecordState | None) -> int:
    """Longest request that makes sense: a commit of all rows."""
    return MAX_HELLO + (0 if state is None else 8 * state.layout.num_layers * state.layout.num_slots)


def pack(message: Mapping[str, Any]) -> bytes:
    """One message as bytes."""
    head = {"protocol": PROTOCOL, "eplb_core": __version__}
    body = json.dumps({**head, **message}, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray) -> Message:
    """The object in the bytes that follow a length.

    Raises:
        WireError: No JSON object.
        OtherProtocolError: One of another protocol.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise WireError(f"no JSON: {type(error).__name__}") from error
    if not isinstance(message, dict):
        raise WireError(f"a JSON {type(message).__name__} where an object is due")
    if message.get("protocol") != PROTOCOL or isinstance(message["protocol"], bool):
        protocol, version = (plain(message.get(name, "unknown"), 20) for name in ("protocol", "eplb_core"))
        raise OtherProtocolError(
            f"protocol {protocol} of eplb_core {version}; this side speaks {PROTOCOL}, of eplb_core {__version__}"
        )
    return message


class Inbox(bytearray):
    """Bytes as they arrived; gives messages as they become complete."""

    def take(self, limit: int) -> bytes | None:
        """The next message's body, or None until it is whole.

        Raises:
            WireError: It is declared longer than `limit`: where the next one starts is then unknown.
        """
        if len(self) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self)
        if length > limit:
            raise WireError(f"a message of {length:,} bytes; at most {limit:,} are allowed")
        end = LENGTH.size + length
        if len(self) < end:
            return None
        body = bytes(self[LENGTH.size : end])
        del self[:end]
        return body


# ---- arrays ----------------------------------------------------------------------------------------------------------


def encode_rows(rows: IntArray) -> str:
    """Ids as text."""
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode("ascii")


def decode_rows(text: object, shape: tuple[int, int]) -> IntArray:
    """Ids out of text.

    Raises:
        WireError: No base64, or another number of ids.
    """
    if not isinstance(text, str):
        raise WireError(f"`rows` are {type(text).__name__}, not text")
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise WireError("`rows` are no base64") from error
    if len(raw) != 4 * shape[0] * shape[1]:
        raise WireError(
            f"`rows` hold {len(raw)} bytes; {shape[0]} rows of {shape[1]} slots take {4 * shape[0] * shape[1]}"
        )
    return np.frombuffer(raw, dtype="<i4").reshape(shape).astype(np.int64)


def encode_state(state: RecordState, known: object = None) -> Message:
    """Encode all of a record, for a client or a file; without the map if the reader knows the digest."""
    fields = state._asdict()
    layout = fields.pop("layout")
    return {
        **fields,
        "digest": state.digest,
        "num_layers": layout.num_layers,
        "num_slots": layout.num_slots,
        "num_experts": layout.num_experts,
        "rank_to_node": layout.topology.rank_to_node.tolist(),
        "rank_speed": layout.topology.rank_speed.tolist(),
        "map": None if known == state.digest else encode_rows(layout.physical_to_logical_map),
    }


def decode_state(message: Message, known: ExpertLayout | None = None) -> RecordState:
    """Decode and check what `encode_state` wrote; `known` is the layout whose digest was sent along.

    Raises:
        WireError: Something is missing, of the wrong kind, no valid layout, or the digest is of another one.
    """
    try:
        layout = _decode_layout(message) if known is None or message["map"] is not None else known
        move = message["pending"]
        fields: dict[str, Any] = {
            "pending": None if move is None else Move(str(move[0]), tuple(int(i) for i in move[1]), int(move[2])),
            "dirty": str(message["dirty"]),
            "asking": bool(message["asking"]),
        }
        for name in ("engines", "non_followers", "followers", "holding"):
            fields[name] = tuple(str(each) for each in message[name])
        for name in ("version", "num_non_followers", "begun"):
            fields[name] = check_int(message[name], name, 0)
        state = RecordState(layout, **fields)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise WireError(f"an incomplete record: {type(error).__name__}: {error}") from error
    if layout.digest != message.get("digest"):
        raise WireError(
            f"the map has digest {layout.digest[:12]} and the message says {str(message.get('digest'))[:12]}"
        )
    return state


def _decode_layout(message: Message) -> ExpertLayout:
    topology = Topology(rank_to_node=message["rank_to_node"], rank_speed=message["rank_speed"])
    rows = decode_rows(message["map"], (int(message["num_layers"]), int(message["num_slots"])))
    return ExpertLayout(rows, message["num_experts"], topology=topology)
