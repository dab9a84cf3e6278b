"""The daemon of SGLang's weight cache, with a record of the layout of the weights that it holds."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang.maps import layout_of
from eplb_core.adapters.sglang.record import CLAIM, SUFFIX
from eplb_core.errors import EplbError
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.server import LayoutServer

PARAMETERS = {
    "serve": ("self",),
    "_handle_connection": ("self", "conn"),
}
_KEEPS = "_eplb_core_keeps_records"


class _NothingMore:
    """No exports: the daemon gives the weights over its own socket and asks the record only whether it may."""

    def difference(self, config: Mapping[str, Any], frame: Mapping[str, Any]) -> tuple[str, str] | None:
        return None

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {}, []

    def about(self) -> dict[str, Any]:
        return {}


def spawn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `spawn_weight_cache_daemon`: give the child `run_daemon` to run, so that it keeps a record."""
    from sglang.srt.weight_cache import daemon

    before = daemon.run_weight_cache_daemon
    daemon.run_weight_cache_daemon = run_daemon
    try:
        return original(*args, **kwargs)
    finally:
        daemon.run_weight_cache_daemon = before


def run_daemon(*args: Any, **kwargs: Any) -> None:  # pragma: no cover  needs SGLang: tests/engines
    """SGLang's `run_weight_cache_daemon`, with a record; runs in a process of its own."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.weight_cache import daemon

    load_plugins()  # SGLang does not here, and a daemon too must fill all slots
    keep_records(daemon.WeightCacheDaemon)
    daemon.run_weight_cache_daemon(*args, **kwargs)


def keep_records(daemon_class: Any) -> str:
    """Let all daemons of this process keep a record, from now on.

    Args:
        daemon_class: `WeightCacheDaemon`, or what stands in for it.

    Returns:
        Why it is left as it is, or nothing.
    """
    if vars(daemon_class).get(_KEEPS):
        return ""
    for name, parameters in PARAMETERS.items():
        trouble = hooking.mismatch(vars(daemon_class).get(name), f"WeightCacheDaemon.{name}", parameters)
        if trouble:
            hooking.log_once(f"record is left to SGLang, written for 0.5.23: {trouble}", logging.ERROR)
            return trouble
    for name, hook in (("serve", serve), ("_handle_connection", answer_request)):
        setattr(daemon_class, name, _around(getattr(daemon_class, name), hook))
    setattr(daemon_class, _KEEPS, True)
    return ""


def _around(engine_own: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(engine_own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(engine_own, *args, **kwargs)

    return call


def serve(original: Callable[..., Any], daemon: Any) -> Any:
    """Around `WeightCacheDaemon.serve`: keep the record of what was loaded, for as long as it serves."""
    metadata = context.live_metadata()
    if metadata is None:
        hooking.log_once("record: this model has no expert location, so none is kept", logging.INFO)
        return original(daemon)
    layout = layout_of(metadata)
    path = daemon.socket_path + SUFFIX
    with LayoutServer(path, LayoutRecord(layout), exports=_NothingMore()) as server:
        vars(daemon)["_eplb_core_server"] = server
        hooking.log_once(f"in effect in SGLang: record at {path} ({layout.digest[:12]})", logging.INFO)
        return original(daemon)


def answer_request(original: Callable[..., Any], daemon: Any, conn: Any) -> Any:
    """Around `_handle_connection`: give weights only to an engine that routes by the layout that they are in."""
    server = vars(daemon).get("_eplb_core_server")
    if server is None:
        return original(daemon, conn)
    from sglang.srt.weight_cache.protocol import recv_msg, send_msg

    heard = _Heard(conn)
    request = recv_msg(heard)
    if isinstance(request, dict) and request.get("type") == "fetch_state" and _fits(daemon.config, request):
        reason = may_map(server.path, request.get(CLAIM))
        if reason:
            hooking.log_once(f"record: weights are not given: {reason}")
            send_msg(conn, {"status": "mismatch", "daemon_config": {**daemon.config.to_dict(), CLAIM: reason}})
            return None
    return original(daemon, heard.again())


def _fits(config: Any, request: Mapping[str, Any]) -> bool:
    """Whether the engine's own code would give weights to this request; if not, it does not count as a user."""
    try:
        return bool(config.matches(type(config).from_dict(request["config"])))
    except Exception:
        return False


def may_map(path: str, claim: Any) -> str:
    """Say why an engine with this claim may not map the weights; empty if it may, and the record notes it then."""
    said = claim if isinstance(claim, dict) else {}
    engine, version, digest = (said.get(name) for name in ("engine", "version", "digest"))
    with LayoutClient(path, "the daemon", attach=False) as look:
        look.adopted = version if isinstance(version, int) else 0
        try:
            reply, fds = look.fetch({}, digest if isinstance(digest, str) else "", {}, engine=engine)
        except EplbError as error:
            return str(error)
    for fd in fds:  # pragma: no cover  there are none
        os.close(fd)
    return "" if reply["status"] == "ok" else str(reply["reason"])


class _Heard:
    """A connection whose first message is read once and can be read again."""

    def __init__(self, conn: Any, data: bytes = b"") -> None:
        self._conn, self._data, self._all = conn, data, bytearray()

    def recv(self, size: int) -> bytes:
        if self._data:
            part, self._data = self._data[:size], self._data[size:]
            return part
        part = self._conn.recv(size)
        self._all += part
        return part  # type: ignore[no-any-return]

    def again(self) -> _Heard:
        """The connection as it was before its first message was read."""
        return _Heard(self._conn, bytes(self._all))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)
