"""The site of the pages, the notebooks and a reference from docstrings, by Sphinx: `make docs`.

The sources are where they are: the repository is the source folder. The reference has a page for each heading of
docs/api.md, and names in its order.
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import eplb_core

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "build" / "reference"

project = "eplb_core"
release = eplb_core.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "notebooks/*.ipynb", "build/reference/*.rst"]
html_theme = "furo"
html_title = f"eplb_core {release}"
html_static_path, html_css_files = ["static"], ["wide.css"]
html_show_sphinx = html_show_copyright = False
myst_heading_anchors = 4
nb_execution_mode = "off"
default_role = "py:obj"  # in docstrings a name that has an entry leads there
suppress_warnings = ["ref.python"]  # one that several entries have
napoleon_custom_sections = ["Cost", "Threads", "Source"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them as written
autodoc_preserve_defaults = True

SIDEBAR = {
    "Start": "guide simulation cli engines metrics testing",
    "How it works": "architecture placement balancer dispatch loading moving record transports algorithms",
    "Beside others": "comparison claims faq migration",
    "Words and releases": "README glossary release-0.2.0",
}


def write_reference() -> list[str]:
    """Write a page for each heading of docs/api.md; return their names."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    REFERENCE.mkdir(parents=True)
    found = []
    for part in (ROOT / "docs" / "api.md").read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        title = title.replace("`eplb.", "").replace("`", "")
        lines = [title, "=" * len(title), ""]
        for name in re.findall(r"^\| `(\w+)` \|", text, re.M):
            value = getattr(eplb_core, name)
            what = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            lines += [f".. auto{what}:: eplb_core.{name}", *["   :members:"] * (what == "class"), ""]
        page = title.lower().replace(" ", "_")
        (REFERENCE / f"{page}.rst").write_text("\n".join(lines))
        found.append(f"build/reference/{page}")
    return found


def add_links(app: Any, page: str, source: list[str]) -> None:
    """The sidebar, which hangs on the first page; names of docs/api.md lead to the reference."""
    if page == "README":
        trees = {title: [f"docs/{name}" for name in names.split()] for title, names in SIDEBAR.items()}
        trees["Start"] += sorted(f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb"))
        trees["Words and releases"].append("CHANGELOG")
        trees = {"Start": trees.pop("Start"), "Names": ["docs/api", *app.config.reference_pages], **trees}
        for title, pages in trees.items():
            source[0] += "\n\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(pages) + "\n```\n"
    elif page == "docs/api":
        source[0] = re.sub(r"^\| `(\w+)` \|", r"| {py:obj}`\1 <eplb_core.\1>` |", source[0], flags=re.M)


def add_start(app: Any, error: Exception | None) -> None:
    """The first page under the name that servers look for."""
    if error is None:
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    app.add_config_value("reference_pages", write_reference(), "env")
    app.connect("source-read", add_links)
    app.connect("build-finished", add_start)
