"""A static site of the pages, the notebooks, and a reference from docstrings; ends with an error if a link is dead.

    python -m docs.site.build --out site        (make docs)

What pages link to outside of docs/ (code of the reference engine, say) becomes a page, too, with an anchor a line.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

from markdown_it import MarkdownIt

from docs.site import reference

ROOT = Path(__file__).parents[2]
TEMPLATE = (Path(__file__).parent / "page.html").read_text()
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
NAVIGATION = (
    ("Start", "index"),
    ("Guide", "docs/guide"),
    ("Simulation", "docs/simulation"),
    ("Algorithms", "docs/algorithms"),
    ("Command line", "docs/cli"),
    ("Reference", "reference"),
    ("All pages", "docs/README"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site.build", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    options = parser.parse_args(argv)
    shutil.rmtree(options.out, ignore_errors=True)
    site = Site(options.out)
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        site.add_markdown(path)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        site.add_notebook(path)
    site.add("reference", "Reference", reference.body())
    site.add_linked_files()
    dead = dead_links(options.out)
    for line in dead:
        print(f"dead link: {line}", file=sys.stderr)
    print(f"{len(site.pages)} pages in {options.out}, {len(dead)} dead links")
    return 1 if dead else 0


class Site:
    """Pages written so far, and the files that they link to and that are no pages yet."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.pages: set[str] = set()
        self.wanted: set[Path] = set()

    def add(self, name: str, title: str, body: str) -> None:
        """Write a page; `name` is its path without `.html`."""
        target = self.out / f"{name}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(PurePosixPath(name).parts) - 1)
        links = " ".join(f'<a href="{up}{page}.html">{text}</a>' for text, page in NAVIGATION)
        parts = {"TITLE": html.escape(title), "NAVIGATION": links, "BODY": body}
        target.write_text(re.sub("@(TITLE|NAVIGATION|BODY)@", lambda found: parts[found[1]], TEMPLATE))
        self.pages.add(name)

    def add_markdown(self, path: Path) -> None:
        """A page of documentation."""
        text = path.read_text()
        title = re.search(r"^# (.*)", text, re.M)
        body = self._with_links(with_anchors(MARKDOWN.render(text)), path)
        if path.name == "api.md":
            row = r"<td><code>(\w+)</code></td>"
            body = re.sub(row, r'<td><a href="../reference.html#\1"><code>\1</code></a></td>', body)
        self.add(page_of(path), title[1] if title else path.stem, body)

    def add_notebook(self, path: Path) -> None:
        """A notebook with its saved outputs."""
        parts = []
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(MARKDOWN.render(text))
                continue
            parts.append(f"<pre><code>{html.escape(text)}</code></pre>")
            parts += [f'<div class="output">{shown(output)}</div>' for output in cell["outputs"]]
        body = self._with_links(with_anchors("\n".join(parts)), path)
        self.add(page_of(path), path.stem.replace("_", " "), body)

    def add_linked_files(self) -> None:
        """Pictures as they are; code and records as pages with an anchor a line."""
        for path in sorted(self.wanted):
            if path.suffix in (".png", ".svg"):
                target = self.out / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
            elif path.is_file():
                lines = path.read_text().splitlines()
                body = "\n".join(
                    f'<span id="L{number}">{html.escape(line)}</span>' for number, line in enumerate(lines, 1)
                )
                self.add(page_of(path), path.name, f"<h1>{path.relative_to(ROOT)}</h1><pre><code>{body}</code></pre>")

    def _with_links(self, body: str, path: Path) -> str:
        """Links between files of the repository become links between pages."""

        def turn(found: re.Match[str]) -> str:
            attribute, target, anchor = found[1], found[2], found[3] or ""
            if not target or re.match(r"[a-z]+:", target):
                return found[0]
            file = (path.parent / html.unescape(target)).resolve()
            if not file.is_relative_to(ROOT) or not file.is_file():
                return found[0]  # dead, as the check will say
            if file.suffix in (".png", ".svg"):
                self.wanted.add(file)
                there = str(file.relative_to(ROOT))
            else:
                if file.suffix not in (".md", ".ipynb"):
                    self.wanted.add(file)
                there = f"{page_of(file)}.html"
            up = "../" * (len(PurePosixPath(page_of(path)).parts) - 1)
            return f'{attribute}="{up}{there}{anchor}"'

        return re.sub(r'(href|src)="([^"#]*)(#[^"]*)?"', turn, body)


def page_of(path: Path) -> str:
    """Path of a file's page without `.html`: README is the start, code keeps its ending."""
    inside = path.relative_to(ROOT)
    if inside.name == "README.md" and len(inside.parts) == 1:
        return "index"
    return str(inside.with_suffix("") if inside.suffix in (".md", ".ipynb") else inside)


def with_anchors(body: str) -> str:
    """Headings that can be linked to, named as on GitHub."""

    def name(found: re.Match[str]) -> str:
        plain = html.unescape(re.sub("<[^>]*>", "", found[2])).lower()
        return f'<{found[1]} id="{re.sub(r"[^a-z0-9 _-]", "", plain).replace(" ", "-")}">{found[2]}</{found[1]}>'

    return re.sub(r"<(h[1-6])>(.*?)</\1>", name, body, flags=re.S)


def shown(output: dict[str, Any]) -> str:
    """One output of a notebook's cell."""
    if output["output_type"] == "stream":
        return f"<pre>{html.escape(''.join(output['text']))}</pre>"
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="picture" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"<pre>{html.escape(''.join(data.get('text/plain', '')))}</pre>"


# ---- links -----------------------------------------------------------------------------------------------------------


class _Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.append(value)
            if value and name == "id":
                self.anchors.add(value)


def dead_links(out: Path) -> list[str]:
    """Links within the site that lead nowhere: no such page, or no such place on it."""
    pages = {path.resolve(): _Links(path.read_text()) for path in sorted(out.rglob("*.html"))}
    return [
        f"{path.relative_to(out.resolve())}: {target}"
        for path, page in pages.items()
        for target in _dead(path, page, pages)
    ]


def _dead(path: Path, page: _Links, pages: dict[Path, _Links]) -> Iterable[str]:
    for target in page.targets:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.is_file() or (anchor and (there not in pages or anchor not in pages[there].anchors)):
            yield target


if __name__ == "__main__":
    raise SystemExit(main())
