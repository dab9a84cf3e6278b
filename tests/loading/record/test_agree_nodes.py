"""The start-up agreement between two nodes: each has a network, a keeper and sockets of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.loading.engine_process import end, spawn
from tests.loading.node_process import MOVED

ADDRESSES = ("10.93.7.1", "10.93.7.2")


class Node:
    """A process in a network namespace of its own, with one end of a cable."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.name = f"eplb{rank}"
        command = ["unshare", "--net", sys.executable, "-m", "tests.loading.node_process", str(rank), str(folder)]
        self.process = spawn(*command, ADDRESSES[0], GLOO_SOCKET_IFNAME=self.name)

    def inside(self, *command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self.process.pid), "--net", *command], check=True)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes and the cable between them; skipped where networks may not be made."""
    cable = "ip link add eplb0 type veth peer name eplb1"
    tried = shutil.which("unshare") and shutil.which("ip") and shutil.which("nsenter")
    if not tried or subprocess.run(["unshare", "--net", *cable.split()], capture_output=True).returncode:
        pytest.skip("unshare --net and a veth pair are not permitted here")
    with ExitStack() as stack:
        made = []
        for rank in (0, 1):
            made.append(Node(rank, tmp_path))
            stack.callback(end, made[-1].process)
        for node in made:
            assert node.read() == "started\n"
        ends = [(node.name, str(node.process.pid)) for node in made]
        made[0].inside(*f"ip link add {ends[0][0]} type veth peer name {ends[1][0]} netns {ends[1][1]}".split())
        for node, address in zip(made, ADDRESSES, strict=True):
            node.inside("ip", "addr", "add", f"{address}/24", "dev", node.name)
            for link in ("lo", node.name):
                node.inside("ip", "link", "set", link, "up")
        yield made


@pytest.mark.slow
@pytest.mark.long
def test_nodes_adopt_one_version_or_all_fail_with_the_reason(nodes: list[Node]) -> None:
    """R19, R20, R67, I4: keepers of two nodes at one version; then one of them is a version ahead."""
    for node in nodes:
        node.go_on()
    adopted = [json.loads(node.read()) for node in nodes]
    assert adopted == [[MOVED.physical_to_logical_map.tolist(), 7]] * 2
    failed = [json.loads(node.read()) for node in nodes]
    assert failed[0] == failed[1]
    assert failed[0][0] == "LayoutAgreementError"
    assert "rank 0 is at version 7" in failed[0][1]
    assert "rank 1 at version 8" in failed[0][1]
    for node in nodes:
        node.go_on()
