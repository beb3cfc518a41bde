"""`python -m titan.generate`: what it shows and writes, what it rejects, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import made_weights
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, train_run
from tests.support.tiers import full
from titan import generate
from titan.cluster import devices
from titan.cluster.gpus import GpuSearch
from titan.dataset.tokenizers.load import load_tokenizer
from titan.model.schema import Llama

TITAN4K = load_tokenizer("titan4k")
MODEL = Llama(**made_weights.SMALL | {"vocab": 4200})
"""With room for ids that the tokenizer has not."""
FAST = ["device=cpu", "dtype=fp32", "max_tokens=12"]
SPEED = re.compile(r"titan: [\d,]+ tokens in [\d.]+ s, [\d,.]+ tokens/s; first token after [\d.]+ s\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with the built-in tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "step-3"
    made_weights.write_native(folder, MODEL)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face's format, without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    made_weights.write_hf(folder, made_weights.LLAMA)
    return folder


def lines(folder: Path, tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.jsonl"
    assert generate.main([str(folder), f"to={out}", *FAST, *more]) == 0
    return [json.loads(line) for line in out.read_text().split("\n")[:-1]]


@pytest.mark.full
def test_a_single_prompt_is_continued_on_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(folder), "prompt=def main(: no list", *FAST]) == 0
    screen = capsys.readouterr()
    assert screen.out.startswith("def main(: no list") and screen.out.endswith("\n")
    assert len(screen.out) > len("def main(: no list\n")
    assert SPEED.fullmatch(screen.err)
    assert screen.err.startswith("titan: 12 tokens in ")


@pytest.mark.full
def test_the_terminal_and_a_file_tell_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines(folder, tmp_path, "prompt=import")
    assert capsys.readouterr().out == ""
    assert set(line) == {"prompt", "text", "tokens", "finish_reason"}
    assert (line["prompt"], len(line["tokens"]), line["finish_reason"]) == ("import", 12, "length")
    assert line["text"] == TITAN4K.decode(line["tokens"])
    assert generate.main([str(folder), "prompt=import", *FAST]) == 0
    assert capsys.readouterr().out == f"import{line['text']}\n"


@pytest.mark.full
def test_several_prompts_come_in_order(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("import\n\nclass A:\ndef f\n")
    alone = [lines(folder, tmp_path, f"prompt={text}", "samples=2") for text in ("import", "class A:", "def f")]
    expected = [line for pair in alone for line in pair]
    for given in ("prompt=[import,'class A:',def f]", f"prompts={tmp_path / 'prompts.txt'}"):
        assert lines(folder, tmp_path, given, "samples=2", "batch=4", "chunk=2") == expected
    assert len({tuple(line["tokens"]) for line in expected}) == 6
    assert generate.main([str(folder), "prompt=[import,'class A:',def f]", "samples=2", *FAST]) == 0
    shown = "".join(f"--- {i} of 6\n{line['prompt']}{line['text']}\n\n" for i, line in enumerate(expected, start=1))
    assert capsys.readouterr().out == shown


@pytest.mark.full
def test_prompts_of_json_lines(folder: Path, tmp_path: Path) -> None:
    texts = ["two\nlines", "x", "a\u2028separator\x85"]
    content = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "prompts.jsonl").write_bytes(content.encode())
    assert [line["prompt"] for line in lines(folder, tmp_path, f"prompts={tmp_path / 'prompts.jsonl'}")] == texts


@pytest.mark.full
def test_the_token_that_begins_a_document_is_not_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = load_tokenizer("titan4k")
    begun.bos = 7
    monkeypatch.setattr("titan.generation.request.load_tokenizer", lambda name: begun)
    monkeypatch.setattr("titan.generation.worker.load_tokenizer", lambda name: begun)
    (line,) = lines(folder, tmp_path, "prompt=import")
    assert line["prompt"] == "import"
    assert generate.main([str(folder), "prompt=import", *FAST]) == 0
    assert capsys.readouterr().out == f"import{line['text']}\n"


@pytest.mark.full
def test_tokens_without_a_tokenizer(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(bare, tmp_path, "tokens=[1,2,3]", "temperature=0")
    assert line["prompt"] is None and line["text"] is None
    theirs = made_weights.hugging_face(made_weights.LLAMA)
    prompt = torch.tensor([[1, 2, 3]])
    out = theirs.generate(prompt, do_sample=False, min_new_tokens=12, max_new_tokens=12, eos_token_id=None)  # type: ignore[operator]
    assert line["tokens"] == out[0, 3:].tolist()
    assert generate.main([str(bare), "tokens=[1,2,3]", "temperature=0", *FAST]) == 0
    assert capsys.readouterr().out == "1 2 3 " + " ".join(map(str, line["tokens"])) + "\n"


@pytest.mark.full
def test_sampling_settings(folder: Path, tmp_path: Path) -> None:
    def drawn(*more: str) -> list[list[int]]:
        return [line["tokens"] for line in lines(folder, tmp_path, "prompt=import", "samples=3", *more)]

    plain = drawn("temperature=1", "top_k=0")
    assert plain == drawn("temperature=1", "top_k=0")
    assert plain != drawn("temperature=1", "top_k=0", "seed=1")
    assert len({tuple(tokens) for tokens in plain}) == 3
    greedy = drawn("temperature=0")
    assert greedy[0] == greedy[1] == greedy[2]
    assert greedy == drawn("top_k=1") == drawn("top_p=1e-9", "top_k=0") == drawn("temperature=1e-9")


@pytest.mark.full
def test_ids_outside_of_the_tokenizer_are_never_sampled(folder: Path, tmp_path: Path) -> None:
    found = lines(folder, tmp_path, "prompt=import", "samples=40", "temperature=100", "top_k=0", "batch=40")
    drawn = [token for line in found for token in line["tokens"]]
    assert 4000 < max(drawn) < TITAN4K.vocab_size == 4096 < MODEL.vocab


@pytest.mark.full
def test_a_stop_text_ends_it(folder: Path, tmp_path: Path) -> None:
    (free,) = lines(folder, tmp_path, "prompt=import")
    word = TITAN4K.decode(free["tokens"][4:6])
    (line,) = lines(folder, tmp_path, "prompt=import", f"stop={word}")
    assert line["finish_reason"] == "stop"
    assert line["text"] == free["text"][: free["text"].index(word)]
    assert line["tokens"] == free["tokens"][: len(line["tokens"])] and len(line["tokens"]) <= 6


@pytest.mark.full
def test_the_end_of_a_document_ends_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = lines(folder, tmp_path, "prompt=import")
    with monkeypatch.context() as patch:
        ended = load_tokenizer("titan4k")
        ended.eos = free["tokens"][5]
        patch.setattr("titan.generation.request.load_tokenizer", lambda name: ended)
        (line,) = lines(folder, tmp_path, "prompt=import")
        (on,) = lines(folder, tmp_path, "prompt=import", "ignore_eos=true")
    first = free["tokens"].index(ended.eos)
    assert line["finish_reason"] == "stop" and line["tokens"] == free["tokens"][: first + 1]
    assert line["text"] == TITAN4K.decode(free["tokens"][:first])
    assert on["tokens"] == free["tokens"]


def test_a_prompt_begins_as_documents_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("titan.generation.worker.work", lambda job, place: seen.append(job.prompts) or 0)
    begun = load_tokenizer("titan4k")
    begun.bos = 7
    monkeypatch.setattr("titan.generation.request.load_tokenizer", lambda name: begun)
    for given in ("prompt=import", "prompt=", "tokens=[5]", "prompt=<|end_of_text|>"):
        assert generate.main([str(folder), given, *FAST]) == 0
    assert generate.main([str(folder), "prompt=<|end_of_text|>", "markup=true", *FAST]) == 0
    assert TITAN4K.eos is not None
    ids, spelled = TITAN4K.encode("import"), TITAN4K.encode("<|end_of_text|>")
    assert len(spelled) > 1
    assert seen == [((7, *ids),), ((7,),), ((5,),), ((7, *spelled),), ((7, TITAN4K.eos),)]


@pytest.mark.full
def test_tensor_ranks_give_the_same(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["prompt=[import,class A]", "samples=2"]
    alone = lines(folder, tmp_path, *given)
    capfd.readouterr()
    assert lines(folder, tmp_path, *given, "parallelism.tensor=2") == alone
    screen = capfd.readouterr()
    assert screen.out == "" and SPEED.fullmatch(screen.err)


def test_a_trained_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n\n".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}." for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    model = [setting for setting in TINY if not setting.startswith("dataset")]
    data = ["dataset=text", f"dataset.path={tmp_path / 'book.txt'}", "model.vocab=4096"]
    run = compose_test_run([*model, *data, f"hydra.run.dir={tmp_path / 'run'}"])
    train_run(run)
    capsys.readouterr()
    assert generate.main([str(tmp_path / "run"), "prompt=10 is", "max_tokens=4", "device=cpu"]) == 0
    screen = capsys.readouterr()
    assert screen.out.startswith("10 is") and len(screen.out) > len("10 is\n")
    assert SPEED.fullmatch(screen.err)
    assert generate.main([str(tmp_path / "run"), "prompt=10 is", "max_tokens=15", "device=cpu"]) == 0
    assert "trained on up to 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        pytest.param([], "prompt is missing", id="nothing"),
        pytest.param(["prompt="], "prompt=: is empty, and no token begins a document", id="empty"),
        pytest.param(["prompt=x", "tokens=[1]"], "prompt and tokens: give one of them only.", id="two-ways"),
        pytest.param(["tokens=[]"], "tokens=[]: there is nothing to continue", id="no-tokens"),
        pytest.param(["tokens=[1,4200]"], "tokens: id 4200 is outside of the model's vocabulary, 0 to 4199", id="id"),
        pytest.param(["tokens=[-1]"], "tokens=[-1]: must be at least 0.", id="negative-id"),
        pytest.param(["gone", "prompt=x"], "there is no such directory", id="no-directory"),
        pytest.param(["prompts=gone.txt"], "prompts=gone.txt: can't be read (No such file or directory)", id="no-file"),
        pytest.param(["prompt=x", "top_p=0"], "top_p=0: must be at most 1 and above 0.", id="top-p-0"),
        pytest.param(["prompt=x", "top_p=1.5"], "top_p=1.5: must be at most 1 and above 0.", id="top-p-above"),
        pytest.param(["prompt=x", "temperature=-1"], "temperature=-1: must be at least 0.", id="temperature"),
        pytest.param(["prompt=x", "temperature=nan"], "temperature=nan", id="temperature-nan"),
        pytest.param(["prompt=x", "max_tokens=0"], "max_tokens=0: must be at least 1.", id="max-tokens"),
        pytest.param(["prompt=x", "temprature=1"], "did you mean 'temperature'?", id="unknown"),
        pytest.param(["x"], "x: not understood; write prompt=x, or see --help.", id="no-setting"),
        pytest.param(["prompt=x", "to=gone/x.jsonl"], "to=gone/x.jsonl: there is no directory gone", id="output"),
        pytest.param(["prompt=x", "to=."], "to=.: is a directory", id="output-directory"),
        pytest.param(
            ["prompt=x", "parallelism.tensor=3"],
            "parallelism.tensor=3: does not divide the model's kv_heads, 2; give a divisor of it, such as 1.",
            id="tensor",
        ),
        pytest.param(
            ["prompt=x", "parallelism.pipeline=2"],
            "parallelism.pipeline=2: text is generated on one device or with tensor parallelism only; "
            "give parallelism.tensor=2.",
            id="pipeline",
        ),
        pytest.param(
            ["prompt=x", "parallelism.tensr=2"],
            "parallelism.tensr=2: there is no such setting; did you mean 'parallelism.tensor'?",
            id="unknown-dimension",
        ),
        pytest.param(["prompt=x", "max_tokens=1000000000"], "take 0.0 GiB and the keys and values", id="memory"),
    ],
)
def test_refusals(more: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = [] if more[:1] == ["gone"] else [str(folder)]
    assert generate.main([*source, *more, "device=cpu"]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.startswith("titan: ") and err.count("\n") == 1


def test_a_gpu_that_is_missing_is_named_as_generate_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "find_gpus", lambda probe: GpuSearch([], [], "there is no GPU", "install one"))
    assert generate.main([str(folder), "prompt=x", "device=cuda"]) == 2
    assert capsys.readouterr().err == "titan: device=cuda: there is no GPU; install one, or use device=cpu.\n"


def test_a_text_needs_a_tokenizer(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(bare), "prompt=x"]) == 2
    assert f"{bare}: has no tokenizer to read a prompt with; give tokens=[1,2,3]." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        pytest.param("a.txt", b"\n \n", "has no prompt", id="empty"),
        pytest.param("a.txt", b"ab\xff", "not UTF-8 (byte 2)", id="not-utf-8"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"prompt": "x"}', 'line 2 is not like {"text"', id="no-text"),
        pytest.param("a.jsonl", b"[1]", 'line 1 is not like {"text"', id="a-list"),
        pytest.param("a.jsonl", b'{"text": 5}', "line 1 has a value of text that is no string", id="a-number"),
    ],
)
def test_files_of_prompts_that_are_refused(
    name: str, content: bytes, sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert generate.main([str(folder), f"prompts={tmp_path / name}"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [full(["--help"]), ["gone/x/y", "prompt=x"], ["prompt=x"], full(["/tmp", "prompt=x", "top_p=2"])],
    ids=["help", "no-directory", "no-from", "value"],
)
def test_it_speaks_before_it_imports_torch(given: list[str]) -> None:
    code = f"import sys; from titan import generate; generate.main({given!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
