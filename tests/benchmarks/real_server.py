"""Stands in for an engine's server: answers as one streams, with two ranks of two layers whose experts move."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.real_probe import FOLDER, Model, Probe

BASE = torch.tensor([[0, 1, 2, 0, 3, 1]] * 2)
MOVED = torch.tensor([[0, 1, 2, 3, 2, 1]] * 2)


class Ranks:
    """Two ranks in one process; the experts move at the twentieth step, one into a slot that it does not say."""

    def __init__(self, fault: bool) -> None:
        self.rows, self.fault, self.steps = BASE.clone(), fault, 0
        folder = os.environ.get(FOLDER)
        self.probes = [Probe(Path(folder)) for _ in range(2)] if folder else []

    def model(self, rank: int) -> Model:
        slots_of = torch.full((2, 4, 2), -1)
        counts = torch.stack([(self.rows == expert).sum(1) for expert in range(4)], 1)
        for expert in range(4):
            for layer in range(2):
                found = (self.rows[layer] == expert).nonzero().flatten()[:2]
                slots_of[layer, expert, : len(found)] = found
        held = self.rows[:, rank * 3 : rank * 3 + 3].clone()
        if self.fault and self.steps > 20 and rank == 1:
            held[1, 0] = 0
        weights = [[(row * 10 + layer)[:, None].float().repeat(1, 8)] for layer, row in enumerate(held)]
        return Model(self.rows, slots_of, counts, weights)

    def step(self) -> None:
        self.steps += 1
        if self.steps == 20:
            self.rows = MOVED.clone()
            self.probes[1].counted["received"] += 2
            self.probes[1].counted["changed_s"] += [0.001, 0.002]
            print("Rearranging experts sync mode ...", flush=True)
            print("EPLB step: 1 for model m: avg_tokens=9.00, max_tokens=10, balancedness=0.9", flush=True)
        for rank, probe in enumerate(self.probes):
            probe.at_step(rank, lambda rank=rank: self.model(rank))  # type: ignore[misc]


async def main(port: int, what: str) -> None:
    ranks = Ranks(what == "wrong") if what != "off" else None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if head.startswith("POST"):
            length = int(head.lower().split("content-length: ")[1].split()[0])
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            for number in range(1, tokens + 1):
                if ranks is not None:
                    ranks.step()
                said = {"choices": [{"text": "w"}], "usage": {"completion_tokens": number}}
                writer.write(f"data: {json.dumps(said)}\n\n".encode())
                await writer.drain()
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    print("INFO eplb_core: in effect in stand-in: all", flush=True)
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
