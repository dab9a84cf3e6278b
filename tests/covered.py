"""What is known to go wrong and what is asked for, each with the tests that name it: the page docs/coverage.md.

    python tests/covered.py

A test names what it covers in its docstring, "FAULTS A1" or "R34". Ids are those of the collection that the project
began with; the short texts here say what they are about.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "coverage.md"

FAULTS = {
    "Placement": {
        "A1": "a hot expert gets two slots on one rank",
        "A2": "an expert gets more replicas than there are ranks",
        "A3": "equal loads, another answer with another version of a library",
        "A4": "ranks that do not divide over nodes end the server without a word",
        "A5": "experts that do not divide over ranks: refused, or all the rest on one rank",
        "A6": "users work out the number of redundant slots by hand",
        "A7": "hidden conditions make most numbers of slots illegal",
        "A8": "hot experts are replicated but not spread",
        "A9": "a budget by node leaves a hot expert without replica",
        "A10": "each rebalance moves nearly everything",
        "A11": "no former placement, or an answer of another type",
        "A12": "replicas whose loads do not add up; limits that nobody needs",
        "A13": "a layer without load gets all spare slots on one expert, and moves weights for it",
        "A14": "a NaN in the load takes all spare slots",
        "A18": "the number of nodes is guessed",
        "A19": "all layers share one map",
        "A20": "placement takes so long that serving stalls",
        "A21": "no layers, too few slots, one expert",
    },
    "Maps": {
        "B3": "ids of slots where ids of experts are meant",
        "B4": "loading fails as soon as there are redundant slots",
        "B5": "the inverse map is wrong for experts held twice",
        "B6": "a map is replaced or changes its shape under a captured graph",
        "B7": "maps that are committed one by one disagree",
        "B8": "the number of slots changes while experts move",
        "B9": "buffers of the load keep the former number of slots",
        "B10": "maps of a new rank are overwritten with another rank's",
        "B11": "the map is on the wrong device after an update",
        "B12": "a rebalance that changes nothing, and says that it ran",
        "B13": "a map with too few rows, or rows of unequal length, is accepted",
        "B14": "-1 in unsigned bytes is an expert",
        "B15": "a map that lacks an expert is accepted",
        "B16": "a file without a row for the draft layer",
        "B17": "a file of another number of slots is cut to fit",
    },
    "Dispatch": {
        "C1": "ranks that share all tokens choose different replicas, and sums are wrong",
        "C2": "the nearest replica is not the least loaded one; tables take a second",
        "C5": "the same choice in every group loads the same replicas",
        "C6": "random choices without a seed differ from process to process",
        "C7": "masked tokens are mapped to the last expert, or counted",
        "C8": "ids of fused shared experts are past the table's end",
        "C9": "tokens are mapped twice",
        "C10": "another number of shared slots than assumed",
        "C11": "another type comes out than went in",
        "C12": "made for slots where experts are meant",
        "C13": "one path of the forward forgets the mapping",
        "C14": "ids of slots where experts are needed",
        "C15": "shapes that pass the check and fail at the launch",
        "C16": "a static table points at a slot that nobody loads",
    },
    "Loading": {
        "D1": "only the first of two slots of an expert on a rank is loaded",
        "D2": "redundant slots are never loaded",
        "D4": "rows of tensors kept whole are never written",
        "D5": "allocation and loader disagree on redundancy",
        "D6": "a fused tensor of all experts is copied whole",
        "D7": "a loader that never got the map",
        "D8": "loader and dispatch use different maps",
        "D9": "the map is swapped after loading, the weights are not",
        "D10": "new weights go where experts were at the start",
        "D12": "an update replaces tensors that graphs hold",
        "D13": "a negative id counts from the end",
        "D15": "an index of one tensor is used on another",
    },
    "Moves": {
        "E1": "only the first of two new local slots is filled",
        "E2": "tensors that are not by slot break the move",
        "E3": "scales are left behind",
        "E4": "products of scales, or broadcast tensors, go stale",
        "E5": "values that depend on the rank are moved",
        "E6": "a host copy in another format than the device's",
        "E7": "hundreds of transfers in one batch hang",
        "E9": "a holder is listed twice",
        "E10": "staging is filled again before it was copied out",
        "E12": "transfers that are kernels wait for cores that a kernel holds",
        "E13": "a source is overwritten before its reader is done",
        "E14": "one holder serves all, on another node",
        "E15": "registering twice shifts the layers",
        "E16": "plans of former moves stay in memory",
        "E17": "a slot that stays is never written, right or wrong",
    },
    "Lock-step": {
        "F1": "a move stops for ever, without a word",
        "F2": "ranks enter different collectives",
        "F3": "an event that was never recorded is waited for",
        "F4": "idle ranks skip the pass",
        "F5": "a rank is one turn ahead",
        "F6": "a failed transfer ends the server",
        "F7": "half of a handshake goes over another group",
        "F8": "serving stands still while experts move",
        "F9": "the group is one that the model uses too",
        "F10": "moves that cost more than they bring",
    },
    "Loads": {
        "G1": "only local choices are counted",
        "G2": "counts are multiplied by the number of groups",
        "G3": "fillers are counted",
        "G4": "counts are divided where they are not shared",
        "G5": "balancedness over the wrong axis",
        "G6": "several definitions of balance; layers without load",
        "G8": "a draft model's load in the target's rows",
        "G9": "large batches are dropped",
        "G10": "an empty buffer is dumped",
        "G11": "a mode without a branch",
        "G12": "windows where one load is expected",
        "G13": "sums beyond 32 bits",
        "G14": "judged on the window that it was fitted to",
    },
    "Ranks that come and go": {
        "H1": "the last copy of an expert was on the dead rank",
        "H2": "too few live slots",
        "H4": "only the last ranks can leave",
        "H5": "new slots are taken for shared ones",
        "H6": "graphs must outlive a change of size",
        "H7": "a failing rank still gets tokens",
        "H8": "survivors must decide alike",
        "H9": "sizes that are no multiple of the nodes",
        "H10": "one change of size after the other",
    },
    "Shared weights": {
        "I1": "an engine starts on weights that another one moved",
        "I2": "killed between begin and commit",
        "I3": "two engines want to move",
        "I4": "records of different versions",
        "I5": "a socket or process of somebody else",
        "I6": "said to be ready before it is",
        "I8": "a reader that left keeps the source; addresses of a former one",
    },
    "Models": {
        "K1": "a draft model with another number of experts",
        "K2": "stages without layers of experts",
        "K3": "only listed models, silently ignored otherwise",
        "K4": "redundant slots without a use for them",
        "K5": "an expert that every token uses",
    },
}

REQUIREMENTS = {
    "Record": {
        1: "the whole map, a version from 0, a digest",
        2: "no record unless layouts can change",
        3: "attach, query, begin, commit, abort",
        4: "presence is an open connection, however it ends",
        5: "begin marks, commit stores, abort clears",
        6: "who leaves in a move leaves a dirty record",
        7: "dirty refuses reads and moves",
        8: "busy: another engine or another move",
        9: "refused for good: each reason",
        10: "commits that do not fit are refused",
        11: "a read says what layout it expects; the digest decides",
        12: "refused on another digest, dirty, or in a move",
        13: "readers that do not follow end all moves",
        14: "independent of how memory is shared",
        15: "one engine moves; a second one pauses it",
        16: "a forked child only keeps others waiting",
    },
    "Start": {
        17: "attach before loading",
        18: "a move of another engine is waited for, with a limit",
        19: "one decision on all ranks",
        20: "any bad record fails every rank",
        21: "some without a record",
        22: "what is adopted must fit",
        23: "an adopted layout equals the same layout given at the start",
        24: "where the weights came from",
    },
    "Moves with a record": {
        25: "none needed for weights of one's own",
        26: "begin everywhere or nowhere",
        27: "weights are there before the commit",
        28: "commit is verified on all ranks",
        29: "a failed commit stays known",
        30: "off, with one warning for each reason",
        31: "versions of the protocol that do not fit",
        32: "begin and commit around each layer",
        33: "which layout was adopted is told",
    },
    "Loading": {
        34: "every slot of an expert on all ranks",
        35: "then only the own range",
        36: "after a change of size too",
        37: "ids of fused shared experts are never filtered",
        38: "rows of tensors kept whole, on every rank",
        39: "draft layers are declared",
        40: "ids out of range raise",
        41: "other loaders use the same filter",
        42: "readers of backups too",
        43: "static picks bit for bit as known",
        44: "static entries point to loaded slots",
        45: "an update fills the same slots",
        46: "the inverse map costs next to nothing",
        47: "properties over random layouts",
    },
    "Placement": {
        48: "no two slots of an expert on a rank where possible; and still right where there are",
        49: "saved layouts come back",
    },
    "Moves": {
        50: "one-sided reads from live weights",
        51: "plans are pure: stay, copy, copy once read, read",
        52: "workers plan and read; the forward's thread installs",
        53: "all ranks in the same pass, by agreement",
        54: "tables change with the weights",
        55: "reads of a layer end before anybody installs it",
        56: "registered once, with one layer of staging",
        57: "what is on its way is drained",
        58: "placement on any thread, as a value",
        59: "one rank delayed: changes at installs alone",
        60: "off unless asked for",
        61: "a rank that dies ends the wait, with a reason",
    },
    "Weights of several engines": {
        62: "host and engine work out one initial layout",
        63: "the fingerprint covers what shapes it",
        64: "one copy for all; adopting takes milliseconds",
        65: "left-over files, slow clients",
        66: "no GPU needed to keep a record",
        67: "by rank, over nodes",
    },
}

# What no test that counts lines can run: files and patterns of pyproject.toml. Lines of code say it beside themselves.
LEFT_OUT = {
    "*/_triton.py": "GPU kernels; tests run them in Triton's interpreter, which runs no line of the file itself",
    "*/_install_triton.py": "as above",
    "*/_cuda.py": "calls of the CUDA runtime: tests marked `cuda`",
    "*/_device_memory.py": "memory of a GPU that processes share: tests marked `cuda`",
    "*/cuda_ipc.py": "reads between GPUs: tests marked `cuda`",
    "if .*device[.]type == .cuda": "where tensors are on a GPU: tests marked `cuda`",
    "if .*is_cuda": "as above",
    "if .*torch[.]cuda[.]": "as above",
    "if TYPE_CHECKING:": "never runs",
}
# What was measured last, and by what.
MEASURED = """\
`make coverage` counts: all default tests compiled, then the quick ones with kernels as plain Python. Its last run as
a whole, on a processor alone: 99% of 17,622 statements and 5,230 branches, 106 and 45 missed. 53 lines of
`loading/_copies.py`, `_memory.py`, `backup.py`, `install.py` and `transports/_carriers.py` need a GPU, where tests
marked `cuda` run them; 25 lines of refusals have a test since. Left are what happens between two moments of threads
or processes (`loading/_passes.py`, `_pull.py`, `layout_server.py`, `migrator.py`, `transports/_exchange.py`,
`_processes.py` and `faulty.py`, `testing/_peers.py`), a package that is absent (`transports/mooncake.py`,
`simulation/records.py`), an engine (`adapters/sglang_record.py`), processes of a `sweep`, which tests marked `long`
start, and a file that repeats an expert in `backup.py`.
"""

# The rules that always hold, docs/architecture.md; the changes in tests/mutation that break one say so.
RULES = {
    1: "a layout that exists is valid: every layer holds every expert in a live slot",
    2: "no rank holds an expert twice unless counting forces it; such a pair still loads, dispatches and moves",
    3: "one array, one meaning: what loading fills is not what dispatch uses",
    4: "all maps are one: the inverse, what loaders fill, what dispatch targets; one owner",
    5: "equal inputs give equal bytes",
    6: "no information, no action; loads that are none raise",
    7: "a slot is never half there, and installs are for all ranks or none",
    8: "addresses stay; allocation and compilation happen in constructors or `warm_up()`",
    9: "all that is indexed by slot moves together",
    10: "workers let go of the interpreter, and the forward's thread never waits",
    11: "the core knows no engine; plug-ins act when asked for, and fall back",
}

_ID = r"(?:[A-K]\d{1,2}|R\d{1,2})"
_ITEM = re.compile(rf"\b({_ID})(?:(?:-| to )({_ID}))?\b")


def named() -> dict[str, list[tuple[str, str]]]:
    """(file, test) by id, in order of files and lines."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for covered in ids_of(ast.get_docstring(node) or ""):
                    found[covered].append((file, node.name))
    return found


