"""The harness of ranks: what each said last, how it ended, and nobody is left."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from benchmarks import ranks


def live(pipe: Any, end: str) -> None:
    """Say two things, then end as told."""
    pipe.send("first")
    pipe.send({"said": end})
    if end == "hangs":
        time.sleep(100)
    os._exit(3 if end == "fails" else 0)


def echo(pipe: Any) -> None:
    while True:
        asked = pipe.recv()
        pipe.send({"error": "as asked"} if asked == "fail" else asked)


@pytest.mark.slow
def test_ranks_are_waited_for_until_one_fails_and_then_none_is_left() -> None:
    good = [ranks.Peer(live, "ends", method="forkserver") for _ in range(2)]
    assert ranks.collect(good, 60.0) == ([{"said": "ends"}] * 2, [0, 0])
    bad = [ranks.Peer(live, end, method="forkserver") for end in ("fails", "hangs")]
    said, codes = ranks.collect(bad, 60.0)
    assert said[0] == {"said": "fails"}
    assert codes == [3, None]
    assert not any(peer.process.is_alive() for peer in (*good, *bad))
    assert ranks.by_rank([1, None], codes) == {
        "by_rank": [1, {"error": "ended with None"}],
        "codes_error": "[3, None]",
    }


@pytest.mark.slow
def test_a_peer_answers_what_it_is_asked_or_it_is_an_error() -> None:
    peer = ranks.Peer(echo, method="forkserver")
    assert peer.ask(("any", 1), 60.0) == ("any", 1)
    with pytest.raises(RuntimeError, match="as asked"):
        peer.ask("fail", 60.0)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.01 s"):
        peer.hear(0.01)
    peer.process.kill()
    with pytest.raises(RuntimeError, match="a process ended with -9"):
        peer.hear(60.0)
    peer.kill()
