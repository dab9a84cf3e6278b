"""What a pickle would do, read without doing it: `torch.load` runs no code, but can be kept busy for hours."""

from __future__ import annotations

import pickletools

MAX_NAME = 4096
"""Characters of one text in a pickle of tensors and lists; names are far shorter."""
MAX_SHARED = 4
"""Times that a list, dict or tuple may stand in a second place: each may double what is written out of it."""

_CONTAINERS = {"EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}


def check_pickle(raw: bytes) -> None:
    """Raise ValueError for long texts, lists that stand in each other again and again, and calls of what is no name.

    A loader that refuses such a pickle quotes all of it: gigabytes of text, through which torch looks for a word in a
    time that grows with the square of its length.
    """
    stack: list[str] = []
    memo: dict[object, str] = {}
    shared = 0
    for code, argument, _ in pickletools.genops(raw):
        if isinstance(argument, (str, bytes)) and len(argument) > MAX_NAME:
            raise ValueError(f"a pickled text of {len(argument):,} characters")
        name = code.name
        if name in ("REDUCE", "NEWOBJ") and (len(stack) < 2 or stack[-2] != "GLOBAL"):
            raise ValueError(f"a pickle that calls {stack[-2].lower() if len(stack) > 1 else 'nothing'}")
        kind = name
        if name in ("BINGET", "LONG_BINGET", "GET"):
            kind = memo.get(argument, name)
            shared += kind in _CONTAINERS
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1] if stack else name
            continue
        if shared > MAX_SHARED:
            raise ValueError(f"a pickle with more than {MAX_SHARED} repeated references to lists")
        if pickletools.markobject in code.stack_before:
            while stack and stack.pop() != "MARK":
                pass
            below = code.stack_before.index(pickletools.markobject)
        else:
            below = len(code.stack_before)
        held = stack[-below] if below and len(stack) >= below else name
        del stack[max(0, len(stack) - below) :]
        # What items are put into stays what it was.
        kept = name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")
        stack += [held if kept else kind] * len(code.stack_after)
