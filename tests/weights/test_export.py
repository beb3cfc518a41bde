"""Weights that leave titan: others read them, and what comes back is the same bit by bit."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from tests.support.made_weights import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    LLAMA,
    LLAMA4,
    QWEN3,
    QWEN3_MOE,
    SMALL,
    STRETCH,
    compute_logit_difference,
    has_tensors,
    load_module,
    write_hf,
    write_meta,
    write_native,
)
from tests.support.own_models import OwnLlama
from tests.support.tiers import select_cases
from titan.checkpoint import manifest
from titan.dataset.tokenizers.load import RankTokenizer, load_tokenizer, write_ranks
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama, Qwen3
from titan.weights import tokenizer_files
from titan.weights.export import Export, check_export
from titan.weights.formats import open_weights
from titan.weights.meta import build_params, find_ffn_multiplier

TIED = Llama(**SMALL, tied=True)
MODELS = [
    pytest.param(LLAMA, id="llama"),
    pytest.param(Llama(**SMALL, **STRETCH, rope_theta=1e4, norm_eps=1e-3), id="llama-stretched"),
    pytest.param(Llama(**SMALL, tied=True, head_dim=32), id="llama-tied-wide-heads"),
    pytest.param(QWEN3, id="qwen3"),
    pytest.param(Qwen3(**SMALL, **STRETCH, head_dim=8, tied=True), id="qwen3-tied-stretched"),
    pytest.param(QWEN3_MOE, id="qwen3-moe"),
    pytest.param(LLAMA4, id="llama4"),
    pytest.param(DEEPSEEK_V3, id="deepseek-v3"),
    pytest.param(DEEPSEEK_V2, id="deepseek-v2"),
]


def out(source: Path, folder: Path, **how: Any) -> Path:
    """Export everything in one process."""
    folder.mkdir()
    Export(open_weights(source), **how).write(folder)
    return folder


SIZES = {"one-file": 10**9, "several": 50_000}
EXPORTED = [
    pytest.param(*model.values, SIZES[size], id=f"{model.id}-{size}")
    for model, size in zip(MODELS, itertools.cycle(SIZES), strict=False)
]


@pytest.mark.parametrize(("model", "shard_bytes"), select_cases(EXPORTED, ("qwen3-tied-stretched-one-file",)))
def test_transformers_loads_it_and_has_the_same_logits(model: Decoder, shard_bytes: int, tmp_path: Path) -> None:
    write_native(tmp_path / "a", model)
    folder = out(tmp_path / "a", tmp_path / "b", format="hf", dtype="fp32", shard_bytes=shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes == 50_000)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    assert compute_logit_difference(load_module(open_weights(tmp_path / "a")), theirs, model.vocab) <= 1e-5


def as_stored(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights in a type; biases of routers stay float32."""
    return {name: w if name.endswith("router.bias") else w.to(dtype) for name, w in weights.items()}


QUICK = ("llama-tied-wide-heads", "deepseek-v3")


@pytest.mark.parametrize("model", select_cases(MODELS, QUICK))
def test_to_hugging_face_and_back(model: Decoder, tmp_path: Path) -> None:
    written = write_native(tmp_path / "a", model)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        weights = open_weights(out(tmp_path / "a", tmp_path / dtype, format="hf", dtype=dtype, shard_bytes=50_000))
        assert has_tensors(weights, as_stored(written, kind))
        assert weights.model == model
    kept = out(tmp_path / "bf16", tmp_path / "kept", format="hf", dtype="keep")
    assert has_tensors(open_weights(kept), as_stored(written, torch.bfloat16))
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", [pytest.param(LLAMA, id="llama"), pytest.param(TIED, id="tied")])
def test_to_meta_and_back(model: Decoder, ranks: int, tmp_path: Path) -> None:
    written = write_native(tmp_path / "a", model)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weights = open_weights(out(tmp_path / "a", tmp_path / dtype, format="meta", dtype=dtype, meta_ranks=ranks))
        assert has_tensors(weights, {name: tensor.to(kind) for name, tensor in written.items()})
        assert weights.model == model


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", [pytest.param(LLAMA, id="llama"), pytest.param(TIED, id="tied")])
def test_metas_files_are_what_meta_would_write(model: Decoder, ranks: int, tmp_path: Path) -> None:
    write_native(tmp_path / "a", model)
    write_meta(tmp_path / "theirs", model, ranks)
    ours = out(tmp_path / "a", tmp_path / "ours", format="meta", dtype="fp32", meta_ranks=ranks)
    for rank in range(ranks):
        a, b = (torch.load(f / f"consolidated.{rank:02}.pth", weights_only=True) for f in (ours, tmp_path / "theirs"))
        del b["rope.freqs"]  # computed, and not needed
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    (ours / "consolidated.00.pth").stat()
    stored = (ours / "consolidated.00.pth").stat().st_size
    assert stored < sum(t.nbytes for n, t in a.items() if not (model.tied and n == "output.weight")) + 20_000


