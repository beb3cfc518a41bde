"""Text from a model in memory: Hugging Face's tokens, the same with and without a cache, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.model.test_parity import SMALL, STRETCH, difference, hugging_face, ours
from tests.support.made_weights import DEEPSEEK_V2, DEEPSEEK_V3, LLAMA4, QWEN3_MOE
from tests.support.own_models import OwnLlama
from tests.support.tiers import select_cases
from titan.dataset.tokenizers.load import JsonTokenizer, RankTokenizer, load_tokenizer
from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from titan.errors import RunError
from titan.generation.cache import can_cache, use_cache
from titan.generation.decode import BatchDecoder as Decoding
from titan.generation.decode import Continuation, Detokenizer, SamplingRules
from titan.model import init_weights
from titan.model.attention import set_kernels
from titan.model.layers import CausalAttention
from titan.model.schema import Decoder, Llama, Qwen3

CPU = torch.device("cpu")
LENGTHS = (1, 5, 17, 40)
"""Of the prompts in a batch."""
NEW = 40


def prompts(vocab: int = 128, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def tiny(seed: int = 0, schema: Decoder | None = None, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor sharp."""
    with torch.device("meta"):
        model = (schema or Llama(**SMALL | changes)).build()
    init_weights.materialise_model(model, model.initial(), seed, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def continued(
    model: Any, given: Sequence[Sequence[int]], chunk: int = 512, samples: int = 1, **rules: Any
) -> list[Continuation]:
    rows = [Continuation(prompt, sample) for prompt in given for sample in range(samples)]
    Decoding(model, SamplingRules(**{"max_tokens": NEW} | rules), device=CPU, chunk=chunk).run(rows)
    return rows


def tokens(rows: Sequence[Continuation]) -> list[list[int]]:
    return [row.tokens for row in rows]


MODELS = [
    pytest.param(Llama(**SMALL), id="llama"),
    pytest.param(Llama(**SMALL | {"kv_heads": 4}), id="llama-group-of-1"),
    pytest.param(Llama(**SMALL | {"kv_heads": 1}), id="llama-group-of-4"),
    pytest.param(Llama(**SMALL, **STRETCH), id="llama-stretched"),
    pytest.param(Llama(**SMALL, tied=True), id="llama-tied"),
    pytest.param(Llama(**SMALL | STRETCH | {"rope_factor": 32.0, "tied": True}), id="llama-tied-stretched-32"),
    pytest.param(Qwen3(**SMALL, head_dim=32), id="qwen3"),
    pytest.param(Qwen3(**SMALL | {"kv_heads": 1}, head_dim=16, tied=True), id="qwen3-tied-group-of-4"),
    pytest.param(QWEN3_MOE, id="qwen3-moe"),
    pytest.param(LLAMA4, id="llama4"),
    pytest.param(replace(LLAMA4, attention_chunk=30, moe_every=1, qk_norm=False), id="llama4-long-chunks"),
    pytest.param(DEEPSEEK_V3, id="deepseek-v3"),
    pytest.param(DEEPSEEK_V2, id="deepseek-v2"),
]


QUICK = (
    "llama", "llama-group-of-1", "llama-group-of-4", "llama-tied", "qwen3-moe", "llama4", "deepseek-v3",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("config", select_cases(MODELS, QUICK))
def test_greedy_tokens_are_those_of_hugging_face(config: Decoder) -> None:
    theirs: Any = hugging_face(config)
    expected = []
    for prompt in prompts():  # each alone, so that nothing of a batch enters
        out = theirs.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(line) for line in expected}) == len(expected)
    assert tokens(continued(ours(config, theirs), prompts(), chunk=16)) == expected


@pytest.mark.parametrize("config", MODELS)
def test_logits_at_each_position_are_those_without_a_cache(config: Decoder) -> None:
    model = ours(config, hugging_face(config))
    rows = torch.tensor(prompts(lengths=(50, 50)))
    lengths, found = [20, 33], []
    with torch.no_grad(), use_cache(model, 50, CPU) as cache:
        model(rows[:, :33], cache.extend(0, 33))  # the shorter row's end is filling here
        for i in range(17):
            places = [length + i for length in lengths]
            new = rows.gather(1, torch.tensor(places)[:, None])
            found.append(model.head(model(new, cache.step(places)))[:, 0])
    whole = model.head(model(rows))
    for row, length in enumerate(lengths):
        mine = torch.stack([logits[row] for logits in found])
        assert difference(mine, whole[row, length : length + 17]) <= 1e-5


