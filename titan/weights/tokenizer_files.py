"""Write a tokenizer's files next to weights: unchanged, or as the tokenizer.json that Hugging Face's libraries read."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.checkpoint.manifest import ManifestFile
from titan.config.optional import import_optional
from titan.dataset.tokenizers.load import BUILT_IN, PATTERN, RankTokenizer, load_tokenizer
from titan.errors import ConfigError
from titan.files.atomic import sync_path
from titan.weights.model_config import load_json

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files that belong to a tokenizer.json."""
_CLASS = "PreTrainedTokenizerFast"
"""The class with which transformers uses a tokenizer.json unchanged; a model's class may change it."""


def copy_files(name: str | None, folder: Path) -> str | None:
    """Copy a tokenizer's files unchanged.

    Args:
        name: the argument of `load_tokenizer`; None: there is no tokenizer.
        folder: the target.

    Returns:
        The tokenizer's name there: the file's name, or that of a built-in tokenizer or one of the hub; None if its file
        is missing.
    """
    if name is None or not Path(name).is_file():
        return name if name is not None and manifest.is_tokenizer(name, ()) else None
    source = Path(name)
    for file in (source, *(source.with_name(extra_name) for extra_name in _BESIDE)):
        if file.is_file() and (file == source or source.suffix == ".json"):
            shutil.copyfile(file, folder / file.name)
            sync_path(folder / file.name)
    return source.name


def copy_and_list(name: str | None, folder: Path) -> tuple[dict[str, ManifestFile], str | None]:
    """Copy a tokenizer's files unchanged; return them by name, and the result of `copy_files`."""
    copied_name = copy_files(name, folder)
    return list_files(copied_name, folder), copied_name


def list_files(name: str | None, folder: Path) -> dict[str, ManifestFile]:
    """Return size and checksum of the files that `copy_files` wrote into a folder, by name.

    Args:
        name: the result of `copy_files`.
    """
    names = [name, *_BESIDE] if name is not None and (folder / name).is_file() else []
    return {file: manifest.checksum_file(folder / file) for file in names if (folder / file).is_file()}


def check_packages(name: str | None, format: str, label: str) -> None:
    """Raise ConfigError when a tokenizer can't be written for lack of a package, before anything is written.

    Args:
        name: the argument of `load_tokenizer`; None: there is no tokenizer.
        format: the one to write: hf, meta or titan.
        label: the user's setting, for messages.
    """
    if name is not None and _needs_package(name, format):
        import_optional("tokenizers", label, f"writing the tokenizer {Path(name).name}")


def _needs_package(name: str, format: str) -> bool:
    """Return whether writing a tokenizer takes the package tokenizers."""
    is_file = Path(name).is_file()
    if format == "titan" or (format == "meta" and (is_file or name == BUILT_IN)):
        return False
    if Path(name).suffix != ".model":
        return True
    try:
        return isinstance(load_tokenizer(name), RankTokenizer)
    except ConfigError:  # SentencePiece: copied unchanged
        return False


def copy_complete(name: str | None, folder: Path) -> None:
    """Copy a tokenizer's files unchanged; write those of a built-in tokenizer or one of the hub."""
    if name is not None and copy_files(name, folder) == BUILT_IN:
        tokenizer = load_tokenizer(name)
        tokenizer.name = "tokenizer.model"  # `save` writes no file for a built-in name
        (folder / tokenizer.save(folder)).rename(folder / "tokenizer.model")
    elif name is not None and not Path(name).is_file():
        load_tokenizer(name).save(folder)


def copy_as_json(name: str | None, folder: Path) -> tuple[int | None, int | None]:
    """Write a tokenizer as tokenizer.json and tokenizer_config.json; a rank file is also copied unchanged.

    A tokenizer that titan can't read (SentencePiece) is copied unchanged.

    Args:
        name: the argument of `load_tokenizer`; None: there is no tokenizer.

    Returns:
        The ids that begin and end a document.
    """
    if name is None:
        return None, None
    copy_files(name, folder)
    try:
        tokenizer = load_tokenizer(name)
    except ConfigError:
        if not Path(name).is_file():  # a repository of the hub, which must exist
            raise
        return None, None
    if isinstance(tokenizer, RankTokenizer):
        (folder / "tokenizer.json").write_text(build_tokenizer_json(tokenizer), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(_build_config(tokenizer), indent=2) + "\n")
    else:
        if not Path(name).is_file():
            tokenizer.save(folder)
        _set_class(folder / "tokenizer_config.json")
    return tokenizer.bos, tokenizer.eos


def _set_class(file: Path) -> None:
    """Set the class with which transformers reads tokenizer.json, unless it is set."""
    config = load_json(file, str(file.parent)) if file.is_file() else {}
    file.write_text(json.dumps({"tokenizer_class": _CLASS, **config}, indent=2) + "\n")


def _build_config(tokenizer: RankTokenizer) -> dict[str, Any]:
    names = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    tokens = {key: tokenizer.decode([i]) for key, i in names.items() if i is not None}
    return {"tokenizer_class": _CLASS, **tokens, "clean_up_tokenization_spaces": False}


def build_tokenizer_json(tokenizer: RankTokenizer) -> str:
    """Return the tokenizer.json that gives the same ids as a rank file.

    tiktoken merges two neighbours whenever they form a token, that of the lowest rank first, and uses a piece that is a
    token directly. So each split of a token into two tokens is a merge, in the order of ranks, and `ignore_merges` is
    set. Text begins with bos if the tokenizer has one, as with Llama 3.
    """
    tokenizers = import_optional("tokenizers", f"tokenizer={tokenizer.name}")
    from tokenizers import decoders, models, pre_tokenizers, processors

    ranks, letters = tokenizer.ranks, _map_bytes()
    spellings = {token: "".join(letters[byte] for byte in token) for token in ranks}
    order = sorted(ranks, key=lambda token: ranks[token])
    vocabulary = {spellings[token]: ranks[token] for token in order}
    merges = [
        (spellings[token[:i]], spellings[token[i:]])
        for token in order
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    out = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    out.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in tokenizer.special])
    if tokenizer.bos is not None:
        first = tokenizer.decode([tokenizer.bos])
        out.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokenizer.bos)]
        )
    return str(out.to_str())


def _map_bytes() -> list[str]:
    """Return the character for each byte in byte-level BPE: the byte itself if printable, else from U+0100."""
    printable = set(chain(range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1)))
    spare_codes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare_codes)) for byte in range(256)]