def ids_of(docstring: str) -> Iterator[str]:
    """The ids that a docstring names, ranges too."""
    for first, last in _ITEM.findall(docstring):
        numbers = range(int(first[1:]), int((last or first)[1:]) + 1)
        yield from (f"{first[0]}{number}" for number in numbers)


def breaking() -> dict[int, list[tuple[str, str, str]]]:
    """(list, changed file, test) by rule: the mutations that break it."""
    found: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted((TESTS / "mutation").glob("mutations_*.py")):
        for file, _, _, test, *rules in runpy.run_path(str(path))["MUTATIONS"]:
            for rule in rules:
                found[int(rule.removeprefix("rule "))].append((path.name, file, test))
    return found


def left_out() -> dict[str, str]:
    """Reason by line of code that is left out by `pragma: no cover`, or of which a branch is, by `pragma: no branch`.

    One without its own has that of the line above.
    """
    found = {}
    for path in sorted((TESTS.parent / "eplb_core").rglob("*.py")):
        reason = ""
        for line in path.read_text("utf-8").splitlines():
            code, *pragma = re.split("# pragma: no (?:cover|branch)", line)
            if pragma:
                reason = reason if pragma[0].strip() in ("", "as above") else pragma[0].strip()
                found[f"{path.relative_to(TESTS.parent / 'eplb_core')}: {code.strip()}"] = reason
    return found


