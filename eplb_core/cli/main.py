"""The command line: `eplb` or `python -m eplb_core`.

Results go to stdout, progress and notes to stderr. Exit status: 0 success, 1 faults found, 2 wrong usage,
a bad file or a placement that does not exist, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from eplb_core._text import plain
from eplb_core._version import __version__
from eplb_core.cli import decide, inspect, plan, record, simulate
from eplb_core.cli.inputs import DTYPES
from eplb_core.errors import MAX_TEXT, EplbError
from eplb_core.files.formats import LAYOUT_FORMATS
from eplb_core.simulation import BASIC, DISPATCHES, HARDWARE, POLICIES

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status; usage errors and `--help` leave by SystemExit, as argparse has it."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what this terminal cannot show
    try:
        status: int = arguments.run(arguments)
        if sys.stdout is not None:  # closed by the caller (>&-)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). Python flushes once more at exit: that must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error)
    except (EplbError, ValueError, TypeError, IndexError, OverflowError, MemoryError, ImportError) as error:
        return _complain(error)
    return status


def _complain(error: object) -> int:
    with contextlib.suppress(OSError):  # where nothing can be said, the status still can
        print(f"eplb: {plain(str(error), MAX_TEXT)}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Commands' parsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        """As argparse has it, which prints arguments as they were given."""
        super().error(plain(message, MAX_TEXT))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="eplb",
        description="Expert-parallel load balancing for mixture-of-experts serving.",
        epilog="`eplb COMMAND --help` lists a command's options. Exit status: 0 success, 1 faults found, "
        "2 wrong usage, a bad file or a placement that does not exist, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"eplb_core {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    place = _command(commands, "plan", plan.plan, "place experts for a recorded load and show what it gains")
    _traces(place, "recorded load: a file or folder of any kind that `load_trace` reads")
    _trace_options(place)
    _topology_options(place)
    _place_options(place)
    place.add_argument("--current", metavar="FILE", help="layout that is live now: changes cost transfers")
    place.add_argument("--out", metavar="FILE", help="write the layout here")
    place.add_argument("--to", choices=LAYOUT_FORMATS, default="eplb", help="format of --out (default: %(default)s)")

    replay = _command(commands, "simulate", simulate.simulate, "replay a recorded load through policies, side by side")
    _traces(replay, "recorded load with two windows or more")
    _trace_options(replay)
    _topology_options(replay)
    _place_options(replay)
    replay.add_argument(
        "--policy",
        metavar="A,B,..",
        type=_policies,
        help=f"some of {', '.join(POLICIES)} (default: {', '.join(BASIC)})",
    )
    replay.add_argument(
        "--interval", metavar="N", type=_positive, default=16, help="windows between rebalances (default: 16)"
    )
    replay.add_argument("--history", metavar="N", type=_positive, help="windows that a policy sees (default: interval)")
    replay.add_argument("--current", metavar="FILE", help="layout to start from (default: the trivial one)")
    replay.add_argument(
        "--dispatch",
        choices=[each for each in DISPATCHES if each != "near"],
        default="even",
        help="how replicas share tokens (default: %(default)s)",
    )
    _cost_options(replay)
    replay.add_argument("--report", metavar="FILE", help="write a page of HTML to look at, with the bound")
    replay.add_argument(
        "--about",
        metavar="NAME=TEXT",
        type=_fact,
        action="append",
        help="a fact for the page of --report that the recording does not hold, as model=DeepSeek-R1; may be repeated",
    )

    best = _command(commands, "advise", decide.advise, "recommend ranks, slots and a policy for a GPU and a model")
    _traces(best, "recorded load with four windows or more", stream=False)
    _trace_options(best)
    best.add_argument("--gpu", choices=HARDWARE, required=True, help="hardware of a rank")
    best.add_argument("--model", metavar="FILE", required=True, help="Hugging Face config.json of the recorded model")
    best.add_argument("--dtype", choices=DTYPES, help="of the experts' weights (default: as the config says)")
    best.add_argument("--ranks", metavar="R,..", type=_counts, help="EP ranks to try (default: from 8, or what fits)")
    best.add_argument(
        "--redundant-per-rank", metavar="N,..", type=_ints, default=[0, 1], help="redundant slots to try (default: 0,1)"
    )
    best.add_argument(
        "--policy", metavar="A,B,..", type=_policies, help=f"policies to try (default: {', '.join(BASIC)})"
    )
    best.add_argument(
        "--interval", metavar="N", type=_positive, help="first windows, only placed on (default: 16, or a quarter)"
    )
    _passes_option(best)
    best.add_argument("--pass-ms", metavar="X", type=_amount, help="longest pass of the experts (default: any)")
    best.add_argument(
        "--memory-share",
        metavar="X",
        type=_amount,
        default=0.5,
        help="part of a GPU's memory for experts and all-to-all buffers (default: 0.5)",
    )
    best.add_argument(
        "--buffer-tokens",
        metavar="N",
        type=_whole,
        default=128,
        help="tokens of a rank that all-to-all buffers hold for every slot; 0: they do not grow (default: 128)",
    )
    best.add_argument("--report", metavar="FILE", help="also write a page, .html")

    gain = _command(commands, "gain", decide.gain, "how many redundant slots pay, judged on the later half of a load")
    _traces(gain, "recorded load", stream=False)
    _trace_options(gain)
    _topology_options(gain)
    gain.add_argument(
        "--slots", metavar="P,..", type=_ints, help="slots to try (default: E, and 1, 2, 4 more per rank)"
    )
    gain.add_argument("--current", metavar="FILE", help="layout to compare with (default: the trivial one of E slots)")
    _cost_options(gain)

    grid = _command(commands, "sweep", decide.sweep, "replay a recorded load for all combinations of settings")
    _traces(grid, "recorded load with two windows or more", stream=False)
    _trace_options(grid)
    grid.add_argument("--ranks", metavar="R,..", type=_counts, required=True, help="numbers of EP ranks")
    grid.add_argument(
        "--ranks-per-node", metavar="N", type=_positive, default=8, help="ranks of a node (default: %(default)s)"
    )
    slots = grid.add_mutually_exclusive_group(required=True)
    slots.add_argument("--slots", metavar="P,..", type=_counts, help="slots of all ranks")
    slots.add_argument(
        "--redundant-per-rank",
        metavar="N,..",
        type=_ints,
        help="slots per rank beyond the fewest that hold all experts, whatever the number of ranks",
    )
    grid.add_argument("--policy", metavar="A,B,..", type=_policies, default=["auto"], help="policies (default: auto)")
    grid.add_argument(
        "--interval", metavar="N,..", type=_counts, default=[16], help="windows between rebalances (default: 16)"
    )
    grid.add_argument("--workers", metavar="N", type=_positive, default=1, help="processes (default: 1)")
    grid.add_argument("--results", metavar="FOLDER", help="keep each row here; what is there is not replayed again")
    _cost_options(grid)

    look = _command(commands, "inspect", inspect.inspect, "say what a layout or trace file holds, and its faults")
    look.add_argument("file", metavar="FILE", help="layout or trace file, of this library or of an engine")

    turn = _command(commands, "convert", inspect.convert, "turn a layout or trace file into another format")
    turn.add_argument("file", metavar="IN", help="layout or trace file, or SGLang's inline JSON")
    turn.add_argument("target", metavar="OUT", help="file to write; - with --to sglang: inline JSON on standard output")
    turn.add_argument("--to", choices=LAYOUT_FORMATS, required=True, help="format of OUT; for a trace eplb or sglang")

    for command in (look, turn):
        _trace_options(command)
        _topology_options(command)

    _command(commands, "demo", simulate.demo, "plan and replay the trace that comes with the package")
    record.add_to(commands, _command, _topology_options)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=run)
    return command


def _traces(command: argparse.ArgumentParser, text: str, *, stream: bool = True) -> None:
    command.add_argument("file", metavar="TRACE", nargs="?", help=text)
    command.add_argument(
        "--trace",
        metavar="FILE[:WEIGHT]",
        dest="traces",
        action="append",
        help="another recorded load, whose counts are multiplied by the weight (default: 1); may be repeated",
    )
    if stream:
        command.add_argument(
            "--stream",
            action="store_true",
            help="read TRACE (.npy, .npz, .csv) bit by bit: it may be larger than memory",
        )


def _trace_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--key", metavar="NAME", help="array to take from an .npz that has several")
    command.add_argument("--holds", choices=("load", "tokens"), default="", help="what a plain array holds")
    command.add_argument("--experts", metavar="E", type=_positive, help="logical experts, where the file does not say")
    command.add_argument(
        "--window-tokens", metavar="N", type=_positive, help="tokens of a window, for top-k ids (default: all)"
    )
    command.add_argument("--windows", metavar="A:B", type=_span, help="use windows A to B-1 of the trace only")


def _topology_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", metavar="R", type=_positive, help="EP ranks, where no layout file says them")
    command.add_argument("--nodes", metavar="N", type=_positive, help="nodes, of equal size (default: 1)")
    command.add_argument("--rank-to-node", metavar="0,0,1,..", type=_ints, help="node of each rank, for other shapes")
    command.add_argument(
        "--rank-speed", metavar="1,1,.5,..", type=_floats, help="relative speed of each rank (default: equal)"
    )


def _place_options(command: argparse.ArgumentParser) -> None:
    slots = command.add_mutually_exclusive_group(required=True)
    slots.add_argument("--slots", metavar="P", type=_positive, help="slots (physical experts) of all ranks")
    slots.add_argument("--slots-per-rank", metavar="44,84,..", type=_ints, help="slots of each rank, where they differ")
    command.add_argument(
        "--locality",
        choices=("none", "group", "first_copy"),
        default="none",
        help="keep groups of experts on one node: group = all replicas, first_copy = one (default: none)",
    )
    command.add_argument("--groups", metavar="G", type=_positive, help="groups of experts, for --locality and deepseek")
    command.add_argument(
        "--effort", metavar="X", type=float, default=1.0, help="more time for a better answer (default: 1)"
    )


def _cost_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hardware", choices=HARDWARE, help="count seconds and bytes on this hardware")
    command.add_argument("--model", metavar="FILE", help="Hugging Face config.json: sizes of the model's experts")
    command.add_argument(
        "--hidden", metavar="N", type=_positive, help="values of a token (default: DeepSeek-V3's 7168)"
    )
    command.add_argument(
        "--intermediate", metavar="N", type=_positive, help="values inside of an expert (default: DeepSeek-V3's 2048)"
    )
    command.add_argument("--dtype", choices=DTYPES, help="of the experts' weights (default: fp8)")
    _passes_option(command)


def _passes_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--window-passes", metavar="N", type=_amount, default=1.0, help="passes of a window, for seconds (default: 1)"
    )


def _whole(text: str) -> int:
    return 0 if text.strip() == "0" else _positive(text)


def _positive(text: str) -> int:
    number = int(text) if text.strip().lstrip("+-").isdecimal() and len(text) < 19 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return number


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def _span(text: str) -> slice:
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} must be A:B, for instance 0:64")
    return slice(int(first or 0), int(last) if last else None)


def _fact(text: str) -> tuple[str, str]:
    name, equals, told = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=TEXT, for instance model=DeepSeek-R1")
    return name, told


def _listed(kind: Callable[[str], T], what: str) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {what} with commas between") from None

    return parse


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text!r} must be of {', '.join(POLICIES)}")
    return text


_ints, _floats, _policies = _listed(int, "whole numbers"), _listed(float, "numbers"), _listed(_policy, "policies")
_counts = _listed(_positive, "whole numbers of 1 or more")
