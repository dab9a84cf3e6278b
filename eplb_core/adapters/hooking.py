"""What plug-ins for engines share: which parts are on, whether the engine is the one they were written for, fallbacks.

A plug-in acts only where the environment asks for it, and it never stops an engine: what does not fit stays the
engine's own, with one line in the log that says what was expected and what was found.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from eplb_core.adapters import source
from eplb_core.errors import EplbError
from eplb_core.exposition import Sample, set_rank, watch
from eplb_core.loading.agreement import Agreement, GroupAgreement

T = TypeVar("T")
PLACE_OPTIONS: dict[str, Callable[[str], Any]] = {"min_gain": float, "transfer_price": float, "max_transfers": int}
"""Options that every engine's placement passes on to `place`."""
NO_SUCH = "no such function"
SAME = "give all ranks the same eplb_core, environment variables and engine version"

_PATIENCE_S = 300.0
_gathers: dict[int, tuple[Any, Gather]] = {}
"""By the group's identity: the group, kept so that no other gets its identity, and what gathers over its ranks."""
_logged: set[str] = set()
_failures: dict[str, str] = {}
_fallbacks: dict[str, int] = {}
"""How often the engine's own code has answered for a part."""
_in_effect: dict[str, bool] = {}
_told_by = [0]
"""The process that tells them: a forked child begins anew."""
_log = [logging.getLogger("eplb_core")]

_ASKED, _OFF, _OPTIONS = "EPLB_CORE", "EPLB_CORE_OFF", "EPLB_CORE_OPTIONS"


def asked_for(engine: str) -> bool:
    """Whether the environment has `EPLB_CORE=engine`."""
    return os.environ.get(_ASKED) == engine


def parts_on(known: Sequence[str]) -> tuple[str, ...]:
    """Return the parts that `EPLB_CORE_OFF=a,b` leaves on, in the order of `known`.

    Raises:
        ValueError: It names an unknown part.
    """
    off = _names(os.environ.get(_OFF, ""))
    for name in off:
        if name not in known:
            raise ValueError(f"{_OFF} (={name}) must name some of {', '.join(known)}")
    return tuple(part for part in known if part not in off)