def settings() -> list[str]:
    """Files and patterns that pyproject.toml leaves out."""
    text = (TESTS.parent / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:omit|exclude_also) = (\[.*?^\])", text, re.M | re.S)
    return [each for one in lists for each in ast.literal_eval(one)]


def page() -> str:
    """docs/coverage.md."""
    found = named()
    lines = [
        "# What is tested where",
        "",
        "Faults that users of today's engines reported, and what was asked of this library, with tests that name them.",
        "Made by `python tests/covered.py`; a test holds that no line is empty.",
    ]
    for title, sections in (("Faults", FAULTS), ("Requirements", REQUIREMENTS)):
        lines += ["", f"## {title}"]
        for section, about in sections.items():
            lines += ["", f"### {section}", "", "| | | tests |", "|---|---|---|"]
            for key, text in about.items():
                name = key if isinstance(key, str) else f"R{key}"
                lines.append(f"| {name} | {text} | {_links(found.get(name, []))} |")
    lines += ["", "## Rules", "", "Each rule has changes to the code that break it, and a test that then fails"]
    lines[-1] += " (`make mutants`); [architecture.md](architecture.md) has the rules in full."
    lines += ["", "| | | changed, and the test that fails |", "|---|---|---|"]
    broken = breaking()
    lines += [f"| {rule} | {text} | {'; '.join(map(_change, broken[rule]))} |" for rule, text in RULES.items()]
    lines += ["", "## Branches", "", MEASURED, "Left out, and why:", "", "| | |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in (LEFT_OUT | left_out()).items()]
    return "\n".join(lines) + "\n"


def _change(change: tuple[str, str, str]) -> str:
    """A mutation as the file that it changes and the test that it must fail."""
    kept_in, file, test = change
    path, *names = test.split("::")
    name = names[-1] if names else Path(path).stem
    link = f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"
    return f"[{file.removeprefix('eplb_core/')}](../tests/mutation/{kept_in}): {link}"


def _links(tests: list[tuple[str, str]]) -> str:
    shown = [f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})" for file, name in tests[:3]]
    more = [f"{len(tests) - 3} more"] if len(tests) > 3 else []
    return ", ".join(shown + more)


if __name__ == "__main__":
    PAGE.write_text(page())
