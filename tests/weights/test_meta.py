"""Weights in Meta's format: cut in all ways that releases are, and rotated as Meta does it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.test_parity import difference
from tests.support.made_weights import (
    LLAMA,
    SMALL,
    Code,
    edit_json,
    has_tensors,
    interleave_rows,
    load_module,
    write_meta,
)
from titan.errors import ConfigError
from titan.model import layers
from titan.model.schema import Decoder, Llama
from titan.weights.formats import open_weights
from titan.weights.meta import map_to_meta_rows, map_to_titan_rows

WIDE = Llama(**SMALL | {"heads": 8, "kv_heads": 4})


@pytest.mark.parametrize(
    ("model", "ranks", "embedding"),
    [
        pytest.param(LLAMA, 1, 0, id="one"),
        pytest.param(LLAMA, 2, 0, id="two"),
        pytest.param(LLAMA, 2, 1, id="two-llama2"),
        pytest.param(LLAMA, 4, 0, id="four-of-two-key-heads"),
        pytest.param(WIDE, 8, 1, id="eight-of-four-key-heads-llama2"),
        pytest.param(Llama(**SMALL, tied=True), 1, 0, id="tied"),
        pytest.param(Llama(**SMALL, tied=True), 2, 0, id="tied-two"),
    ],
)
@pytest.mark.parametrize("vocabulary", [pytest.param({}, id="said"), pytest.param({"vocab_size": -1}, id="unsaid")])
def test_all_cuts(model: Decoder, ranks: int, embedding: int, vocabulary: dict[str, int], tmp_path: Path) -> None:
    written = write_meta(tmp_path, model, ranks, embedding, **vocabulary)
    weights = open_weights(tmp_path)
    assert has_tensors(weights, written)
    assert weights.model == model


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w2"])
def test_any_part_is_read(name: str, ranks: int, tmp_path: Path) -> None:
    written = write_meta(tmp_path, LLAMA, ranks)[f"layers.1.{name}.weight"]
    weights = open_weights(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        places = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in written.shape]
        part = weights.read(f"layers.1.{name}.weight", [a for a, _ in places], [b - a for a, b in places])
        wanted = written[tuple(slice(a, b) for a, b in places)]
        assert part.numel() == wanted.numel() and (not wanted.numel() or torch.equal(part, wanted))


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Meta's rotation of x [T, H, d]: neighbours are the real and imaginary part of a complex number."""
    width = x.shape[-1]
    angles = torch.outer(positions.double(), theta ** -(torch.arange(0, width, 2).double() / width))
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def test_scores_are_those_of_metas_own_rotation(tmp_path: Path) -> None:
    write_meta(tmp_path, LLAMA)
    theirs = torch.load(tmp_path / "consolidated.00.pth", weights_only=True)
    weights, positions = open_weights(tmp_path), torch.arange(40)
    x = torch.randn(40, LLAMA.dim, generator=torch.Generator().manual_seed(0))
    cos, sin = layers.compute_rotation(layers.inverse_frequencies(LLAMA.head_size, LLAMA.rope_theta), positions)
    ours, metas = [], []
    for name in ("wq", "wk"):
        key = f"layers.0.attention.{name}.weight"
        ours.append(
            layers.rotate_halves((x @ weights.read(key).T).unflatten(-1, (-1, LLAMA.head_size))[None], cos, sin)[0]
        )
        metas.append(turned((x @ theirs[key].T).unflatten(-1, (-1, LLAMA.head_size)), positions, LLAMA.rope_theta))
    groups = LLAMA.heads // LLAMA.kv_heads
    scores, wanted = (torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) for q, k in (ours, metas))
    assert difference(scores.double(), wanted) <= 1e-5
    swapped = metas[0].roll(1, -1)  # the measure notices pairs of the wrong numbers
    assert difference(torch.einsum("qhd,khd->hqk", swapped, metas[1].repeat_interleave(groups, 1)), wanted) > 0.1


def test_orders_of_rows_are_inverse() -> None:
    weight = torch.arange(32.0)[:, None]
    assert torch.equal(interleave_rows(weight, 8)[map_to_meta_rows(0, 32, 8)], weight)
    assert torch.equal(weight[map_to_meta_rows(0, 32, 8)][map_to_titan_rows(0, 32, 8)], weight)


