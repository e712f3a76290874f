"""What README and the other pages name is there: verbs, options, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mkc.api.cli import app
from mkc.compiler.program import EntryKind, encode_programs
from plan_damage import tiny_plan

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("", "compiler/", "runtime/", "templates/", "tests/")
NOT_OURS = r"|config\.json|model\.safetensors\.index\.json"
WRITTEN_BY_MKC = re.compile(r"(manifest|ops|plan|layout)\.json|kernel\.\w+|ops\.dot" + NOT_OURS)
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\bmkc (\w+)((?:(?!\bmkc )[^\n#&])*)")
FILE = re.compile(r"(?:[\w.-]+/)*[\w.*-]+\.(?:py|cuh|md|yaml|json|cu|j2|dot|cubin|ptx)|[\w./]+/")


def code_of(page: Path) -> list[str]:
    """The page's code: blocks and spans."""
    return [block or span for block, span in CODE.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_exist(page: Path) -> None:
    for verb, rest in COMMAND.findall("\n".join(code_of(page))):
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, f"mkc {verb}"
        for option in re.findall(r"--[\w-]+", rest):
            assert option in shown.output, f"mkc {verb} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    named = {code for code in code_of(page) if FILE.fullmatch(code)}
    assert named
    for name in named:
        if not WRITTEN_BY_MKC.fullmatch(name):
            assert any(list(ROOT.glob(folder + name)) for folder in FOLDERS), name


def test_the_readme_begins_with_two_commands() -> None:
    """One line each, the whole set-up included; .ci/run takes the second from here."""
    block = next(code for code in code_of(ROOT / "README.md") if "\n" in code)
    first, second = block.splitlines()
    for command in (first, second):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q ")
    assert first.endswith("&& .venv/bin/mkc compile north_mini_code")
    assert second.endswith("&& .venv/bin/pytest -n auto")


def test_the_page_on_formats_has_every_kind_and_packet_set() -> None:
    page = (ROOT / "docs" / "format.md").read_text("utf-8")
    for kind in EntryKind:
        assert f"| {kind.value} {kind.name} |" in page
    for packets in tiny_plan().layout.packet_sets:
        row = f"| `{packets.name}` | {', '.join(packets.axes)} | {packets.packets} |"
        assert row in page, row
    word = re.search(r"kind \| [^.,\n]+", encode_programs.__doc__ or "")
    assert word is not None
    assert word[0] in page
