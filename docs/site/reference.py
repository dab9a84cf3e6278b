"""The reference: every public name with its signature, docstring and fields."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
import textwrap
from typing import Any

import eplb_core

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Cost|Threads|Example|Source|Note):$")


def body() -> str:
    """All names in order of the alphabet, with a list of them on top."""
    names = sorted(eplb_core.__all__, key=str.lower)
    index = " ".join(f'<a href="#{name}"><code>{name}</code></a>' for name in names)
    parts = [
        "<h1>Reference</h1>",
        "<p><code>import eplb_core</code> brings these names.</p>",
        f'<p class="index">{index}</p>',
    ]
    return "\n".join([*parts, *(entry(name, getattr(eplb_core, name)) for name in names)])


def entry(name: str, value: Any) -> str:
    """One name."""
    parts = [f'<h2 id="{name}">{name}</h2>', f"<pre><code>{html.escape(signature(name, value))}</code></pre>"]
    parts += [docstring(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        fields = field_texts(value)
        if fields:
            rows = "".join(
                f"<tr><td><code>{key}</code></td><td>{inline(text)}</td></tr>" for key, text in fields.items()
            )
            parts.append(f"<table>{rows}</table>")
        for key, member in vars(value).items():
            found = member.fget if isinstance(member, property) else member
            found = getattr(found, "__func__", found)
            if key.startswith("_") or not inspect.isfunction(found) or not inspect.getdoc(found):
                continue
            head = key if isinstance(member, property) else signature(key, found)
            parts.append(
                f'<h3 id="{name}.{key}"><code>{html.escape(head)}</code></h3>{docstring(inspect.getdoc(found) or "")}'
            )
    return "\n".join(parts)


def signature(name: str, value: Any) -> str:
    """As one would write the call; long ones a line an argument."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    text = _plain(f"{name}{found}")
    if len(text) <= 100:
        return text
    parts, keyword = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            parts.append("*")
            keyword = True
        parts.append(_plain(str(parameter)))
    after = "" if found.return_annotation is found.empty else f" -> {str(found.return_annotation).strip(chr(39))}"
    return f"{name}(\n    " + ",\n    ".join(parts) + f",\n){after}"


def _plain(text: str) -> str:
    """Types that wait for their names are kept as strings: without the quotes."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def field_texts(value: type) -> dict[str, str]:
    """Docstrings of a dataclass's fields, which only its source has."""
    if not dataclasses.is_dataclass(value) and not hasattr(value, "_fields"):
        return {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    texts, last = {}, None
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            texts[last], last = " ".join(str(node.value.value).split()), None
    return texts


def docstring(text: str) -> str:
    """Google sections as headings, arguments as a list, examples as code."""
    parts, name, lines = [], "", list[str]()
    for line in [*text.splitlines(), "Note:"]:
        if not SECTION.match(line):
            lines.append(line)
            continue
        parts.append(_section(name, textwrap.dedent("\n".join(lines)).strip()))
        name, lines = line[:-1], []
    return "\n".join(parts)


def _section(name: str, text: str) -> str:
    if not text:
        return ""
    head = f"<h4>{name}</h4>" if name else ""
    if name in ("Args", "Raises"):
        items = re.split(r"\n(?=\S)", text)
        return head + "<ul>" + "".join(f"<li>{_argument(' '.join(item.split()))}</li>" for item in items) + "</ul>"
    return head + "".join(_paragraph(part) for part in re.split(r"\n\s*\n", text))


def _argument(text: str) -> str:
    name, colon, rest = text.partition(": ")
    return f"<code>{html.escape(name)}</code>: {inline(rest)}" if colon else inline(text)


def _paragraph(text: str) -> str:
    if text.lstrip().startswith(">>>"):
        return f"<pre><code>{html.escape(text)}</code></pre>"
    return f"<p>{inline(' '.join(text.split()))}</p>"


def inline(text: str) -> str:
    """Backticks become code; public names become links."""

    def code(found: re.Match[str]) -> str:
        word = found[1]
        shown = f"<code>{word}</code>"
        return f'<a href="#{word}">{shown}</a>' if word in eplb_core.__all__ else shown

    return re.sub("`([^`]+)`", code, html.escape(text, quote=False))
