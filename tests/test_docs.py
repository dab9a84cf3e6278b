"""The pages say what the code does: outputs of commands, public names, figures, links.

`python tests/test_docs.py` writes the outputs in docs/cli.md, and the figures of other pages, anew.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import eplb_core
from eplb_core.cli.main import main

ROOT = Path(__file__).parent.parent
CLI = ROOT / "docs" / "cli.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 16, "torch_dtype": "bfloat16"},
}
BLOCK = re.compile(r"```\n\$ eplb (.*)\n((?:.*\n)*?)```\n")


def output_of(command: str) -> str:
    """What the command prints on a pipe, without the lines of progress; in the current folder."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(shlex.split(command))
    said = [line + "\n" for line in err.getvalue().splitlines() if not line.endswith("...")]
    return "".join(said) + out.getvalue()


def with_outputs(text: str) -> str:
    """The page with the output of every command as it is now; commands run one after the other in one folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "eplb_core" / "data" / "moe128_demo.npz", Path(folder, "trace.npz"))
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        os.chdir(folder)  # the outputs name the files as the user does
        try:
            return BLOCK.sub(lambda found: f"```\n$ eplb {found[1]}\n{output_of(found[1])}```\n", text)
        finally:
            os.chdir(before)


SUMMARY = re.compile(r"<!-- summary of (\w+) -->\n```\n((?:.*\n)*?)```\n")


def with_summaries(text: str) -> str:
    """The page with the lines of each record in benchmarks/results that it names."""

    def lines(found: re.Match[str]) -> str:
        record = json.loads((ROOT / "benchmarks" / "results" / f"{found[1]}.json").read_text())
        return f"<!-- summary of {found[1]} -->\n```\n" + "".join(f"{line}\n" for line in record["summary"]) + "```\n"

    return SUMMARY.sub(lines, text)


def without_numbers(text: str) -> str:
    """Numbers, digests and the spaces around them differ between versions and machines."""
    return re.sub(r"[\s#]+", " ", re.sub(r"digest\s+[0-9a-f]+|[\d.,]+", "#", text))


@pytest.mark.slow
def test_commands_print_what_the_page_shows() -> None:
    pytest.importorskip("torch", reason="the replay shows DeepSeek's policy")
    page = CLI.read_text()
    assert page.count("\n$ eplb ") == len(BLOCK.findall(page)) >= 6
    assert without_numbers(with_outputs(page)) == without_numbers(page)


def test_api_page_lists_the_public_names() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(rows) == eplb_core.__all__


def test_pages_have_the_figures_of_the_records() -> None:
    shown = [page.name for page in PAGES if SUMMARY.search(page.read_text())]
    assert shown == ["comparison.md", "release-0.2.0.md", "simulation.md"]
    for page in PAGES:
        assert with_summaries(page.read_text()) == page.read_text(), "python tests/test_docs.py"


@pytest.mark.parametrize("name", ["faq.md", "migration.md"])
def test_examples_in_pages_run(name: str) -> None:
    pytest.importorskip("torch", reason="pages compare with DeepSeek's policy")
    failed, tried = doctest.testfile(str(ROOT / "docs" / name), module_relative=False)
    assert tried >= 4
    assert failed == 0


def test_the_properties_of_the_page_on_testing_hold() -> None:
    """Its blocks of code, one after the other; then each property and the machine."""
    space: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.S):
        exec(code, space)
    properties = [name for name in space if name.startswith("test_")]
    assert len(properties) == 3
    few = settings(max_examples=10, stateful_step_count=5)
    for name in properties:
        few(space[name])()
    run_state_machine_as_test(space["Plain"], settings=few)


@pytest.mark.slow
def test_a_picture_takes_ten_lines() -> None:
    """The first example of the page on simulation, as it stands there."""
    pytest.importorskip("torch", reason="the example compares with DeepSeek's policy")
    pytest.importorskip("matplotlib", reason="pictures need the extra `notebook`")
    found = re.search(r"```python\n(import eplb_core.*?)```", (ROOT / "docs" / "simulation.md").read_text(), re.S)
    assert found
    lines = [line for line in found[1].splitlines() if line.strip()]
    assert len(lines) <= 10
    space: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec("\n".join([*lines[:-1], f"picture = {lines[-1]}"]), space)
    assert "Take `place`" in out.getvalue()
    assert len(space["picture"].axes[0].lines) == 3


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    """Of a dead link, say, or a docstring that is not shown as meant."""
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name, reason="the site needs Sphinx: pip install -e '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "--fail-on-warning",
        "-c",
        "docs/site",
        ".",
        str(tmp_path / "site"),
    ]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr == ""
    assert 'href="../build/reference/first.html#eplb_core.place"' in (tmp_path / "docs" / "api.html").read_text("utf-8")
    assert (tmp_path / "index.html").is_file()
    assert "layout" in (tmp_path / "searchindex.js").read_text("utf-8")


def test_every_picture_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text("utf-8"))}
    pictures = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".png", ".svg")}
    assert pictures == shown


def test_what_each_has_is_tested_or_has_a_source() -> None:
    """Our column by a test that exists, every cell of the others by a link."""
    text = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    links = set(re.findall(r"^\[([\w-]+)\]: https://", text, re.M))
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| .*::test_\w+` \|$", line)]
    assert len(rows) > 20
    for what, _, *theirs, test in rows:
        named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)` \|", test)
        assert named, what
        assert f"def {named[2]}(" in (ROOT / named[1]).read_text("utf-8"), test
        assert len(theirs) == 6, what
        for cell in theirs:
            source = re.fullmatch(r"\[.+\]\[([\w-]+)\]", cell)
            assert source, cell
            assert source[1] in links, cell
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A row without its head, after an empty line, is shown as text; cells that are too many are left out."""
    lines = ["", *page.read_text("utf-8").splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|"):
            assert before.startswith("|") or re.fullmatch(r"\|[\s:|-]+\|", after), line
        if line.startswith("|") and before.startswith("|"):
            cells = [re.sub("`[^`]*`", "", row).count("|") for row in (before, line)]
            assert cells[0] == cells[1], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_targets_extras_and_files_that_pages_name_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for name in re.findall(r"python -m\s+((?:benchmarks|docs|eplb_core|tests)[\w.]*)", text):
        program = ROOT.joinpath(*name.rstrip(".").split("."))
        assert program.with_suffix(".py").is_file() or (program / "__main__.py").is_file(), name
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", text, re.M)) <= set(targets)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert set(re.findall(r"eplb[-_]core\[(\w+)\]", text)) <= set(extras)
    for name in re.findall(r"(?<![\w/.])((?:benchmarks|tests|eplb_core|docs|notebooks)/[\w/.-]*\w)", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_ascii_and_their_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert text.isascii()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    CLI.write_text(with_outputs(CLI.read_text()))
    for each in PAGES:
        each.write_text(with_summaries(each.read_text()))
