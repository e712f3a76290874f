"""The command line as its users meet it: texts, exit codes, files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import golden_files
from mkc.api.cli import app, run
from mkc.compiler.artifact import load_artifact
from stand_in import SPILLING, stand_in

VERBS = (
    "compile", "check", "bench", "pack", "generate", "inspect", "explain", "models", "import",
    "doctor", "version",
)  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty current folder with the cache inside, and a terminal that is always alike."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MKC_CACHE_DIR", "cache")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("MKC_DEBUG", raising=False)
    monkeypatch.delenv("MKC_TARGET", raising=False)


def compare(name: str, text: str) -> None:
    """Against a golden file; sizes of shared memory follow the kernel's structure, and predicted
    times the target's measured figures, not these texts."""
    text = re.sub(r"2\d{5} B( +)\d\d chunks", r"###### B\1## chunks", text)
    text = re.sub(r"\d\d  2\d{5}$", "##  ######", text, flags=re.MULTILINE)
    text = re.sub(
        r"( +)\d+\.\d{3} +\d+\.\d% +\d+$", r"\1#.###  #.#%  ###", text, flags=re.MULTILINE
    )
    golden_files.compare(f"cli_{name}.txt", text)


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, prog_name="mkc", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def json_of(*arguments: str) -> Any:
    return json.loads(output_of(*arguments, "--json"))


def test_help() -> None:
    compare("help", output_of("--help"))


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_verbs(verb: str) -> None:
    text = output_of(verb, "--help")
    assert "--json" in text
    compare(f"help_{verb}", text)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from mkc.api.cli import run; run(['--help']);"
        "heavy = {'pydantic', 'networkx', 'numpy', 'ruamel', 'rich', 'cuda', 'jinja2', 'torch'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compile_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    text = output_of("compile", "tiny", "--target", "h200")
    compare("compile", text)
    assert load_artifact(Path("build/tiny-h200-sxm")).manifest["model"] == "tiny"
    assert output_of("inspect", "build/tiny-h200-sxm") == text


def test_compile_json(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    shown = json_of("compile", "tiny", "--max-batch", "2", "-o", "out", "--emit", "cu,dot,ptx")
    assert shown["artifact"] == "out"
    assert shown["target"] == "h100-sxm"
    assert shown["from_cache"] is False
    assert [point["batch"] for point in shown["prediction"]] == [1, 2]
    assert shown["kernels"][0]["shared_bytes"] > 200_000
    assert Path("out/kernel.ptx").read_text() == "// stand-in PTX\n"
    assert Path("out/ops.dot").read_text().startswith("digraph ops {")


def test_the_second_compile_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = stand_in(monkeypatch)
    output_of("compile", "tiny", "-o", "first")
    text = output_of("compile", "tiny", "-o", "second")
    assert "from the cache" in text
    assert compiled == ["tiny"]
    for file in Path("first").iterdir():
        assert file.read_bytes() == Path("second", file.name).read_bytes()
    output_of("compile", "tiny", "-o", "second", "--no-cache")
    output_of("compile", "tiny", "-o", "second", "--cache-dir", "another")
    output_of("compile", "tiny", "-o", "second", "--max-batch", "3")
    assert compiled == ["tiny"] * 4


def test_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = stand_in(monkeypatch)
    shown = [json_of("compile", "tiny", "--time-passes")["seconds"] for _ in range(2)]
    assert list(shown[1]) == [
        "ops",
        "tile",
        "place",
        "schedule",
        "verify",
        "simulate",
        "render",
        "assemble",
    ]
    assert len(compiled) == 2


def test_fail_on_spill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, SPILLING)
    assert run(["compile", "tiny"]) == 0
    assert run(["compile", "tiny", "--fail-on-spill"]) == 1
    assert "MKC403" in capsys.readouterr().err


