"""Formats of tasks, their requests and their scores, without a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan.config.settings import build
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError
from titan.evaluation.items import FORMATS, TaskItem
from titan.evaluation.schema import Evaluation
from titan.evaluation.scores import build_requests, compute_scores
from titan.training.evaluation.evaluator import TextSplit, read_validation_set

HUB = {"question": "Why?", "choices": {"text": ["so", "no"], "label": ["1", "2"]}, "answerKey": "2"}
PUBLISHED = {
    "question": {"stem": "Why?", "choices": [{"text": "so", "label": "1"}, {"text": "no", "label": "2"}]},
    "answerKey": "2",
}
HELLASWAG = {
    "activity_label": "Roof", "ctx_a": "He sits. [title] On", "ctx_b": "the roof", "label": "1",
    "endings": ["falls [substeps] down", "  stays. "],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "record", "item"),
    [
        pytest.param("arc", HUB, TaskItem("Question: Why?\nAnswer:", ("so", "no"), 1), id="arc-hub"),
        pytest.param("arc", PUBLISHED, TaskItem("Question: Why?\nAnswer:", ("so", "no"), 1), id="arc-published"),
        pytest.param(
            "hellaswag", HELLASWAG, TaskItem("Roof: He sits.. On The roof", ("falls down", "stays."), 1), id="hellaswag"
        ),
        pytest.param("lambada", {"text": "a b  c"}, TaskItem("a b ", ("c",)), id="lambada"),
    ],
)
def test_formats(name: str, record: dict[str, Any], item: TaskItem) -> None:
    assert FORMATS[name](record) == item


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        pytest.param("{}", {"format": "lambada"}, "line 1 is no item of this task (KeyError: 'text')", id="key"),
        pytest.param('{"text": "a "}', {"format": "lambada"}, "choices that are not empty", id="empty-choice"),
        pytest.param(
            json.dumps(HUB | {"choices": {"text": [1, 2], "label": ["1", "2"]}}),
            {"format": "arc"},
            "line 1 is no item of this task (ValueError: a value of choices is 1, where a text is due)",
            id="numbers",
        ),
        pytest.param("\n[1]", {"format": "arc"}, "line 2 is not a JSON object", id="no-object"),
        pytest.param("", {"format": "arc"}, "has no items", id="no-items"),
        pytest.param("{}", {}, "evaluation.tasks.x.format=null: give one of hellaswag, arc, lambada", id="no-format"),
        pytest.param(None, {"format": "arc"}, "can't be read (No such file or directory)", id="no-file"),
    ],
)
def test_wrong_files_are_rejected(tmp_path: Path, text: str | None, given: dict[str, str], message: str) -> None:
    path = tmp_path / "task.jsonl"
    if text is not None:
        path.write_text(text)
    chosen: Evaluation = build(Evaluation, {"tasks": {"x": {"path": str(path), **given}}}, "evaluation")
    with pytest.raises(ConfigError) as rejected:
        chosen.check()
    assert message in str(rejected.value) and "evaluation.tasks.x." in str(rejected.value)


def test_spaces_and_merges_at_the_border_belong_to_the_continuation() -> None:
    tokenizer = load_tokenizer("titan4k")
    items = [TaskItem("def main( ", ("self", "x"), 0, ""), TaskItem("import", ("os",))]
    found = build_requests(items, tokenizer, 100)
    for (context, choice), request in zip(
        [("def main(", " self"), ("def main(", " x"), ("import", " os")], found, strict=True
    ):
        assert tokenizer.decode(request.tokens) == context + choice
        assert request.scored == len(tokenizer.encode(context + choice)) - len(tokenizer.encode(context))


def test_the_beginning_of_a_long_context_is_left_out() -> None:
    tokenizer = load_tokenizer("titan4k")
    item = TaskItem("the quick brown fox jumps over the lazy", ("dog",))
    (whole,), (short,) = build_requests([item], tokenizer, 100), build_requests([item], tokenizer, 3)
    assert short.tokens == whole.tokens[-4:] and short.scored == whole.scored
    with pytest.raises(ConfigError, match=r"item 1: a continuation has .* tokens, and the model reads 1"):
        build_requests([TaskItem("a", ("an internationally long choice",))], tokenizer, 1)


def test_a_cloze_without_context_begins_with_the_token_of_documents() -> None:
    tokenizer = load_tokenizer("titan4k")
    (request,) = build_requests([TaskItem("", ("word",), 0, "")], tokenizer, 100)
    begin = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    assert request.tokens == (begin, *tokenizer.encode("word"))
    assert request.scored == len(request.tokens) - 1


def test_scores_of_choices_are_also_normalised_by_length() -> None:
    """By characters the second choice wins, by bytes the third."""
    item = TaskItem("", ("ab", "abcd", "ä" * 3), 1)
    found = compute_scores([item], np.array([[-3.0, 0], [-5.0, 0], [-6.0, 0]]))
    assert {name: figure.value for name, figure in found.items()} == {"acc": 0, "acc_norm": 1, "acc_bytes": 0}


def test_scores_of_a_cloze_have_an_interval() -> None:
    likelihoods = np.stack([-np.linspace(1, 3, 50), np.arange(50) % 2], axis=1)
    found = compute_scores([TaskItem("", ("a",))] * 50, likelihoods)
    assert found["perplexity"].value == pytest.approx(math.exp(2))
    error = 1.96 * np.std(likelihoods[:, 0]) / math.sqrt(50)
    assert found["perplexity"].low == pytest.approx(math.exp(2 - error), rel=0.05)
    assert found["perplexity"].high == pytest.approx(math.exp(2 + error), rel=0.05)
    assert (
        found["acc"].low < 0.5 < found["acc"].high
        and found["acc"] == compute_scores([TaskItem("", ("a",))] * 50, likelihoods)["acc"]
    )


def test_a_set_is_the_beginning_of_its_file(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "set.jsonl", load_tokenizer("titan4k")
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("one two", "three", "four five six")))
    chosen = build(Evaluation, {"sets": {"x": {"path": str(path), "field": "body", "tokens": 6}}}).sets["x"]
    split = read_validation_set(chosen, tokenizer, "x")
    first, second = tokenizer.encode_document("one two"), tokenizer.encode_document("three")
    assert split.ids.tolist() == [*first, *second, *tokenizer.encode_document("four five six")][:7]
    assert split.starts.tolist()[:2] == [0, len(first)]
    with pytest.raises(ConfigError, match=r"x\.field=text: line 1 of .* has no text of this name; it has body"):
        build(Evaluation, {"sets": {"x": {"path": str(path)}}}).sets["x"].check("x")


def test_the_last_row_of_a_set_is_padded() -> None:
    split = TextSplit(np.arange(1, 7, dtype=np.int32), np.array([0, 3]))
    assert split.count_rows(4) == 2 and split.read(4, 5).tolist() == [5, 6, 0, 0, 0]
    assert split.read_loss_mask(4, 5).tolist() == [True, True, False, False, False]
    assert split.find_document_starts(0, 5).tolist() == [3] and split.find_document_starts(3, 3).tolist() == []


def test_names_are_parts_of_keys() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.a/b: a name has letters"):
        build(Evaluation, {"sets": {"a/b": {"path": __file__}}}).check()
