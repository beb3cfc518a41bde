"""A pipe that is named as a file is rejected: reading one without a writer never ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan.dataset.sources import files
from titan.dataset.tokenizers.load import read_tokenizer_file
from titan.errors import ConfigError
from titan.evaluation import items
from titan.generation.schema import read_prompts
from titan.weights import model_config

READERS: dict[str, Callable[[Path], Any]] = {
    "dataset": lambda pipe: files.find_files(str(pipe), (".txt",)),
    "tokenizer": read_tokenizer_file,
    "evaluation-text": lambda pipe: next(items.read_texts(str(pipe), "text", "evaluation.sets.a")),
    "evaluation-records": lambda pipe: list(items.read_records(str(pipe), "evaluation.tasks.a.path")),
    "prompts": lambda pipe: read_prompts(str(pipe)),
    "config.json": lambda pipe: model_config.load_json(pipe, "checkpoint.weights=x"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_rejected(reader: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        READERS[reader](pipe)


def test_a_config_that_is_nested_deeply_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        model_config.load_json(tmp_path / "config.json", "checkpoint.weights=x")
