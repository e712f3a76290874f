"""`mkc generate` over the interpreter: the engine's tokens, and clear refusals."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mkc.api.cli import app
from mkc.compiler.parse import load_model
from mkc.compiler.pipeline import plan_model
from mkc.compiler.plan import Options
from mkc.compiler.target import load_target
from mkc.runtime.packed import write_packed
from mkc.runtime.reference import KvCache, Reference
from mkc.runtime.weights import RandomWeights

PROMPT, COUNT = [5, 17, 300, 2], 6


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["generate", "tiny", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def options_of(seed: int = 3) -> list[str]:
    prompt = ",".join(map(str, PROMPT))
    return ["--prompt-ids", prompt, "--max-tokens", str(COUNT), "--random-seed", str(seed)]


def test_tokens_are_the_references() -> None:
    """Random weights of the usual spread have no near ties in so few tokens."""
    found = json.loads(run(*options_of(), "--ignore-eos", "--json"))
    assert found["finish_reason"] == "length"
    spec = load_model("tiny")
    reference = Reference(spec, RandomWeights(spec, 3), torch.float32)
    tokens = torch.tensor([*PROMPT, *found["tokens"]])
    logits = reference.extend(tokens[:-1], KvCache(spec, torch.float32, "cpu")).logits
    assert logits[len(PROMPT) - 1 :].argmax(-1).tolist() == found["tokens"]


def test_packed_weights_give_the_same(tmp_path: Path) -> None:
    spec = load_model("tiny")
    plan = plan_model(spec, load_target("h200"), Options())
    path = tmp_path / "tiny.mkcpack"
    write_packed(path, plan.layout, spec, RandomWeights(spec, 3), "made here")
    prompt = options_of()[:4]
    assert run(*prompt, "--packed", str(path)) == run(*options_of())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-ids", "hello", "--random-seed", "1"], "token ids"),
        (["--prompt-ids", "1,-2", "--random-seed", "1"], "token ids"),
        (["--prompt-ids", "1"], "either the weights or a seed"),
        (["--prompt-ids", "1", "--random-seed", "1", "--backend", "gpu"], "is not one of"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["generate", "tiny", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_token_outside_of_the_vocabulary_is_named() -> None:
    from mkc.runtime.request import RequestError

    with pytest.raises(RequestError, match="token 5000 is outside of the vocabulary of 1003"):
        CliRunner().invoke(
            app,
            ["generate", "tiny", "--prompt-ids", "5000", "--random-seed", "1"],
            catch_exceptions=False,
        )
