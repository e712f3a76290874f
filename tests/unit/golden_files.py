"""Golden files: texts that people read, as they were last looked at and found right."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def compare(name: str, text: str) -> None:
    """A text against its golden file; MKC_UPDATE_GOLDEN=1 writes the file anew."""
    path = FOLDER / name
    if os.environ.get("MKC_UPDATE_GOLDEN") == "1":
        path.write_text(text, "utf-8")
    expected = path.read_text("utf-8")
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        pytest.fail("\n".join(["MKC_UPDATE_GOLDEN=1 writes the file anew", *lines]), pytrace=False)
