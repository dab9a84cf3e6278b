"""Processes of a benchmark, one harness for all: start them, ask them by pipes, stop or kill them, collect answers.

What a process runs is `function(pipe, *arguments)` at the top of a module; it says what it has found by `pipe.send`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Peer:
    """A process and the pipe to it.

    Args:
        function: What it runs.
        arguments: After the pipe.
        method: As `multiprocessing` has them; what has seen a GPU must not be forked.
        preload: Modules that the "forkserver" imports once for all.
    """

    def __init__(
        self, function: Callable[..., object], *arguments: Any, method: str = "spawn", preload: Sequence[str] = ()
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        if preload:
            context.set_forkserver_preload(preload)
        self.began = time.perf_counter()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, seconds: float) -> Any:
        """The next answer; RuntimeError where none comes, or where it is an error."""
        if not self.pipe.poll(seconds):
            raise RuntimeError(f"no answer within {seconds:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"a process ended with {self.join(5.0)}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, question: Any, seconds: float) -> Any:
        """What it answers."""
        self.pipe.send(question)
        return self.hear(seconds)

    def signal(self, number: int) -> None:
        """As the system does."""
        os.kill(int(self.process.pid), number)

    def join(self, seconds: float) -> int | None:
        """Its exit code; None: it still runs."""
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        return code

    def kill(self) -> None:
        """SIGKILL, and wait; again is nothing."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def collect(peers: Sequence[Peer], seconds: float, *, may_die: int = -1) -> tuple[list[Any], list[int | None]]:
    """Wait until all have ended, or one has failed, or time is up; kill what is left.

    Returns:
        The last that each of them said, None for nothing, and its exit code, None where it had to be killed.
    """
    said: list[Any] = [None] * len(peers)
    codes: list[int | None] = [None] * len(peers)
    talking: dict[Any, int] = {peer.pipe: number for number, peer in enumerate(peers)}
    until = time.monotonic() + seconds
    try:
        while talking and (left := until - time.monotonic()) > 0:
            for pipe in connection.wait(list(talking), left):
                number = talking[pipe]
                try:
                    said[number] = peers[number].pipe.recv()
                except (EOFError, ConnectionResetError):
                    del talking[pipe]
                    codes[number] = peers[number].join(10.0)
                    if codes[number] and number != may_die:  # the others can only say that it does not answer
                        until = min(until, time.monotonic() + 1.0)
    finally:
        for peer in peers:
            peer.kill()
    return said, codes


def by_rank(said: Sequence[Any], codes: Sequence[int | None]) -> dict[str, Any]:
    """For a record: what each rank found, and the exit codes where one is not 0."""
    found = [{"error": f"ended with {code}"} if one is None else one for one, code in zip(said, codes, strict=True)]
    return {"by_rank": found, **({"codes_error": str(list(codes))} if any(code != 0 for code in codes) else {})}


def gloo_group(folder: str | Path, rank: int, size: int, *, name: str = "store", seconds: float = 60.0) -> Any:
    """A group of gloo beside torch's default one, or without it, whose members meet in a file."""
    import torch.distributed

    dist: Any = torch.distributed
    store = dist.FileStore(str(Path(folder, name)), size)
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
