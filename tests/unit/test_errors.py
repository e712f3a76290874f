"""Errors: their text, their exit statuses, and that every code in use is documented."""

import pickle
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from mkc.compiler.errors import (
    CODES,
    ArtifactError,
    CheckError,
    DescriptionError,
    Location,
    LoweringError,
    MkcError,
    ToolchainError,
)


def test_text_has_place_code_message_and_hint() -> None:
    error = DescriptionError(
        "MKC110", "unknown key 'lyers'", "did you mean 'layers'?", Location("a.yaml", 3, 7)
    )
    assert str(error) == (
        "a.yaml:3:7: error MKC110: unknown key 'lyers'\n  hint: did you mean 'layers'?"
    )


def test_text_without_place_or_hint() -> None:
    assert str(CheckError("MKC304", "SM 3 waits on itself")) == (
        "error MKC304: SM 3 waits on itself"
    )
    assert str(MkcError("MKC101", "gone", location=Location("a.yaml"))) == (
        "a.yaml: error MKC101: gone"
    )


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (DescriptionError, 2),
        (LoweringError, 2),
        (ArtifactError, 2),
        (CheckError, 1),
        (ToolchainError, 70),
        (MkcError, 70),
    ],
)
def test_exit_status(kind: type[MkcError], status: int) -> None:
    assert kind.exit_status == status


def test_survives_pickling() -> None:
    error = DescriptionError("MKC104", "bad", "fix it", Location("a.yaml", 1, 2))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is DescriptionError
    assert str(copy) == str(error)


def test_codes_raised_and_codes_in_the_table_are_the_same() -> None:
    used = {
        code
        for package in ("compiler", "runtime", "api")
        for path in Path(str(files(f"mkc.{package}"))).rglob("*.py")
        if path.name != "errors.py"
        for code in re.findall(r'"(MKC\d+)"', path.read_text("utf-8"))
    }
    assert not used - CODES.keys(), "raised, but not in CODES"
    assert not CODES.keys() - used, "in CODES, but raised nowhere"


def test_import_costs_nothing_heavy() -> None:
    probe = (
        "import sys, mkc.compiler.errors; "
        "print([m for m in ('pydantic', 'ruamel.yaml', 'networkx', 'torch') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
