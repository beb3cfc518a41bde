"""Load a tokenizer by name: built in, a tiktoken rank file, a tokenizer.json, or a repository of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from titan.config.settings import suggest_nearest
from titan.dataset.sources.hub import fetch_tokenizer
from titan.dataset.tokenizers.json_file import load_json
from titan.dataset.tokenizers.rank_file import BUILT_IN, load_ranks
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError

_SUFFIXES = (".json", ".tiktoken", ".model")
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: titan4k (built in); a file *.tiktoken, tokenizer.model or tokenizer.json; or OWNER/NAME[@REVISION] on
            Hugging Face's hub, whose tokenizer.json is fetched once.

    Raises:
        ConfigError: when there is no such file or repository, it can't be fetched, or has another format.
    """
    tokenizer = _load_by_name(name)
    tokenizer.name = name
    return tokenizer


def _load_by_name(name: str) -> Tokenizer:
    if name == BUILT_IN:
        return load_ranks(Path(__file__).with_name("titan4k.tiktoken"))
    path = Path(name).expanduser()
    if not path.exists() and _ON_HUB.fullmatch(name) and path.suffix not in _SUFFIXES:
        return load_json(fetch_tokenizer(name), name)
    if not path.is_file():
        raise ConfigError(_describe_missing(name, path))
    if path.suffix == ".json":
        return load_json(path, name)
    if path.suffix in (".tiktoken", ".model"):
        return load_ranks(path)
    raise ConfigError(f"dataset.tokenizer={name}: unknown file type; give {BUILT_IN}, *.tiktoken, *.model or *.json.")


def _describe_missing(name: str, path: Path) -> str:
    if path.is_dir():
        return f"dataset.tokenizer={name}: is a folder; give a file in it, such as {path / 'tokenizer.json'}."
    hint = suggest_nearest(name, [BUILT_IN])
    ways = f"; give {BUILT_IN}, the path of a tokenizer's file, or OWNER/NAME, such as openai-community/gpt2."
    hint = ways if hint == "." else hint
    return f"dataset.tokenizer={name}: there is no such tokenizer or file{hint}"