def options_from(known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the values in `EPLB_CORE_OPTIONS=a=1,b=x`, each parsed by its function in `known`.

    Raises:
        ValueError: An unknown option, one without a value, or a value that its function refuses.
    """
    found = {}
    for entry in _names(os.environ.get(_OPTIONS, "")):
        name, equals, text = (part.strip() for part in entry.partition("="))
        if name not in known or not equals:
            raise ValueError(f"{_OPTIONS} (={entry}) must be name=value with a name of {', '.join(known)}")
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise ValueError(f"{_OPTIONS} (={entry}): {error}") from None
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser of an option that accepts only these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} must be one of {', '.join(words)}")
        return text

    return read


def mismatch(target: object, name: str, parameters: Sequence[str] | None) -> str:
    """Say how a function of the engine differs from what a hook expects; empty where it does not.

    Args:
        target: The engine's function or class method, or what `source.find` says of it; None where it has none of that
            name.
        name: The engine's name for it.
        parameters: Names of its first parameters, `self` and `cls` included; any others must have defaults. None: any.
    """
    expected = f"expected {name}" if parameters is None else f"expected {name}({', '.join(parameters)})"
    if isinstance(target, source.Unknown):
        return "" if parameters is None else f"{expected}, found {target.reason}"
    if not callable(target) and not isinstance(target, inspect.Signature):
        return f"{expected}, found {NO_SUCH}"
    if parameters is None:
        return ""
    try:
        signature = target if isinstance(target, inspect.Signature) else inspect.signature(target)
    except (TypeError, ValueError):
        return f"{expected}, found a function that does not tell its parameters"
    found = list(signature.parameters.values())
    extra = found[len(parameters) :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    same = [parameter.name for parameter in found[: len(parameters)]] == list(parameters)
    if same and all(p.default is not inspect.Parameter.empty or p.kind in variadic for p in extra):
        return ""
    return f"{expected}, found {name}{signature}"


def fits(part: str, engine: str, targets: Iterable[tuple[object, str, Sequence[str] | None]]) -> bool:
    """Return whether all functions that a part changes are as it expects them; log a line if not.

    Args:
        part: Part of the plug-in.
        engine: Name of the engine and the version that the part was written for, for the log.
        targets: Arguments of `mismatch` for each of those functions.
    """
    trouble = next(filter(None, (mismatch(*target) for target in targets)), "")
    if trouble:
        log_once(f"{part} is left to {engine}: {trouble}")
    return not trouble


def guarded(ours: Callable[..., T], engine_own: Callable[..., T], part: str) -> Callable[..., T]:
    """Return a function that calls `ours`; where it raises, that logs one line and calls `engine_own`."""

    def call(*args: Any, **kwargs: Any) -> T:
        try:
            answer = ours(*args, **kwargs)
        except Exception as error:
            _failures[part] = words(error)
            _fallbacks[part] = _fallbacks.get(part, 0) + 1
            log_once(f"{part}: the engine's own code goes on, since ours raised {_failures[part]}")
            return engine_own(*args, **kwargs)
        _failures.pop(part, None)
        return answer

    return call


def as_called(ours: Callable[..., T], engine_own: Callable[..., T], part: str) -> Callable[..., T]:
    """Return a function with the name and signature of `engine_own` that calls `ours`.

    Where it is called with other arguments than `ours` takes, since the engine changed while it ran, that logs one line
    and calls `engine_own`.
    """
    signature = inspect.signature(ours)

    @wraps(engine_own)
    def call(*args: Any, **kwargs: Any) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            given, wanted = ", ".join([f"{len(args)} arguments", *kwargs]), ", ".join(signature.parameters)
            log_once(f"{part}: the engine's own code goes on: it is called with {given}; ours takes {wanted}")
        else:
            return ours(*args, **kwargs)
        return engine_own(*args, **kwargs)

    return call


def tell_parts(in_effect: Mapping[str, bool], rank: int | None = None) -> None:
    """Let operators see which parts are in effect in this process, and how often each fell back; may be called again.

    Args:
        in_effect: By part; parts that were switched off are not among them.
        rank: This process's EP rank, for numbers that have none.
    """
    _in_effect.update(in_effect)
    for part in in_effect:
        _fallbacks.setdefault(part, 0)
    if rank is not None:
        set_rank(rank)
    if _told_by[0] != os.getpid():
        _told_by[0] = os.getpid()
        watch(tell_parts, counters=_told_fallbacks, gauges=_told_parts)


def _told_fallbacks() -> list[Sample]:
    return [Sample("eplb_fallbacks_total", count, None, (part,)) for part, count in list(_fallbacks.items())]


def _told_parts(_: object) -> list[Sample]:
    return [Sample("eplb_part_active", active, None, (part,)) for part, active in list(_in_effect.items())]


def failure_of(part: str) -> str:
    """Return what `guarded` caught when this part last ran in this process; empty if nothing."""
    return _failures.get(part, "")


def do_nothing(*_: object) -> None:
    """Stand for the engine's own code where it does nothing and a hook only adds something."""


def words(error: Exception) -> str:
    """Return an error's type and text, for log lines and messages to other ranks; raises nothing."""
    try:
        text = str(error)
    except Exception as trouble:  # of another's class: a line in the log must not stop the engine
        text = f"(its text raised {type(trouble).__name__})"
    return f"{type(error).__name__}: {text}"


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set `variable` to this value inside the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# ---- one answer on all ranks -----------------------------------------------------------------------------------------


class Said(NamedTuple):
    """What a rank says of the answer that it is about to use."""

    digest: str
    failure: str
    """Why the answer is the engine's own; empty where it is ours."""


class Gather:
    """A collective call that exchanges what ranks say; answers by rank."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def __call__(self, said: Said) -> list[Said]:
        """Every rank's, by rank."""
        return [Said(*json.loads(blob)) for blob in self._agreement.gather(json.dumps(said).encode())]

    def same(self, digest: str) -> bool:
        """Whether all ranks have this digest, and one at all: one short collective, where words take two long ones."""
        same = getattr(self._agreement, "same", None)  # ranks of one engine have agreements of one kind
        word = int.from_bytes(hashlib.sha256(digest.encode()).digest()[:7], "big") + 1 if digest else 0
        return same is not None and bool(same(word)) and word > 0


def gather_by(agreement: Agreement) -> Gather:
    """Return what exchanges words over this agreement."""
    return Gather(agreement)


def gather_over(cpu_group: Any) -> Gather:
    """As `gather_by`, over a group of its own of the ranks of a torch group on the CPU.

    The group is made the first time that this is called for `cpu_group`, which is collective, and kept: collectives of
    two users on one group mix.
    """
    found = _gathers.get(id(cpu_group))
    if found is None or found[0] is not cpu_group:
        found = _gathers[id(cpu_group)] = cpu_group, gather_by(GroupAgreement(_same_ranks(cpu_group), _PATIENCE_S))
    return found[1]


def _same_ranks(cpu_group: Any) -> Any:
    """A new group of these ranks; the group itself where torch does not know it: nothing can be made of it then."""
    import torch.distributed as dist

    try:
        ranks = dist.get_process_group_ranks(cpu_group)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return cpu_group
    patience = timedelta(seconds=_PATIENCE_S)
    return dist.new_group(ranks, timeout=patience, backend="gloo", use_local_synchronization=True)


def gather_objects(cpu_group: Any) -> Callable[[Any], list[Any]]:
    """As `gather_over`, for any objects that pickle takes."""
    import torch.distributed as dist

    def gather(own: Any) -> list[Any]:
        answers: list[Any] = [None] * dist.get_world_size(cpu_group)
        dist.all_gather_object(answers, own, group=cpu_group)
        return answers

    return gather


def on_all_or_none(
    gather: Callable[[Any], Sequence[Any]],
    make: Callable[[], T],
    error_type: type[EplbError] = EplbError,
    *,
    close: Callable[[T], object] = do_nothing,
) -> T:
    """Call `make` on every rank; where it raised on one, raise on every rank. Collective.

    Args:
        gather: Every rank's object, by rank.
        make: Makes this rank's part.
        error_type: What is raised.
        close: Releases what this rank made where another rank failed.

    Raises:
        EplbError: `make` raised on some rank: the first such rank, its error, and how many more there are.
    """
    made, said, _ = attempt(make, lambda made: "")
    failed = [(rank, each.failure) for rank, each in enumerate(gather(said)) if each.failure]
    if failed:
        if not said.failure:
            close(made)
        more = f" [{len(failed) - 1} more]" if len(failed) > 1 else ""
        raise error_type(f"rank {failed[0][0]}: {failed[0][1]}{more}")
    return made


def settle(
    part: str,
    gather: Callable[[Said], Sequence[Said]],
    ours: Callable[[], T],
    engine_own: Callable[[], T],
    *,
    digest_of: Callable[[T], str],
    otherwise: Callable[[], T],
    same: Callable[[str], object] = do_nothing,
) -> T:
    """Return an answer that is the same on every rank: where ranks differ, all take the engine's own.

    A rank that fell back to the engine's code alone would move experts and send tokens by another map than the others.
    Collective: a rank whose answer raises tells the others first, since they wait for its message.

    Args:
        part: For the log, and for `failure_of`.
        gather: Exchanges what ranks say; answers by rank.
        ours: Gives this rank's answer; falls back to the engine's own (`guarded`).
        engine_own: Gives the engine's answer; deterministic.
        digest_of: Returns a hash of an answer.
        otherwise: Gives the answer that changes nothing, for ranks whose inputs differ, so that the engine's own
            answers do too.
        same: Whether all ranks have this digest, asked before words are exchanged: `Gather.same`, where all ranks are
            known to have this version of eplb_core.

    Raises:
        Exception: What the engine's own code raised on this rank.
    """
    answer, said, error = attempt(ours, digest_of)
    if same(said.digest):
        return answer
    told = gather(said if error else said._replace(failure=failure_of(part)))
    if error is None and _are_equal(told):
        return answer
    log_once(who_differs(part, told, "all ranks take the engine's own"))
    answer, said, error = attempt(engine_own, digest_of)
    told = gather(said)
    if error is not None:
        raise error
    if _are_equal(told):
        return answer
    log_once(who_differs(part, told, "nothing changes: the engine's own answers differ too"))
    return otherwise()


def attempt(answer_of: Callable[[], T], digest_of: Callable[[T], str]) -> tuple[T, Said, Exception | None]:
    """Return an answer and what to say of it to other ranks; where it raised, None, its words and the error."""
    try:
        answer = answer_of()
        return answer, Said(digest_of(answer), ""), None
    except Exception as error:
        return cast(T, None), Said("", words(error)), error


def _are_equal(told: Sequence[Said]) -> bool:
    return len({said.digest for said in told}) == 1


def who_differs(part: str, told: Sequence[Said], what_now: str) -> str:
    """Say which ranks have another answer than most, why, and what happens."""
    digests = [said.digest for said in told]
    kept = [said.digest for said in told if not said.failure] or digests
    most = max(kept, key=lambda digest: (kept.count(digest), -digests.index(digest)))
    others = [rank for rank, digest in enumerate(digests) if digest != most]
    named = ", ".join(
        f"rank {rank} ({digests[rank][:12] or 'no map'}{f': {told[rank].failure}' if told[rank].failure else ''})"
        for rank in others[:4]
    )
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return (
        f"{part}: {named}{more} computed another map than the other ranks ({most[:12]}), so {what_now}; look into that "
        f"rank's log, and {SAME}"
    )


def log_through(name: str) -> None:
    """Write to this logger from now on: engines show only loggers under their own name."""
    _log[0] = logging.getLogger(name)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log a line unless this process has."""
    if message not in _logged:
        _logged.add(message)
        _log[0].log(level, "eplb_core: %s", message)
