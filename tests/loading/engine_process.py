"""An engine in a process of its own, which tests drive by lines and kill by SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def spawn(*command: str, **environment: str) -> subprocess.Popen[str]:
    """A process that imports this tree, with pipes."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, **pipes)


def end(process: subprocess.Popen[str]) -> str:
    """Kill it, and wait until the kernel has taken everything away; what it had said."""
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    said = "" if process.stdout.closed else process.stdout.read()
    process.stdin.close()
    process.stdout.close()
    return said


class Engine:
    """`python engine_process.py PATH ID` and its answers."""

    def __init__(self, path: str | Path, engine_id: str, *, inside: Sequence[str] = ()) -> None:
        self.process = spawn(*inside, sys.executable, __file__, str(path), engine_id)
        self.hello = self._read()

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The client's reply to one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken everything away."""
        end(self.process)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.returncode is None:
            self.kill()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def container() -> list[str]:
    """What puts a command into namespaces of its own; the test is skipped where that is not allowed."""
    import pytest  # not in the engine's process

    inside = ["unshare", "--pid", "--mount", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid --mount is not permitted here")
    return inside


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` says as soon as it is true; another process has to do something first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        threading.Event().wait(0.0002)  # others need the core
    raise AssertionError("it did not come true")


def main(path: str, engine_id: str) -> None:
    """Answer lines until the pipe ends."""
    from eplb_core.loading.record.client import LayoutClient

    client = LayoutClient(path, engine_id)
    say({"engine": client.engine_id, "version": client.found and client.found.version, "error": str(client.error)})
    attached: Any = None
    tensors: dict[str, Any] = {}
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb in ("begin", "commit", "abort"):
            say(getattr(client, verb)(*arguments))
        elif verb == "query":
            state = client.query()
            say(state and [state.version, state.digest, list(state.engines), state.dirty])
        elif verb == "map":  # a weight host's tensors
            attached = map_weights(client, tensors, arguments[0])
            say({name: tensor.tolist() for name, tensor in tensors.items()} if attached else None)
        elif verb == "read":
            say(tensors[arguments[0]].tolist())
        elif verb == "write":
            name, row, value = arguments
            tensors[name][row] = value
            say(True)
        elif verb == "fork and close":  # a child that tidies up after its parent
            child = os.fork()
            if child == 0:
                client.close()
                os._exit(0)
            say(os.waitpid(child, 0)[1])
        elif verb == "fork":  # a child without exec that keeps the connection and does nothing
            child = os.fork()
            if child == 0:
                os.close(0)
                os.close(1)
                os.read(int(arguments[0]), 1) if arguments else time.sleep(60)
                os._exit(0)
            say(child)


def map_weights(client: Any, tensors: dict[str, Any], config: dict[str, Any]) -> Any:
    """Attach to the host's weights under the record's layout."""
    from eplb_core.loading.sharing.attach import attach_weights

    state = client.query()
    return attach_weights(client, tensors, config=config, layout=state.layout)


def say(value: Any) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
