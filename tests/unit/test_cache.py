"""The cache: what changes its key, what it finds, and what it does with damage."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from mkc.compiler import cache as cache_module
from mkc.compiler.artifact import load_artifact, write_artifact
from mkc.compiler.assemble import compile_options
from mkc.compiler.cache import Cache, cache_key, default_cache_dir
from mkc.compiler.parse import load_model
from mkc.compiler.plan import Options
from mkc.compiler.target import load_target
from stand_in import compile_tiny

SPEC, TARGET, OPTIONS = load_model("tiny"), load_target("h200"), Options()


def test_the_key_is_the_same_for_the_same_inputs() -> None:
    key = cache_key(SPEC, TARGET, OPTIONS, ["ptx", "dot"])
    assert key == cache_key(load_model("tiny"), load_target("h200-sxm"), Options(), ["dot", "ptx"])
    assert len(key) == 64


def test_the_key_changes_with_every_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slower = TARGET.model_copy(update={"hbm_bytes_per_second": 1e12})
    keys = [
        cache_key(SPEC, TARGET, OPTIONS, []),
        cache_key(SPEC.model_copy(update={"logit_scale": 0.5}), TARGET, OPTIONS, []),
        cache_key(SPEC, slower, OPTIONS, []),
        cache_key(SPEC, load_target("h100"), OPTIONS, []),
        *(
            cache_key(SPEC, TARGET, options, [])
            for options in (
                replace(OPTIONS, max_batch=4),
                replace(OPTIONS, chunk_fragments=8),
                replace(OPTIONS, window_bytes=32768),
                replace(OPTIONS, ring_slots=9),
                replace(OPTIONS, trace=True),
            )
        ),
        cache_key(SPEC, TARGET, OPTIONS, ["ptx"]),
    ]
    (tmp_path / "ring.cuh").write_text("one")
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    keys.append(cache_key(SPEC, TARGET, OPTIONS, []))
    (tmp_path / "ring.cuh").write_text("two")
    keys.append(cache_key(SPEC, TARGET, OPTIONS, []))
    monkeypatch.setattr(cache_module, "_version", lambda package: "another version")
    keys.append(cache_key(SPEC, TARGET, OPTIONS, []))
    monkeypatch.setattr(cache_module, "compile_options", lambda arch: ["--another-flag"])
    keys.append(cache_key(SPEC, TARGET, OPTIONS, []))
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_depend_on_where_headers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(SPEC, TARGET, OPTIONS, [])
    options = compile_options(TARGET.arch)
    moved = [o if "include-path" not in o else "--include-path=/elsewhere" for o in options]
    assert moved != options
    monkeypatch.setattr(cache_module, "compile_options", lambda arch: moved)
    assert cache_key(SPEC, TARGET, OPTIONS, []) == key


def test_the_key_covers_every_source_of_compiler_and_templates() -> None:
    names = set(cache_module._source_hashes())
    assert {"mkc.compiler/tile.py", "mkc.compiler/targets/h200-sxm.yaml"} <= names
    assert any(name.endswith(".cuh") for name in names)
    assert any(name.endswith(".j2") for name in names)


def test_store_and_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.find("key") is None
    artifact = write_artifact(compile_tiny(monkeypatch), tmp_path / "a")
    cache.store("key", artifact)
    cache.store("key", artifact)
    found = cache.find("key")
    assert found is not None
    assert found.plan == artifact.plan
    assert found.folder == cache.path("key")
    assert load_artifact(tmp_path / "a").plan == artifact.plan
    assert [file.name for file in cache.path("key").parent.iterdir()] == ["key"]


def test_a_damaged_entry_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.store("key", write_artifact(compile_tiny(monkeypatch), tmp_path / "a"))
    (cache.path("key") / "plan.json").write_text("{}")
    assert cache.find("key") is None
    assert not cache.path("key").exists()


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKC_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/own")
    monkeypatch.delenv("MKC_CACHE_DIR")
    assert default_cache_dir() == Path("/xdg/mkc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "mkc"