@pytest.mark.parametrize(
    ("tied", "params", "factor"),
    [
        pytest.param(False, {}, 1.0, id="llama3"),
        pytest.param(False, {"use_scaled_rope": False}, 1.0, id="switched-off"),
        pytest.param(False, {"use_scaled_rope": True}, 8.0, id="llama3.1"),
        pytest.param(True, {"use_scaled_rope": True}, 32.0, id="llama3.2"),
        pytest.param(False, {"use_scaled_rope": True, "rope_scaling_factor": 16.0}, 16.0, id="said"),
    ],
)
def test_the_stretch(tied: bool, params: dict[str, Any], factor: float, tmp_path: Path) -> None:
    write_meta(tmp_path, Llama(**SMALL, tied=tied), **params)
    model = open_weights(tmp_path).model
    assert (model.rope_factor, model.rope_low, model.rope_high, model.rope_original) == (factor, 1.0, 4.0, 8192)


def test_what_llama2_leaves_out_has_its_values(tmp_path: Path) -> None:
    model = Llama(**SMALL | {"kv_heads": 4}, rope_theta=10_000.0)
    write_meta(tmp_path, model, n_kv_heads=..., rope_theta=..., vocab_size=-1)
    assert open_weights(tmp_path).model == model
    assert load_module(open_weights(tmp_path)).config == model


def code(folder: Path) -> None:
    torch.save({"x": Code()}, folder / "consolidated.00.pth")


def plain_pickle(folder: Path) -> None:
    (folder / "consolidated.00.pth").write_bytes(pickle.dumps({"x": Code()}))


def change(folder: Path, number: int, **changes: Any) -> None:
    file = folder / f"consolidated.{number:02}.pth"
    content = torch.load(file, weights_only=True) | changes
    torch.save({key: value for key, value in content.items() if value is not None}, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


EMBEDDING = "tok_embeddings.weight"
W1 = "layers.0.feed_forward.w1.weight"
REFUSED = [
    pytest.param(code, "could run code when loaded", id="code"),
    pytest.param(plain_pickle, "consolidated.00.pth", id="code-of-old"),
    pytest.param(
        lambda f: cut(f / "consolidated.01.pth"), "consolidated.01.pth is broken or incomplete", id="truncated"
    ),
    pytest.param(lambda f: (f / "params.json").unlink(), "has no params.json", id="no-params"),
    pytest.param(lambda f: (f / "params.json").write_text("["), "params.json is not JSON", id="no-json"),
    pytest.param(lambda f: edit_json(f / "params.json", dim=...), "has no dim", id="no-width"),
    pytest.param(lambda f: edit_json(f / "params.json", dim=128), "and the described model has", id="another-width"),
    pytest.param(lambda f: edit_json(f / "params.json", n_layers=3), "lacks layers.2.", id="more-layers"),
    pytest.param(lambda f: edit_json(f / "params.json", n_layers=1), "has layers.1.", id="fewer-layers"),
    pytest.param(lambda f: edit_json(f / "params.json", n_heads=3), "model.heads=3", id="odd-heads"),
    pytest.param(lambda f: edit_json(f / "params.json", moe_args={"num_experts": 8}), "moe_args=", id="experts"),
    pytest.param(lambda f: (f / "consolidated.00.pth").unlink(), "lacks consolidated.00.pth", id="missing-file"),
    pytest.param(lambda f: (f / "consolidated.01.pth").unlink(), "and the described model has", id="missing-last"),
    pytest.param(lambda f: change(f, 1, **{W1: None}), f"{W1} is not in every", id="missing-in-one"),
    pytest.param(lambda f: change(f, 0, **{W1: None}), f"no matrix {W1}", id="missing-in-first"),
    pytest.param(lambda f: change(f, 0, **{EMBEDDING: torch.ones(2)}), f"no matrix {EMBEDDING}", id="a-vector"),
    pytest.param(lambda f: change(f, 0, x=torch.ones(2)), "x is not in every", id="superfluous-in-one"),
    pytest.param(lambda f: change(f, 0, x=3), "not a mapping of names to tensors", id="a-number"),
    pytest.param(lambda f: [change(f, i, x=torch.ones(2)) for i in (0, 1)], "has x, which", id="superfluous"),
    pytest.param(
        lambda f: [change(f, i, **{"norm.weight": torch.ones(64, dtype=torch.int8)}) for i in (0, 1)],
        "stored as int8",
        id="integers",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED)
def test_refusals(
    spoil: Callable[[Path], Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_meta(tmp_path, LLAMA, 2)
    spoil(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_weights(tmp_path, "")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path}: ") and "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


def test_files_that_share_a_head_are_refused(tmp_path: Path) -> None:
    write_meta(tmp_path, Llama(**SMALL | {"heads": 2, "kv_heads": 2}, head_dim=32), 4)
    with pytest.raises(ConfigError, match="sharded within a head"):
        open_weights(tmp_path)