def chunked(model: Any, row: Tensor, chunk: int) -> Tensor:
    """Logits of a row that goes through the cache in chunks."""
    with torch.no_grad(), use_cache(model, row.shape[1], CPU) as cache:
        parts = [
            model(row[:, start : start + chunk], cache.extend(start, min(chunk, row.shape[1] - start)))
            for start in range(0, row.shape[1], chunk)
        ]
    return torch.cat([model.head(part) for part in parts], 1)  # type: ignore[no-any-return]


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_a_prompt_in_chunks_is_the_prompt_at_once(chunk: int) -> None:
    model = tiny()
    row = torch.tensor(prompts(lengths=(50, 50)))
    assert difference(chunked(model, row, chunk), model.head(model(row))) <= 1e-5
    assert tokens(continued(model, prompts(), chunk=chunk)) == tokens(continued(model, prompts()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_company(temperature: float) -> None:
    model, given = tiny(), prompts()
    together = tokens(continued(model, given, temperature=temperature))
    backwards = tokens(continued(model, given[::-1], temperature=temperature))
    alone = [tokens(continued(model, [prompt], temperature=temperature))[0] for prompt in given]
    assert together == alone == backwards[::-1]


@pytest.mark.full
def test_the_seed_decides_and_samples_differ() -> None:
    model, given = tiny(), prompts()
    first = tokens(continued(model, given, samples=3, temperature=1.0))
    assert first == tokens(continued(model, given, samples=3, temperature=1.0))
    assert first != tokens(continued(model, given, samples=3, temperature=1.0, seed=1))
    assert len({tuple(line) for line in first}) == len(first)
    assert first[::3] == tokens(continued(model, given, temperature=1.0))


def test_a_row_ends_at_its_own_end_of_text() -> None:
    model, given = tiny(), prompts()
    free = tokens(continued(model, given, temperature=1.0))
    eos = free[1][7]
    rows = continued(model, given, temperature=1.0, eos=eos)
    expected = [line[: line.index(eos) + 1] if eos in line else line for line in free]
    assert tokens(rows) == expected
    assert [row.reason for row in rows] == ["stop" if eos in line else "length" for line in free]
    assert len({len(line) for line in expected}) > 1


def test_ids_above_the_vocabulary_are_never_sampled() -> None:
    model, given = tiny(), prompts(vocab=20)
    assert max(map(max, tokens(continued(model, given, temperature=3.0)))) > 20
    assert max(map(max, tokens(continued(model, given, temperature=3.0, vocab=20)))) < 20
    assert max(map(max, tokens(continued(model, given, vocab=20)))) < 20


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    row = torch.tensor(prompts(lengths=(30,)))
    before = model(row)
    continued(model, prompts(), max_tokens=2)
    assert all(type(block.attention.core) is CausalAttention for block in model.blocks())
    assert torch.equal(model(row), before)


@pytest.mark.parametrize(
    ("attention", "has_cache"), [("window", True), ("linear", False), ("whole", False), ("gated", True)]
)
def test_attention_of_ones_own_continues_rows_as_whole_forward_passes_do(attention: str, has_cache: bool) -> None:
    model = tiny(schema=OwnLlama(**SMALL, attention=attention))
    assert can_cache(model) is has_cache
    rows = [list(prompt) for prompt in prompts(lengths=(1, 5, 17))]
    generated = tokens(continued(model, rows, chunk=4, max_tokens=8))
    with torch.no_grad():
        for row in rows:
            for _ in range(8):
                row.append(int(model.head(model(torch.tensor([row])))[0, -1].argmax()))
    assert generated == [row[-8:] for row in rows]


def test_attention_that_titan_does_not_know_is_not_replaced() -> None:
    class Halved(CausalAttention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            return super().forward(q, k, v, mask) / 2

    model = tiny()
    model.layers["0"].attention.core = Halved()
    row = prompts(lengths=(6,))
    with torch.no_grad():
        expected = int(model.head(model(torch.tensor(row)))[0, -1].argmax())
    assert tokens(continued(model, row, max_tokens=1)) == [[expected]]
    assert not can_cache(model)
    set_kernels(model, "math", CPU, use_flex=False)
    assert type(model.layers["0"].attention.core) is Halved


def test_a_cache_has_an_end() -> None:
    with use_cache(tiny(), 4, CPU) as cache, pytest.raises(ValueError, match="5 tokens do not fit"):
        cache.extend(0, 5)


def test_weights_that_are_no_numbers_end_it() -> None:
    model = tiny()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(RunError, match="not finite"):
        continued(model, prompts())


BYTES = RankTokenizer({bytes([i]): i for i in range(256)}, [END_OF_TEXT])
"""A token a byte."""
TITAN = load_tokenizer("titan4k")


def metaspace() -> Tokenizer:
    """A tokenizer that marks words and falls back to bytes, like Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256, "▁": 257, "▁so": 258, "▁what": 259, "a": 260}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    decoders = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
    backend.decoder = tokenizers.decoders.Sequence(decoders)
    return JsonTokenizer(backend, {})


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What is shown after each token, and at the end."""
    text = Detokenizer(tokenizer, prompt, stop)
    shown = []
    for token in tokens:
        shown.append(text.add_token(token))
        if text.stopped:
            break
    shown.append(text.finish())
    assert "".join(shown) == text.text
    return shown


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", [BYTES, TITAN], ids=["bytes", "titan4k"])
@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
def test_the_pieces_are_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    shown = pieces(tokenizer, tokenizer.encode(text), tokenizer.encode(prompt))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown).replace("\ufffd", "", text.count("\ufffd"))


def test_a_character_comes_when_it_is_complete() -> None:
    assert pieces(BYTES, list("aé€😀b".encode()), []) == [
        "a", "", "é", "", "", "€", "", "", "", "😀", "b", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        pytest.param([0xC3], ["", "\ufffd"], id="cut-at-the-end"),
        pytest.param([0xC3, 0x41], ["", "\ufffdA", ""], id="broken-by-what-follows"),
    ],
)
def test_what_is_no_character_is_marked(tokens: list[int], shown: list[str]) -> None:
    assert pieces(BYTES, tokens, []) == shown


def test_the_first_word_keeps_its_space() -> None:
    tokenizer = metaspace()
    assert tokenizer.decode([258, 259]) == "so what"
    assert pieces(tokenizer, [259, 260, 0xC3, 0xA9], [257, 258]) == [" what", "a", "", "é", ""]


@pytest.mark.parametrize(
    ("text", "stop", "given", "stopped"),
    [
        pytest.param("one. two", (".",), "one", True, id="a-character"),
        pytest.param("one\n\ntwo", ("\n\n",), "one", True, id="over-two-tokens"),
        pytest.param("one\ntwo", ("\n\n",), "one\ntwo", False, id="only-its-beginning"),
        pytest.param("one\n", ("\n\n",), "one\n", False, id="its-beginning-at-the-end"),
        pytest.param("aab", ("ab",), "a", True, id="begun-twice"),
        pytest.param("one two three", ("three", "two"), "one ", True, id="the-first-of-several"),
        pytest.param("abc", ("bcd", "c"), "ab", True, id="one-inside-another's-beginning"),
        pytest.param("abc", ("",), "abc", False, id="nothing"),
        pytest.param("one😀two", ("😀",), "one", True, id="of-several-bytes"),
    ],
)
def test_stop_texts(text: str, stop: tuple[str, ...], given: str, stopped: bool) -> None:
    whole = Detokenizer(BYTES, [], stop)
    for byte in text.encode():
        if not whole.stopped:
            whole.add_token(byte)
    whole.finish()
    assert (whole.text, whole.stopped) == (given, stopped)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    shown = "".join(pieces(BYTES, list(text.encode()), [], tuple(stop)))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    if not ends:
        assert shown == text
    else:  # by the token that completes one; of two that it completes the longer is taken away
        assert shown == text[: min(text.find(s, 0, ends[0]) for s in stop if s in text[: ends[0]])]
    assert not any(s in shown for s in stop)