def compile_again(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Stands in for the second process of --check, in this one."""
    assert command[:3] == [sys.executable, "-m", "mkc.api.cli"]
    return subprocess.CompletedProcess(command, run(command[3:]), "", "the second one's error")


def test_check_compares_two_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = stand_in(monkeypatch)
    monkeypatch.setattr(subprocess, "run", compile_again)
    result = CliRunner().invoke(app, ["compile", "tiny", "--check"])
    assert result.exit_code == 0
    assert "gave the same files" in result.output
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["plan.json", "kernel.cu", "manifest.json"])
def test_check_names_the_file_that_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    stand_in(monkeypatch)

    def differ(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        done = compile_again(command, **options)
        path = Path(command[-1]) / name
        path.write_text(path.read_text().replace("tiny", "Tiny").replace("qkv:", "Qkv:"))
        return done

    monkeypatch.setattr(subprocess, "run", differ)
    assert run(["compile", "tiny", "--check"]) == 1
    assert f"{name} differs between two compilations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "nope"], "error MKC101: no file or folder 'nope'"),
        (["compile", "tiny", "--target", "b200"], "no target is called 'b200'"),
        (["compile", "tiny", "--max-batch", "9"], "--max-batch 9"),
        (["compile", "tiny", "--emit", "cu,exe"], "Invalid value for --emit: 'exe'"),
        (["compile", "tiny", "--dump-after", "zip"], "no pass is called 'zip'"),
        (["compile", "bad.yaml"], "bad.yaml:1:1: error MKC111: the key 'mkc'"),
        (["compile"], "Missing argument"),
        (["compile", "tiny", "--fast"], "No such option: --fast"),
        (["fly"], "No such command 'fly'"),
        (["inspect", "nowhere"], "error MKC501: there is no folder nowhere"),
        (["inspect", "."], "error MKC501: manifest.json is missing"),
        (["inspect", "nowhere", "everything"], "'everything' is not one of"),
        (["import", "nope/config.json"], "error MKC101"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.yaml").write_text("modle: tiny\n")
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len([line for line in shown.err.splitlines() if "rror" in line.split(":")[0]]) <= 1
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_internal_errors_end_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debug: str
) -> None:
    from mkc.compiler import pipeline

    def fail(plan: object) -> str:
        raise ZeroDivisionError("a fault of mkc")

    monkeypatch.setattr(pipeline, "render", fail)
    monkeypatch.setenv("MKC_DEBUG", debug)
    assert run(["compile", "tiny"]) == 70
    shown = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: a fault of mkc" in shown
    assert "please report it" in shown
    assert ("Traceback" in shown) == (debug == "1")
    assert not Path("build").exists()


def test_a_plan_that_is_not_proven_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mkc.compiler import pipeline
    from mkc.compiler.schedule import schedule

    stand_in(monkeypatch)
    monkeypatch.setattr(pipeline, "schedule", lambda tiling, target: schedule(tiling, target)[:-1])
    assert run(["compile", "tiny"]) == 1
    assert "error MKC305: the plan is rejected: 131 programs" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    Path("file").write_text("")
    assert run(["compile", "tiny", "-o", "file/out"]) == 2
    assert capsys.readouterr().err.startswith("error: file")


def test_print_passes() -> None:
    compare("passes", output_of("compile", "--print-passes"))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ops", '"name": "layer0.qkv"'),
        ("tile", '"hidden_tiles": 13'),
        ("place", '"name": "partials"'),
        ("schedule", '"programs": ['),
        ("verify", '"no deadlock"'),
        ("simulate", '"share_of_floor"'),
        ("render", "decode_step_8"),
    ],
)
def test_dump_after(name: str, part: str) -> None:
    assert part in output_of("compile", "tiny", "--dump-after", name)
    assert not Path("build").exists()


@pytest.mark.parametrize(
    "what", [["summary"], ["sm", "5"], ["layer", "3"], ["packets"], ["layout"], ["cuda"], ["ops"]]
)
def test_inspect(monkeypatch: pytest.MonkeyPatch, what: list[str]) -> None:
    stand_in(monkeypatch)
    output_of("compile", "tiny", "--target", "h200", "-o", "tiny")
    compare(f"inspect_{what[0]}", output_of("inspect", "tiny", *what))
    assert json_of("inspect", "tiny", *what)


@pytest.mark.parametrize("what", [["sm"], ["sm", "132"], ["layer", "6"], ["ops", "3"]])
def test_inspect_refuses_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: list[str]
) -> None:
    stand_in(monkeypatch)
    output_of("compile", "tiny", "-o", "tiny")
    assert run(["inspect", "tiny", *what]) == 2
    assert "number" in capsys.readouterr().err


def test_models() -> None:
    text = output_of("models")
    assert "north_mini_code" in text
    assert json_of("models")["tiny"]["spec"]["vocab_size"] == 1003


def test_import_writes_a_description_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkc.compiler.describe import describe
    from mkc.compiler.parse import load_model

    Path("tiny.yaml").write_text(describe(load_model("tiny")))
    assert output_of("import", "tiny.yaml") == Path("tiny.yaml").read_text()
    assert "next: mkc compile copy.yaml" in output_of("import", "tiny.yaml", "-o", "copy.yaml")
    stand_in(monkeypatch)
    assert json_of("compile", "copy.yaml")["model"] == "tiny"


def test_doctor_works_without_a_gpu() -> None:
    shown = json_of("doctor")
    assert shown["can_compile"] is True
    found = {finding["name"]: finding for finding in shown["findings"]}
    assert found["NVRTC"]["ok"]
    assert "h200-sxm" in found["targets"]["detail"]
    assert "driver" in found
    assert "NVRTC" in output_of("doctor")


def test_doctor_finds_the_target_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings

    names = [b"NVIDIA H200\0\0", b"NVIDIA Unheard Of\0"]
    driver = SimpleNamespace(
        cuInit=lambda flags: (0,),
        cuDriverGetVersion=lambda: (0, 13000),
        cuDeviceGetCount=lambda: (0, len(names)),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetName=lambda length, device: (0, names[device]),
    )
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    found = {finding["name"]: finding for finding in json_of("doctor")["findings"]}
    assert found["driver"]["detail"] == "CUDA 13.0"
    assert found["GPU 0"]["detail"] == "NVIDIA H200, target h200-sxm"
    assert (found["GPU 1"]["ok"], found["GPU 1"]["detail"]) == (False, "NVIDIA Unheard Of")


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    whole = importlib.metadata.version

    def version(name: str) -> str:
        if name == "jinja2":
            raise importlib.metadata.PackageNotFoundError(name)
        return whole(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install jinja2" in result.output


def test_version() -> None:
    assert output_of("version").startswith("mkc 0.1.0 (artifact format 1, ")
    assert json_of("version")["artifact_format"] == 1
