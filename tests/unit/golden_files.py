"""Golden files: texts that people read, as they were last looked at and found right."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def compare(name: str, text: str) -> None:
    """A text against its golden file; MKC_UPDATE_GOLDEN=1 writes the file anew."""
    path = FOLDER / name
    if os.environ.get("MKC_UPDATE_GOLDEN") == "1":
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")
