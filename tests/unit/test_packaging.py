"""An installed wheel has every module and every file that the folders have."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def packaged(package: str) -> set[Path]:
    """Files that setuptools takes from a top-level folder, by `packages` and `package-data`."""
    folder = ROOT / FOLDERS[package]
    found: set[Path] = set()
    for name in SETUPTOOLS["packages"]:
        if name == package or name.startswith(f"{package}."):
            place = folder.joinpath(*name.removeprefix(package).split("."))
            patterns = ["*.py", *SETUPTOOLS["package-data"].get(name, [])]
            found.update(path for pattern in patterns for path in place.glob(pattern))
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_every_file_is_packaged(package: str) -> None:
    folder = ROOT / FOLDERS[package]
    there = {
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert there
    assert {path.relative_to(ROOT) for path in there - packaged(package)} == set()


@pytest.mark.parametrize("package", FOLDERS)
def test_the_type_checker_finds_every_package(package: str) -> None:
    """By a link under typecheck/, which is where mypy looks."""
    link = ROOT.joinpath("typecheck", *package.split("."))
    assert link.is_symlink()
    assert link.resolve() == ROOT / FOLDERS[package]
