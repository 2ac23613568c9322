"""Every page is true: its blocks run, its links lead somewhere, its tests and failpoints exist."""

import re
from pathlib import Path

import pytest

from postroad.model.failpoints import FAILPOINTS
from postroad.model.lifecycle import EDGES, TERMINAL, Reason, Status
from tests.docs import blocks

PAGES = pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: str(page.relative_to(blocks.ROOT)))


@PAGES
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """Every python block runs, every command succeeds and prints what the page says."""
    blocks.save(page, tmp_path)
    for block in blocks.blocks(page):
        for command in blocks.commands(block) if block.language == "console" else []:
            blocks.run_command(command, tmp_path, page)
    if program := blocks.program(page):
        (tmp_path / "page.py").write_text(program, "utf-8")
        blocks.run_python("page.py", [], tmp_path, page)


@PAGES
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """A link leads to a file that is there, and one named like a test to the file that has this test."""
    for text, target in blocks.links(page):
        file = (page.parent / target).resolve()
        assert file.exists(), f"{page}: {target}"
        if found := re.fullmatch(r"`(test_\w+)`", text):
            assert re.search(rf"def {found[1]}\(", file.read_text("utf-8")), f"{page}: {text} is not in {target}"


def test_patterns_are_strict() -> None:
    """Output that differs from what a page shows fails, but for dots and blanks at the end of a line."""
    assert re.fullmatch(blocks.pattern("a ... c\nd\n"), "a b c  \nd\n\n")
    assert not re.fullmatch(blocks.pattern("a c\n"), "a b c\n")
    assert not re.fullmatch(blocks.pattern("a\n"), "a\nb\n")


def test_a_broken_page_is_found(tmp_path: Path) -> None:
    """A block that raises, a command that fails and one that prints something else are all found."""
    page = tmp_path / "page.md"
    for text in ("```python\nassert 1 == 2\n```\n", "```console\n$ python none.py\n```\n",
                 "```python x.py\nprint(1)\n```\n```console\n$ python x.py\n2\n```\n",
                 "```console\n$ rm x\n```\n"):  # fmt: skip
        page.write_text(text)
        with pytest.raises(AssertionError):
            test_the_blocks_of_a_page_run(page, tmp_path)


def diagram() -> str:
    """The life of a dispatch as a mermaid diagram, drawn from the table of edges."""
    order = [None, *Status]
    arrows = sorted(EDGES, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
    drawn = [
        f"    {before or '[*]'} --> {after}" + (": operator" if before in TERMINAL else "") for before, after in arrows
    ]
    ended = [f"    {status} --> [*]" for status in Status if status in TERMINAL]
    return "\n".join(["stateDiagram-v2", *drawn, *ended]) + "\n"


def test_the_diagram_is_the_table_of_edges() -> None:
    """The diagram of the lifecycle page is the one that the table of edges draws."""
    shown = [b.text for b in blocks.blocks(blocks.ROOT / "docs/lifecycle.md") if b.language == "mermaid"]
    assert shown == [diagram()], f"replace it by:\n{diagram()}"


def test_the_lifecycle_page_names_every_reason() -> None:
    """The lifecycle page explains each reason code that a dispatch can have, and no other."""
    text = (blocks.ROOT / "docs/lifecycle.md").read_text("utf-8")
    assert set(re.findall(r"`(dispatch\.\w+\.\w+)`", text)) == set(Reason)


def test_the_failpoints_page_lists_every_failpoint() -> None:
    """The page of failpoints is the table in the code."""
    text = (blocks.ROOT / "docs/failpoints.md").read_text("utf-8")
    rows = "\n".join(f"| `{name}` | {where} |" for name, where in FAILPOINTS.items())
    assert rows in text, f"replace it by:\n{rows}"


def test_no_page_names_a_way_of_this_workplace() -> None:
    """Pages hold no absolute paths of a machine."""
    for page in blocks.pages():
        assert not re.search(r"(?<![\w.])/(work|root|home|tmp)/", page.read_text("utf-8")), page