def test_what_came_in_by_one_format_leaves_by_another(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", LLAMA)
    first = open_weights(tmp_path / "a")
    wanted = {name: first.read(name) for name in first.shapes}
    out(tmp_path / "a", tmp_path / "b", format="meta", dtype="keep", meta_ranks=4)
    out(tmp_path / "b", tmp_path / "c", format="titan", dtype="keep")
    last = out(tmp_path / "c", tmp_path / "d", format="hf", dtype="keep", shard_bytes=1)
    assert has_tensors(open_weights(last), wanted)


def test_a_checkpoint_of_weights(tmp_path: Path) -> None:
    written, told = write_native(tmp_path / "a", TIED), list[int]()
    (tmp_path / "b").mkdir()
    Export(open_weights(tmp_path / "a"), "titan", "bf16", 30_000).write(tmp_path / "b", told.append)
    wanted = {name: tensor.bfloat16() for name, tensor in written.items()}
    assert len(list((tmp_path / "b").glob("*.distcp"))) > 3
    assert has_tensors(open_weights(tmp_path / "b"), wanted)
    assert sum(told) == sum(tensor.nbytes for tensor in wanted.values())
    state = {f"model.{name}": torch.empty_like(tensor) for name, tensor in wanted.items()}
    load(state, checkpoint_id=tmp_path / "b", no_dist=True)  # torch's own reader
    assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in wanted.items())
    found = manifest.inspect(tmp_path / "b")
    assert found is not None and found.step == 0 and found.tokenizer == "titan4k"
    manifest.verify_checksums(tmp_path / "b", found.files)
    assert {file.name for file in (tmp_path / "b").iterdir()} == {*found.files, "manifest.json"}


