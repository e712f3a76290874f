"""Checkpoints and packed copies on the GPU hold the bytes that they hold on the CPU."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")


def test_weights_reach_the_gpu_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that are larger and smaller than the pinned buffers, which take turns."""
    import json

    from safetensors.torch import save_file

    from mkc.compiler.parse import load_model
    from mkc.compiler.place import place
    from mkc.compiler.target import load_target
    from mkc.compiler.tile import tile
    from mkc.runtime import reading
    from mkc.runtime.checkpoint import load_checkpoint, open_checkpoint
    from mkc.runtime.oracle import checkpoint, hf_config
    from mkc.runtime.packed import open_packed, write_packed
    from mkc.runtime.weights import RandomWeights

    spec, target = load_model("tiny").model_copy(update={"tied_head": False}), load_target("h200")
    layout = place(spec, tile(spec, target, 8, 32), target)
    save_file(checkpoint(spec, RandomWeights(spec, 0)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec)))
    expected = load_checkpoint(tmp_path, layout, spec)
    found = open_checkpoint(tmp_path, spec)
    write_packed(tmp_path / "packed", layout, spec, found.weights(), found.fingerprint())
    plain = reading.Reader.__init__
    monkeypatch.setattr(
        reading.Reader, "__init__", lambda self, device="cpu": plain(self, device, 10_000)
    )
    loaded = load_checkpoint(tmp_path, layout, spec, "cuda")
    mapped = open_packed(tmp_path / "packed", layout, spec, "cuda", found.fingerprint(), True)
    for arena in (loaded, mapped):
        assert arena.device.type == "cuda"
        assert torch.equal(arena.cpu(), expected)
