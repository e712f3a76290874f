"""The cache of finished artifacts, addressed by everything that decides their bytes.

An entry is an artifact folder named by its key. It appears by one rename and is never changed, so
any number of processes may read and write one cache. The key holds the model, target and options,
the text of every source of compiler and templates, and NVRTC with its options; finding it imports
neither NVRTC nor a pass.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from mkc.compiler.artifact import Artifact, copy_artifact, load_artifact
from mkc.compiler.assemble import compile_options
from mkc.compiler.errors import ArtifactError
from mkc.compiler.plan import Options
from mkc.compiler.spec import ModelSpec
from mkc.compiler.target import Target

SOURCE_PACKAGES = ("mkc.compiler", "mkc.templates")
SOURCE_SUFFIXES = (".py", ".cuh", ".j2", ".yaml")
TOOLCHAIN = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


def default_cache_dir() -> Path:
    """$MKC_CACHE_DIR, or `mkc` under $XDG_CACHE_HOME, or `~/.cache/mkc`."""
    if own := os.environ.get("MKC_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mkc"


def cache_key(spec: ModelSpec, target: Target, options: Options, extras: Collection[str]) -> str:
    """The hash that names the artifact of these inputs, made by this compiler."""
    content = {
        "spec": spec.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
        "options": asdict(options),
        "extras": sorted(extras),
        "sources": _source_hashes(),
        "toolchain": {name: _version(name) for name in ("mkc", *TOOLCHAIN)},
        "flags": [
            option
            for option in compile_options(target.arch)
            if not option.startswith("--include-path")
        ],
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _source_hashes() -> dict[str, str]:
    hashes = {}
    for package in SOURCE_PACKAGES:
        root = Path(str(resources.files(package)))
        for path in sorted(root.rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                name = f"{package}/{path.relative_to(root).as_posix()}"
                hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


class Cache:
    """Artifacts by key under one folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Where the artifact of that key is, or would be."""
        return self.folder / "artifacts" / key

    def find(self, key: str) -> Artifact | None:
        """The artifact of that key. A damaged one is removed, as if it had never been there."""
        folder = self.path(key)
        if not folder.is_dir():
            return None
        try:
            return load_artifact(folder)
        except ArtifactError:
            shutil.rmtree(folder, ignore_errors=True)
            return None

    def store(self, key: str, artifact: Artifact) -> None:
        """Copies an artifact into the cache. Of several processes that store one, one wins."""
        folder = self.path(key)
        if folder.is_dir():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
            finished = Path(scratch) / key
            copy_artifact(artifact.folder, finished)
            try:
                os.rename(finished, folder)
            except OSError:
                if not folder.is_dir():
                    raise
