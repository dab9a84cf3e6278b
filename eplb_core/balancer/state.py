"""A Balancer's state as plain numbers and arrays, and back, checked: what does not fit is refused whole."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from eplb_core._text import quoted
from eplb_core.balancer.account import Account
from eplb_core.balancer.memory import KEPT, PAST, Memory
from eplb_core.balancer.notes import Notes

_VERSION, _WITHOUT_ACCOUNTS = 2, 1
_MEMORY = ("count", "start", "starts", "changes", "distance", "past", "chain", "shares", "tokens")
_NOTES = ("first_at", "transfers", "live", "before", "proposed", "offered", "promised", "moved_at")
_ACCOUNT = ("until", "live", "newer", "older", "units", "gained")


def state_of(memory: Memory | None, notes: Notes | None, account: Account | None) -> dict[str, Any]:
    """Copy all of it into a dict."""
    state: dict[str, Any] = {"version": _VERSION, "layers": 0, "experts": 0, "slots": 0}
    if memory is not None:
        _, state["layers"], state["experts"] = memory.shares.shape
        state |= {name: _copied(getattr(memory, name)) for name in _MEMORY}
    if memory is not None and notes is not None and account is not None:
        state["slots"] = notes.live.shape[1]
        state |= {name: _copied(getattr(notes, name)) for name in _NOTES}
        state |= {f"account_{name}": _copied(getattr(account, name)) for name in _ACCOUNT}
    state["digest"] = _digest(state)
    return state


def parts_of(state: dict[str, Any]) -> tuple[Memory | None, Notes | None, Account | None]:
    """Build anew what `state_of` has written; raise where anything is amiss."""
    if not isinstance(state, dict):
        raise TypeError(f"`state` (={quoted(state, 80)}) must be a dict, from `state_dict()`")
    if state.get("version") not in (_VERSION, _WITHOUT_ACCOUNTS):
        raise ValueError(
            f"`state` must be of version {_WITHOUT_ACCOUNTS} or {_VERSION}, not {quoted(state.get('version'), 40)}; "
            "observe anew"
        )
    names = ["layers", "experts", "slots", "digest"]
    _check_names(state, names)
    layers, experts, slots = (_check_size(state[name], name) for name in names[:3])
    if layers:
        _check_names(state, _MEMORY)
    if slots and state["version"] == _WITHOUT_ACCOUNTS:
        slots = 0  # what was live and what it brought is one: it begins anew
    if slots:
        _check_names(state, (*_NOTES, *(f"account_{name}" for name in _ACCOUNT)))
    if _digest(state) != state["digest"]:
        raise ValueError("`state` must be as it was saved; its digest differs: send it again")
    memory, notes, account = None, None, None
    if layers:
        memory = Memory(layers, experts)
        _fill(memory, state, _MEMORY)
    if slots:
        notes = Notes(layers, slots)
        _fill(notes, state, _NOTES)
        account = Account(np.zeros((layers, slots), dtype=np.int64), 0)
        _fill(account, state, _ACCOUNT, "account_")
        tables = (notes.live, notes.before, notes.proposed, account.live, account.newer, account.older)
        if not all(table.min(initial=-1) >= -1 and table.max(initial=-1) < experts for table in tables):
            raise ValueError(f"`state` must have experts in [-1, {experts}) in each slot; observe anew")
    if memory is not None and not (
        0 <= memory.start <= memory.count and len(memory.past) <= PAST and memory.shares.shape[0] == KEPT
    ):
        raise ValueError(f"`state` (count {memory.count}, start {memory.start}) must be that of a Balancer")
    return memory, notes, account


def _check_names(state: dict[str, Any], names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        if name not in state:
            raise ValueError(f"`state` must have `{name}`; give what `state_dict()` returned, whole")


def _check_size(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
        raise ValueError(f"`state` (`{name}` = {quoted(value, 40)}) must have a whole number there")
    return value


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (np.ndarray, list)) else value


def _fill(target: Memory | Notes | Account, state: dict[str, Any], names: tuple[str, ...], prefix: str = "") -> None:
    """Set fields to copies of the saved ones, which must be of the kind and shape that they have when new."""
    for name in names:
        new, saved = getattr(target, name), state[prefix + name]
        same = type(saved) is type(new)
        if same and isinstance(new, np.ndarray):
            same = saved.dtype == new.dtype and saved.shape == new.shape
        if not same:
            raise ValueError(f"`state` (`{name}`: {quoted(type(saved).__name__)}) must have there what was saved")
        setattr(target, name, _copied(saved))


def _digest(state: dict[str, Any]) -> str:
    """Of all fields but itself."""
    found = hashlib.sha256()
    for name in sorted(map(str, state)):
        value = state.get(name)
        if name == "digest":
            continue
        if isinstance(value, np.ndarray):
            found.update(f"{name} {value.dtype.str} {value.shape} ".encode())
            found.update(np.ascontiguousarray(value).tobytes())
        else:
            found.update(f"{name} {value!r} ".encode())
    return found.hexdigest()
