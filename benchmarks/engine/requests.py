"""Requests whose topics drift, and the scheduler that keeps every rank's rows full and loses nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.engine.model import ModelConfig


class Feed(NamedTuple):
    """What a rank computes in one pass: a token for each row of its batch, int64 `[B]` each."""

    token: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    position: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    seed: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    topic: np.ndarray[tuple[int, ...], np.dtype[np.int64]]

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device, in one copy."""
        token, position, seed, topic = torch.from_numpy(np.stack(self)).to(device)
        return token, position, seed, topic

    @classmethod
    def join(cls, feeds: list[Feed]) -> Feed:
        """All rows one after the other."""
        return cls(*(np.concatenate(parts) for parts in zip(*feeds, strict=True)))


@dataclass(slots=True)
class Request:
    """A prompt, and the tokens that it was answered with so far."""

    number: int
    topic: int
    seed: int
    tokens: list[int]
    total_length: int
    position: int = 0
    """Tokens that are in its rank's cache."""


class Traffic:
    """Endless requests.

    The topics' popularity is a random walk, so the experts' loads drift as real ones do.

    Args:
        config: Shapes of the model.
        seed: Equal seeds, equal requests.
        skew: Spread of the topics' log popularity.
        drift: Its step from request to request.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        *,
        skew: float = 1.2,
        drift: float = 0.05,
    ) -> None:
        self._config, self._random = config, np.random.default_rng(seed)
        self._skew, self._drift = skew, drift
        self._fondness = self._random.normal(0.0, skew, config.num_topics)
        self.made = 0

    def next(self) -> Request:
        """The next request."""
        config, random = self._config, self._random
        keep = (1.0 - self._drift**2) ** 0.5
        self._fondness = keep * self._fondness + self._drift * random.normal(0.0, self._skew, config.num_topics)
        popularity = np.exp(self._fondness)
        topic = int(random.choice(config.num_topics, p=popularity / popularity.sum()))
        words = config.vocabulary // config.num_topics
        length = int(random.integers(2, max(3, config.max_length // 4)))
        prompt = (topic * words + random.integers(0, words, length)).tolist()
        self.made += 1
        total = int(random.integers(length + 4, config.max_length))
        return Request(self.made, topic, int(random.integers(2**30)), prompt, total)


@dataclass(slots=True)
class Scheduler:
    """Gives each row of each rank a request; takes the tokens; starts anew what a lost rank had in its cache."""

    traffic: Traffic
    num_rows: int
    rows: dict[int, list[Request | None]] = field(default_factory=dict)
    """By worker."""
    again: deque[Request] = field(default_factory=deque)
    """Requests of lost ranks, which go first: their tokens are kept, their caches are computed anew."""
    finished: int = 0
    tokens: int = 0
    restarted: int = 0

    def feed(self, worker: int) -> Feed:
        """The next pass of a worker."""
        rows = self.rows.setdefault(worker, [None] * self.num_rows)
        for row, request in enumerate(rows):
            if request is None:
                rows[row] = self.again.popleft() if self.again else self.traffic.next()
        running = [request for request in rows if request is not None]
        columns = [(each.tokens[each.position], each.position, each.seed, each.topic) for each in running]
        return Feed(*np.array(columns, dtype=np.int64).T)

    def take(self, worker: int, sampled: list[int]) -> None:
        """What a worker sampled; only what follows the last known token is new."""
        rows = self.rows[worker]
        for row, request in enumerate(rows):
            if request is None:
                continue
            request.position += 1
            if request.position == len(request.tokens):
                request.tokens.append(sampled[row])
                self.tokens += 1
            if len(request.tokens) >= request.total_length:
                rows[row] = None
                self.finished += 1

    def lose(self, worker: int) -> None:
        """A worker is gone, and its cache with it."""
        for request in self.rows.pop(worker, []):
            if request is not None:
                request.position = 0
                self.again.append(request)
                self.restarted += 1

    @property
    def running(self) -> int:
        """Requests that are neither finished nor lost: in rows, or waiting to start anew."""
        return sum(request is not None for rows in self.rows.values() for request in rows) + len(self.again)
