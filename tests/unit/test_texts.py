"""The texts of an artifact that people read: the plan's programs, and the CUDA around the headers.

`MKC_UPDATE_GOLDEN=1 pytest tests/unit/test_texts.py` writes both golden files anew.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import pytest

import golden_files
from mkc.compiler.artifact_json import dump_plan, read_plan
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options
from mkc.compiler.render import header_text, render, render_model
from plan_damage import make_plan, tiny_plan

HEADERS = sorted(
    file.name for file in files("mkc.templates").iterdir() if file.name.endswith(".cuh")
)
_PART = re.compile(r"^// ==== (?P<name>[\w.]+) =+\n(?P<body>.*?)(?=^// ==== |\Z)", re.M | re.S)


@cache
def tiny_cuda() -> str:
    """The tiny model's kernel.cu for 132 SMs."""
    return render(make_plan(load_model("tiny"), 132, Options()))


def test_plan() -> None:
    """For seven SMs, so that it can be read."""
    text = dump_plan(tiny_plan())
    assert read_plan(text.encode()) == (tiny_plan().tiling, tiny_plan().programs)
    golden_files.compare("plan_tiny.json", text)


def test_cuda() -> None:
    """Without the headers' text, which is that of the templates, and the sizes that follow it."""

    def shorten(part: re.Match[str]) -> str:
        return part[0].splitlines()[0] + "\n" if part["name"] in HEADERS else part[0]

    text = re.sub(r"(\d), \d+>", r"\1, ##>", _PART.sub(shorten, tiny_cuda()))
    golden_files.compare("kernel_tiny.cu", re.sub(r"== \d+,", "== ######,", text))


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_is_in_the_cuda_once_and_whole(header: str) -> None:
    parts = [part["body"] for part in _PART.finditer(tiny_cuda()) if part["name"] == header]
    own = re.sub(r'^(#pragma once|#include "[\w.]+")\n', "", header_text(header), flags=re.M)
    assert [part.strip() for part in parts] == [own.strip()]


def test_constants_do_not_depend_on_the_run() -> None:
    plan = make_plan(load_model("north_mini_code"), 132, Options())
    text = render_model(plan)
    assert text == render_model(plan)
    assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|\bnan\b|Undefined", text)
