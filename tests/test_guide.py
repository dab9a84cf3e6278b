"""The guide's listing runs: two ranks as threads, and every token reaches a slot of its expert while experts move."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the listing moves tensors")

from eplb_core.testing import LocalAgreement, LocalCopy  # noqa: E402

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
PASSES = 10_000
"""At most; a worker that has to compile its kernels first takes that many passes to decide."""


def listing() -> str:
    """The page's first block of code; it stands before any table."""
    page = GUIDE.read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert "|---" not in page[: found.end()]
    return found[1]


class Engine:
    """What the listing takes from its engine: a checkpoint, and collectives of ranks that are threads."""

    def __init__(self, code: dict[str, Any]) -> None:
        self.code, self.ranks = code, code["R"]
        self.barrier = threading.Barrier(self.ranks, timeout=120.0)
        self.board: list[Any] = [None] * self.ranks
        self.checkpoint = torch.arange(1, 1 + code["L"] * code["E"], dtype=torch.float32).reshape(
            code["L"], code["E"], 1
        )
        self.made: list[Any] = [None] * self.ranks
        self.layouts: list[set[str]] = [set() for _ in range(self.ranks)]
        self.wrong: list[str] = []

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.board[rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def all_reduce(self, rank: int, counts: Any) -> None:
        counts.copy_(torch.stack(self.gather(rank, counts.clone())).sum(0))

    def run(self, rank: int, agreement: LocalAgreement) -> None:
        try:
            self._run(rank, agreement)
        except BaseException as error:
            self.wrong.append(f"rank {rank}: {error!r}")
            self.barrier.abort()
            agreement.leave()
            raise

    def _run(self, rank: int, agreement: LocalAgreement) -> None:
        own = self.code["Rank"](
            rank,
            self.checkpoint,
            LocalCopy(),
            agreement,
            lambda value: self.gather(rank, value),
            lambda counts: self.all_reduce(rank, counts),
        )
        self.gather(rank, None)
        self.made[rank] = own
        random = torch.Generator().manual_seed(rank)
        for number in range(PASSES):
            likes = torch.ones(self.code["E"])
            likes[:3] = 20.0
            routed = [torch.multinomial(likes.expand(64, -1), 2, generator=random) for _ in range(self.code["L"])]
            sent = own.run_pass(number, routed)
            self.gather(rank, None)  # all ranks have installed
            for layer, (ranks, rows) in enumerate(sent):
                held = torch.stack([self.made[r].weights[layer] for r in range(self.ranks)])[ranks, rows, 0]
                if not torch.equal(held, self.checkpoint[layer, routed[layer], 0]):
                    self.wrong.append(f"pass {number}, layer {layer}")
            self.layouts[rank].add(own.migrator.layout.digest)
            if self.gather(rank, own.migrator.idle and len(self.layouts[rank]) > 1)[0]:
                break
        own.reload(lambda layout: self.layouts[rank].add(layout.digest))
        if not own.migrator.stop(10.0):
            self.wrong.append(f"rank {rank}: a read is still under way")


@pytest.mark.slow
def test_the_listing_serves_right_while_it_moves() -> None:
    code: dict[str, Any] = {}
    exec(compile(listing(), str(GUIDE), "exec"), code)
    engine = Engine(code)
    members = enumerate(LocalAgreement.group(engine.ranks))
    threads = [threading.Thread(target=engine.run, args=member) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.wrong == []
    assert len(engine.layouts[0]) > 1
    assert engine.layouts[0] == engine.layouts[1]


def test_the_listing_is_short() -> None:
    code = [line for line in listing().splitlines() if line.strip()]
    assert len(code) <= 70
    assert max(map(len, code)) <= 120
