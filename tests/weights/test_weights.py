"""Weights whoever wrote them: how they are found, a checkpoint's own, and what tells some from others."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.made_weights import (
    LLAMA,
    QWEN3,
    SMALL,
    Code,
    edit_json,
    has_tensors,
    write_hf,
    write_meta,
    write_native,
)
from titan.checkpoint import manifest
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama
from titan.weights.formats import compute_digest, open_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(LLAMA, id="llama"),
        pytest.param(Llama(**SMALL, tied=True), id="tied"),
        pytest.param(QWEN3, id="qwen3"),
    ],
)
def test_a_checkpoint(model: Decoder, dtype: torch.dtype, tmp_path: Path) -> None:
    written = write_native(tmp_path / "run" / "checkpoints" / "step-3", model, dtype)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-3"):
        weights = open_weights(path)
        assert has_tensors(weights, written)
        assert weights.model == model and weights.tokenizer == "titan4k"
        assert Path(weights.path).name == "step-3"


def test_any_part_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    written = write_native(tmp_path, LLAMA)["layers.0.feed_forward.w2.weight"]
    part = open_weights(tmp_path).read("layers.0.feed_forward.w2.weight", [3, 10], [50, 0])
    assert part.shape == (50, 0)
    part = open_weights(tmp_path).read("layers.0.feed_forward.w2.weight", [3, 10], [50, 80])
    assert torch.equal(part, written[3:53, 10:90])


def test_a_tokenizer_of_the_folder_goes_by_its_path(tmp_path: Path) -> None:
    write_native(tmp_path, LLAMA)
    edit_json(tmp_path / "manifest.json", tokenizer="tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_weights(tmp_path).tokenizer == str(tmp_path / "tokenizer.json")


def metadata(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    edit_json(folder / "manifest.json", files={".metadata": vars(manifest.checksum_file(folder / ".metadata"))})


REFUSED: list[Any] = [
    pytest.param(lambda f: shutil.rmtree(f), "there is no such directory", id="gone"),
    pytest.param(lambda f: (f / "manifest.json").unlink(), "is an incomplete checkpoint", id="no-manifest"),
    pytest.param(
        lambda f: (f / "manifest.json").write_text("{"), "damaged: manifest.json is not a manifest", id="no-json"
    ),
    pytest.param(lambda f: (f / "__0_0.distcp").write_bytes(b""), "damaged: __0_0.distcp has 0 bytes", id="truncated"),
    pytest.param(lambda f: metadata(f, b"x"), ".metadata can't be used", id="broken-metadata"),
    pytest.param(lambda f: metadata(f, pickle.dumps(Code())), "names builtins.print", id="code"),
    pytest.param(
        lambda f: edit_json(f / "manifest.json", model={"_target_": "titan.model.schema.Llama", **SMALL, "layers": 3}),
        "lacks layers.2.",
        id="another-model",
    ),
    pytest.param(
        lambda f: edit_json(f / "manifest.json", model={"_target_": "os.system"}),
        "its model is of the class os.system; if you trust it, set the environment variable TITAN_MODULES=os",
        id="another-target",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED)
def test_refusals(
    spoil: Callable[[Path], Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "x"
    write_native(folder, LLAMA)
    spoil(folder)
    with pytest.raises(ConfigError) as refused:
        open_weights(folder, "")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


def test_a_broken_chunk_is_named(tmp_path: Path) -> None:
    write_native(tmp_path, LLAMA)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ConfigError, match=r"norm\.weight can't be read from __0_0\.distcp"):
        open_weights(tmp_path).read("norm.weight")


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        pytest.param("", "holds no weights: neither a run's checkpoints", id="nothing"),
        pytest.param("x/pytorch_model.bin", "save them as safetensors", id="bin"),
        pytest.param("x/checkpoints/x", "holds no complete checkpoint", id="a-run-without"),
        pytest.param("x", "is a file; give its folder", id="a-file"),
    ],
)
def test_what_holds_no_weights_is_refused(file: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / (file or "x/")).parent.mkdir(parents=True, exist_ok=True)
    if file:
        (tmp_path / file).write_bytes(b"x")
    else:
        (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=sentence):
        open_weights(tmp_path / "x")


@pytest.mark.parametrize("write", [write_native, write_hf, write_meta])
def test_a_digest_tells_weights_wherever_they_lie(write: Callable[[Path, Decoder], Any], tmp_path: Path) -> None:
    write(tmp_path / "a", LLAMA)
    write(tmp_path / "other", Llama(**SMALL | {"rope_theta": 1e4}))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = compute_digest(open_weights(tmp_path / "a"))
    assert first == compute_digest(open_weights(tmp_path / "b"))
    assert first != compute_digest(open_weights(tmp_path / "other"))
    assert len(first) == 16


def test_a_digest_tells_other_numbers_apart(tmp_path: Path) -> None:
    for name, change in (("a", 0.0), ("b", 1e-3)):
        write_meta(tmp_path / name, LLAMA)
        file = tmp_path / name / "consolidated.00.pth"
        content = torch.load(file, weights_only=True)
        torch.save({key: value + change for key, value in content.items()}, file)
    assert compute_digest(open_weights(tmp_path / "a")) != compute_digest(open_weights(tmp_path / "b"))


def test_a_model_of_a_trusted_package_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours_shapes.py").write_text(
        "from dataclasses import dataclass\nfrom titan.model.schema import Llama\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Own(Llama):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "x"
    write_native(folder, LLAMA)
    edit_json(folder / "manifest.json", model={"_target_": "ours_shapes.Own", **SMALL})
    with pytest.raises(ConfigError, match=r"TITAN_MODULES=ours_shapes"):
        open_weights(folder, "")
    monkeypatch.setenv("TITAN_MODULES", "ours_shapes")
    assert type(open_weights(folder, "").model).__name__ == "Own"