def test_safetensors_reads_it_and_the_index_tells_all(tmp_path: Path) -> None:
    written = write_native(tmp_path / "a", LLAMA)
    folder = out(tmp_path / "a", tmp_path / "b", format="hf", dtype="bf16", shard_bytes=30_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        content = safetensors.torch.load_file(folder / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(content)
        assert sum(tensor.nbytes for tensor in content.values()) <= 30_000 or len(content) == 1
        found |= content
    names = load_module(open_weights(tmp_path / "a")).hf_names()
    assert {name: found[names[name]].float().tolist() for name in written} == {
        name: tensor.bfloat16().float().tolist() for name, tensor in written.items()
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    header = (folder / name).read_bytes()[8:]
    assert header.startswith(b'{"__metadata__":{"format":"pt"}')


@pytest.mark.parametrize("format", ["hf", "meta"])
def test_the_work_can_be_shared(format: Any, tmp_path: Path) -> None:
    write_native(tmp_path / "a", LLAMA)
    how: Any = {"format": format, "shard_bytes": 30_000, "meta_ranks": 4, "dtype": "bf16"}
    alone = out(tmp_path / "a", tmp_path / "alone", **how)
    (tmp_path / "shared").mkdir()
    export, told = Export(open_weights(tmp_path / "a"), **how), list[int]()
    for rank in (2, 0, 1):
        with pytest.raises(ConfigError, match="is missing; restart the conversion"):
            export.finish(tmp_path / "shared")
        export.write_tensors(tmp_path / "shared", (rank, 3), told.append)
    export.finish(tmp_path / "shared")
    assert sum(told) == sum(file.bytes for file in export.list_files())
    files = sorted(file.name for file in alone.iterdir())
    assert files == sorted(file.name for file in (tmp_path / "shared").iterdir())
    for name in files:
        assert (alone / name).read_bytes() == (tmp_path / "shared" / name).read_bytes()


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    class Broken:
        def __init__(self, weights: Any) -> None:
            self.weights = weights

        def __getattr__(self, name: str) -> Any:
            return getattr(self.weights, name)

        def read(self, name: str, *part: Any) -> Tensor:
            if name == "norm.weight":
                raise KeyboardInterrupt
            read: Tensor = self.weights.read(name, *part)
            return read

    write_native(tmp_path / "a", LLAMA)
    (tmp_path / "b").mkdir()
    weights: Any = Broken(open_weights(tmp_path / "a"))
    exported = Export(weights, "hf", shard_bytes=100_000)
    for export in (exported, Export(weights, "meta")):
        with pytest.raises(KeyboardInterrupt):
            export.write_tensors(tmp_path / "b")
    names = {file.name for file in (tmp_path / "b").iterdir()}
    assert names == {"model-00001-of-00002.safetensors"}  # neither a half-written file nor a temporary one
    with pytest.raises(ConfigError, match="is missing; restart the conversion"):
        exported.finish(tmp_path / "b")
    with pytest.raises(ConfigError):
        open_weights(tmp_path / "b")


def test_what_a_config_said_goes_on(tmp_path: Path) -> None:
    theirs: Any = write_hf(tmp_path / "a", LLAMA)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = [3, 5]
    theirs.generation_config.temperature, theirs.generation_config.do_sample = 0.6, True
    theirs.save_pretrained(tmp_path / "a")
    folder = out(tmp_path / "a", tmp_path / "b", format="hf", dtype="bf16")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 1024 and config.eos_token_id == [3, 5] and config.bos_token_id == 1
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.temperature == 0.6 and generation.eos_token_id == [3, 5]


@pytest.mark.parametrize(
    ("model", "lengths"),
    [
        pytest.param(LLAMA, 8192, id="llama"),
        pytest.param(Llama(**SMALL, rope_factor=8.0), 131_072, id="llama-stretched"),
        pytest.param(QWEN3, 40_960, id="qwen3"),
    ],
)
def test_lengths_are_those_of_the_releases(model: Decoder, lengths: int, tmp_path: Path) -> None:
    write_native(tmp_path / "a", model)
    folder = out(tmp_path / "a", tmp_path / "b", format="hf")
    assert transformers.AutoConfig.from_pretrained(folder).max_position_embeddings == lengths


def test_fp16_does_not_overflow_in_silence(tmp_path: Path) -> None:
    write_meta(tmp_path / "a", LLAMA)
    file = tmp_path / "a" / "consolidated.00.pth"
    content = torch.load(file, weights_only=True)
    content["norm.weight"][3] = 1e5
    torch.save(content, file)
    with pytest.raises(ConfigError, match=r"dtype=fp16: norm.weight has values above 65,504"):
        out(tmp_path / "a", tmp_path / "b", format="hf", dtype="fp16")


REFUSED = [
    pytest.param(QWEN3, 1, "Meta has no Qwen3; give format=hf", id="qwen3"),
    pytest.param(LLAMA, 3, "meta_ranks=3: must divide model.heads=4", id="heads"),
    pytest.param(Llama(**SMALL | {"ffn": 98}), 4, "meta_ranks=4: must divide model.ffn=98", id="ffn"),
    pytest.param(Llama(**SMALL | {"vocab": 126}), 4, "meta_ranks=4: must divide model.vocab=126", id="vocabulary"),
    pytest.param(Llama(**SMALL | {"heads": 12, "kv_heads": 3}, head_dim=4), 1, "model.head_dim=4", id="width"),
    pytest.param(
        Llama(**SMALL | {"dim": 96, "heads": 6, "kv_heads": 3, "ffn": 96}), 2, "model.kv_heads=3", id="key-heads"
    ),
    pytest.param(Llama(**SMALL, **STRETCH), 1, "model.rope_original=32 must be 8192", id="stretch"),
]


@pytest.mark.parametrize(("model", "ranks", "sentence"), REFUSED)
def test_what_meta_has_not_is_refused(model: Decoder, ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_export(model, "meta", ranks)
    assert sentence in str(refused.value)


def test_a_family_of_ones_own_is_refused() -> None:
    class Mine(Llama):
        pass

    with pytest.raises(
        ConfigError, match=r"format=hf: Hugging Face has no Mine .*; give format=titan \(.*hf_names\(\)"
    ):
        check_export(Mine(**SMALL), "hf")


def test_the_page_shows_how_weights_of_ones_own_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITAN_MODULES", "tests")
    weights = write_native(tmp_path / "runs" / "mine" / "checkpoints" / "step-3", OwnLlama(**SMALL))
    page = (Path(__file__).resolve().parents[2] / "docs" / "weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(code, {})
    written = safetensors.torch.load_file("model.safetensors")
    assert len(written) == len(weights)
    assert torch.equal(written["model.layers.1.mlp.gate_proj.weight"], weights["layers.1.feed_forward.w1.weight"])


@given(dim=st.integers(2, 20_000), ffn=st.integers(1, 70_000))
def test_metas_formula_makes_the_width(dim: int, ffn: int) -> None:
    multiple, multiplier = find_ffn_multiplier(dim, ffn)
    width = int(multiplier * int(2 * (4 * dim) / 3))
    assert multiple * ((width + multiple - 1) // multiple) == ffn


def test_the_stretch_of_32_is_said() -> None:
    assert "rope_scaling_factor" not in build_params(Llama(**SMALL, rope_factor=8.0), 1)
    assert build_params(Llama(**SMALL, rope_factor=32.0), 1)["rope_scaling_factor"] == 32.0


TEXTS = [
    "Hello wörld 12345!", "  def f(x):\n\n\n    return x ** 2\t\r\n", "it's WE'LL 'S", "日本語のテキスト 🙂🙂",
    "a" * 300, "", "\x00\x01\ufffd", " " * 50 + "x", "…—“q”",
]  # fmt: skip


@pytest.mark.full
def test_a_rank_file_becomes_a_tokenizer_json_that_gives_the_same_ids(tmp_path: Path) -> None:
    write_native(tmp_path / "a", LLAMA)
    folder = out(tmp_path / "a", tmp_path / "b", format="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours, again = load_tokenizer("titan4k"), load_tokenizer(str(folder / "tokenizer.json"))
    text = "".join(Path(module.__file__ or "").read_text() for module in (json, subprocess))
    for sample in (*TEXTS, text):
        ids = ours.encode(sample)
        assert theirs(sample).input_ids == ids == again.encode(sample)
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == ours.eos == again.eos
    assert open_weights(folder).tokenizer == str(folder / "tokenizer.json")


@given(text=st.text())
@pytest.mark.full
def test_any_text_has_the_same_ids(text: str) -> None:
    ours = load_tokenizer("titan4k")
    assert isinstance(ours, RankTokenizer)
    assert json_of(ours).encode(text).ids == ours.encode(text)


def json_of(tokenizer: RankTokenizer, cache: list[Any] = []) -> Any:  # noqa: B006 - made once
    if not cache:
        import tokenizers

        cache.append(tokenizers.Tokenizer.from_str(tokenizer_files.build_tokenizer_json(tokenizer)))
        cache[0].encode_special_tokens = True  # text that spells a special token is text to titan
    return cache[0]


@pytest.mark.full
def test_documents_begin_as_with_llama_3(tmp_path: Path) -> None:
    letters = [bytes([i]) for i in range(256)]
    tokens = (
        letters + [bytes([a, b]) for a in range(256) for b in range(256)] + [b"abc" + bytes([i]) for i in range(256)]
    )
    tokens += [b"%06d" % i for i in range(128_000 - len(tokens))]
    write_ranks(tmp_path / "tokenizer.model", tokens)
    write_native(tmp_path / "a", LLAMA)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    (tmp_path / "b").mkdir()
    assert tokenizer_files.write_as_json(str(tmp_path / "tokenizer.model"), tmp_path / "b") == (128_000, 128_001)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs("abca hello").input_ids == [128_000, *tokenizer.encode("abca hello")]
    assert theirs.convert_tokens_to_ids("<|eot_id|>") == 128_009
    assert (tmp_path / "b" / "tokenizer.model").read_bytes() == (tmp_path / "tokenizer.model").read_bytes()


@pytest.mark.full
def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    write_native(tmp_path / "a", LLAMA)
    b = out(tmp_path / "a", tmp_path / "b", format="meta", dtype="keep")
    found = open_weights(b).tokenizer
    assert found == str(b / "tokenizer.model")
    assert load_tokenizer(found).fingerprint == load_tokenizer("titan4k").fingerprint
    c = out(b, tmp_path / "c", format="hf")
    (c / "chat_template.jinja").write_text("{{ messages }}")
    d = out(c, tmp_path / "d", format="hf")
    same = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert all((c / name).read_bytes() == (d / name).read_bytes() for name in same)
    out(d, tmp_path / "e", format="titan", dtype="keep")
    assert open_weights(tmp_path / "e").tokenizer == str(tmp_path / "e" / "tokenizer.json")


def test_a_sentencepiece_model_is_copied(tmp_path: Path) -> None:
    write_meta(tmp_path / "a", LLAMA)
    (tmp_path / "a" / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0")
    b = out(tmp_path / "a", tmp_path / "b", format="hf")
    assert (b / "tokenizer.model").read_bytes() == (tmp_path / "a" / "tokenizer.model").read_bytes()
    assert not (b / "tokenizer.json").exists()


MEASURE = """
import json, sys
from pathlib import Path
import torch
from titan.weights.export import Export
from titan.weights.interface import compute_expected_shapes
from titan.model.schema import Llama

class Drawn:
    path, tokenizer = "nowhere", None
    model = Llama(dim=256, layers=16, heads=8, kv_heads=8, ffn=1024, vocab=4096)
    shapes = compute_expected_shapes(model)
    dtypes = {name: torch.float32 for name in shapes}
    def read(self, name, offsets=None, lengths=None):
        return torch.rand(tuple(lengths or self.shapes[name]))

def resident(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) * 1024

def peak(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before

def work(format):
    folder = Path(sys.argv[1]) / format
    folder.mkdir()
    if format == "whole":
        return [weights.read(name) for name in weights.shapes] and None
    Export(weights, format, dtype="fp32", shard_bytes=10_000_000, meta_ranks=8).write(folder)

weights = Drawn()
peak(lambda: torch.save(weights.read("norm.weight").bfloat16(), Path(sys.argv[1]) / "x"))
print(json.dumps({format: peak(lambda: work(format)) for format in ("hf", "titan", "meta", "whole")}))
"""


@pytest.mark.full
def test_a_model_is_never_in_memory_whole(tmp_path: Path) -> None:
    """75 MB in files of 10 MB or, of Meta's, 9 MB, above what a process takes; all would be noticed."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system at once
    command = [sys.executable, "-c", MEASURE, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    taken = json.loads(done.stdout)
    assert all(sum(file.stat().st_size for file in (tmp_path / f).iterdir()) > 75e6 for f in ("hf", "titan", "meta"))
    assert taken["hf"] <= 10e6
    assert taken["titan"] <= 10e6
    assert taken["meta"] <= 9.5e6 + 5e6
    assert taken["whole"] >= 60e6
