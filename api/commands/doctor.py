"""`mkc doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from mkc.api.commands.common import CacheDirOption, JsonOption, print_json, print_table

PACKAGES = (
    "cuda-bindings",
    "jinja2",
    "networkx",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "pydantic",
    "rich",
    "ruamel.yaml",
    "typer",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `needed` says for what ("compile", "run") it matters if it is not ok."""

    name: str
    ok: bool
    detail: str
    advice: str = ""
    needed: str = "compile"


def run_doctor(cache_dir: CacheDirOption = None, as_json: JsonOption = False) -> None:
    """Check this machine: Python, packages, NVRTC, driver, GPUs, targets and cache.

    Ends with 1 if something that `mkc compile` needs is missing; a GPU is not.
    """
    findings = [
        _python(),
        *_packages(),
        _nvrtc(),
        *_gpus(),
        _torch(),
        _targets(),
        _cache(cache_dir),
    ]
    ready = all(finding.ok for finding in findings if finding.needed == "compile")
    if as_json:
        print_json({"can_compile": ready, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(
            ("", "what", "found", "advice"),
            [
                ("ok" if finding.ok else "missing", finding.name, finding.detail, finding.advice)
                for finding in findings
            ],
            left=(0, 1, 2, 3),
        )
    if not ready:
        raise typer.Exit(1)


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding(
        "python", ok, platform.python_version(), "" if ok else "use Python 3.11 or later"
    )


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed", f"pip install {name}")


def _nvrtc() -> Finding:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return Finding(
            "NVRTC", False, _first_line(error), "pip install 'nvidia-cuda-nvrtc==13.0.*'"
        )
    if int(status):
        return Finding("NVRTC", False, str(status), "reinstall nvidia-cuda-nvrtc")
    return Finding("NVRTC", True, f"{major}.{minor}")


def _gpus() -> Iterator[Finding]:
    """The driver and each GPU, with the target that fits it."""
    no_driver = "needed to run, not to compile: install the NVIDIA driver 580 or later"
    from mkc.compiler.target import target_of_gpu

    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
        if int(status):
            yield Finding("driver", False, _status_name(status), no_driver, "run")
            return
        _, version = driver.cuDriverGetVersion()
        yield Finding("driver", True, f"CUDA {version // 1000}.{version % 1000 // 10}", "", "run")
        _, number = driver.cuDeviceGetCount()
        for index in range(number):
            _, device = driver.cuDeviceGet(index)
            _, raw = driver.cuDeviceGetName(96, device)
            name = raw.decode("utf-8", "replace").rstrip("\0")
            fitting = target_of_gpu(name)
            advice = "" if fitting else "no target file describes this GPU"
            detail = f"{name}, target {fitting}" if fitting else name
            yield Finding(f"GPU {index}", bool(fitting), detail, advice, "run")
        if not number:
            yield Finding("GPU", False, "none visible", "needed to run, not to compile", "run")
    except (ImportError, RuntimeError, OSError) as error:
        yield Finding("driver", False, _first_line(error), no_driver, "run")


def _status_name(status: object) -> str:
    """The name of a driver's status, such as CUDA_ERROR_NO_DEVICE."""
    return str(getattr(status, "name", status))


def _torch() -> Finding:
    try:
        return Finding("torch", True, importlib.metadata.version("torch"), "", "run")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch",
            False,
            "not installed",
            "for the CPU reference: pip install 'mkc[serve]'",
            "run",
        )


def _targets() -> Finding:
    from mkc.compiler.errors import MkcError
    from mkc.compiler.target import load_target, target_names

    try:
        names = [load_target(name).name for name in target_names()]
    except MkcError as error:
        return Finding("targets", False, error.message, "reinstall mkc")
    return Finding("targets", True, ", ".join(names))


def _cache(folder: Path | None) -> Finding:
    from mkc.compiler.cache import default_cache_dir

    folder = folder or default_cache_dir()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    ok = os.access(nearest, os.W_OK) and nearest.is_dir()
    entries = sum(1 for _ in (folder / "artifacts").glob("[!.]*")) if folder.is_dir() else 0
    advice = "" if ok else "choose another folder with --cache-dir or MKC_CACHE_DIR"
    return Finding("cache", ok, f"{folder}, {entries} artifacts", advice, "cache")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
