"""Write a tokenizer's files next to weights: unchanged, or as the tokenizer.json that Hugging Face's libraries read."""

from __future__ import annotations

import json
import shutil
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


def copy_files(name: str | None, folder: Path) -> tuple[dict[str, ManifestFile], str | None]:
    """Copy a tokenizer's files unchanged.

    Args:
        name: the argument of `load_tokenizer`; None: there is no tokenizer.

    Returns:
        Size and checksum of the files by name, and the tokenizer's name there: the file's name, or that of a built-in
        tokenizer or one of the hub; None if its file is missing.
    """
    if name is None or not Path(name).is_file():
        return {}, name if name is not None and manifest.is_tokenizer(name, ()) else None
    source, files = Path(name), dict[str, ManifestFile]()
    for file in (source, *(source.with_name(extra_name) for extra_name in _BESIDE)):
        if file.is_file() and (file == source or source.suffix == ".json"):
            shutil.copyfile(file, folder / file.name)
            sync_path(folder / file.name)
            files[file.name] = manifest.checksum_file(folder / file.name)
    return files, source.name


def check_packages(name: str | None, format: str, label: str) -> None:
    """Raise ConfigError when a tokenizer can't be written in a format for lack of a package, before anything is."""
    if name is None or format == "titan" or (format == "meta" and (Path(name).is_file() or name == BUILT_IN)):
        return
    if Path(name).suffix == ".model":
        try:
            if not isinstance(load_tokenizer(name), RankTokenizer):
                return
        except ConfigError:  # SentencePiece: copied unchanged
            return
    import_optional("tokenizers", label, f"writing the tokenizer {Path(name).name}")


def write_complete(name: str | None, folder: Path) -> None:
    """Copy a tokenizer's files unchanged; write those of a built-in tokenizer or one of the hub."""
    if name is not None and copy_files(name, folder)[1] == BUILT_IN:
        tokenizer = load_tokenizer(name)
        tokenizer.name = "tokenizer.model"  # `save` writes no file for a built-in name
        (folder / tokenizer.save(folder)).rename(folder / "tokenizer.model")
    elif name is not None and not Path(name).is_file():
        load_tokenizer(name).save(folder)


def write_as_json(name: str | None, folder: Path) -> tuple[int | None, int | None]:
    """Write a tokenizer as tokenizer.json and tokenizer_config.json; a rank file is also copied unchanged.

    A tokenizer that titan can't read (SentencePiece) is copied unchanged.

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
        special = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
        tokens = {key: tokenizer.decode([i]) for key, i in special.items() if i is not None}
        config: dict[str, Any] = {"tokenizer_class": _CLASS, **tokens, "clean_up_tokenization_spaces": False}
    else:
        if not Path(name).is_file():
            tokenizer.save(folder)
        file = folder / "tokenizer_config.json"
        config = {"tokenizer_class": _CLASS, **(load_json(file, str(folder)) if file.is_file() else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer.bos, tokenizer.eos


def build_tokenizer_json(tokenizer: RankTokenizer) -> str:
    """Return the tokenizer.json that gives the same ids as a rank file.

    tiktoken merges two neighbours whenever they form a token, that of the lowest rank first, and uses a piece that is a
    token directly. So each split of a token into two tokens is a merge, in the order of ranks, and `ignore_merges` is
    set. Text begins with bos if the tokenizer has one, as with Llama 3.
    """
    tokenizers = import_optional("tokenizers", f"tokenizer={tokenizer.name}")
    from tokenizers import decoders, models, pre_tokenizers, processors

    # the character for each byte in byte-level BPE: the byte itself if printable, else from U+0100
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare_codes = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(spare_codes)) for byte in range(256)]
    ranks = tokenizer.ranks
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
