"""Train a byte-level BPE vocabulary: `python -m titan.dataset.tokenizers.train [PATH ...] to=OUT.tiktoken`.

Text is split by Llama 3's pattern, pairs of bytes are merged by frequency (Sennrich et al. 2016, on bytes), and the
result is written as a tiktoken rank file. The built-in titan4k was trained this way on the standard library's sources:
4,095 ranks and the end-of-text token, 4,096 ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file
from titan.config.settings import MISSING, setting
from titan.console.progress import print_table
from titan.console.text import sanitize_line
from titan.dataset.documents import Source
from titan.dataset.sources import local
from titan.dataset.sources.files import describe_selection
from titan.dataset.tokenizers.load import PATTERN, cut_spaces, write_ranks
from titan.errors import ConfigError, RunError

MAX_RANKS = 10**7
"""The largest vocabulary."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.dataset.tokenizers.train`."""

    paths: tuple[str, ...] = operand("PATH", "files, folders or globs; without any, the standard library", ())
    to: str = setting(MISSING, "the rank file to write, *.tiktoken")
    field: str | None = setting(
        None, "the key or column that holds the text in .jsonl and .parquet files; null: text files only"
    )
    ranks: int = setting(4095, "number of tokens", at_least=1, at_most=MAX_RANKS)


COMMAND = Command(
    "titan.dataset.tokenizers.train",
    "Train a tokenizer's vocabulary on text.",
    {
        "corpus/ to=my.tiktoken ranks=8191": "then: dataset.tokenizer=my.tiktoken model.vocab=8192",
        "corpus/ to=my.tiktoken field=text": "its .jsonl and .parquet files too",
        "to=small.tiktoken ranks=511": "on the sources of the standard library",
    },
    Settings,
)


def train_vocabulary(texts: Iterable[str], ranks: int) -> list[bytes]:
    """Train a vocabulary of `ranks` tokens and return them in the order of their ranks; deterministic."""
    if ranks < 256:
        raise ConfigError(f"ranks={ranks}: the 256 single bytes are always included; give 256 or more.")
    vocabulary = _learn_merges(chain.from_iterable(map(cut_spaces, texts)), ranks)
    if len(vocabulary) < ranks:
        raise ConfigError(
            f"ranks={ranks}: the text yields only {len(vocabulary)} tokens; give more text or fewer ranks."
        )
    byte_of = {character: byte for byte, character in enumerate(list_byte_characters())}
    ordered = sorted(vocabulary, key=lambda token: vocabulary[token])
    return [bytes(byte_of[character] for character in token) for token in ordered]


def list_byte_characters() -> list[str]:
    """Return the character for each byte in byte-level BPE (GPT-2): the byte itself if printable, else from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def _learn_merges(texts: Iterable[str], ranks: int) -> dict[str, int]:
    """Return byte-level tokens and their ids from the `tokenizers` library's trainer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    trainer = trainers.BpeTrainer(vocab_size=ranks, initial_alphabet=list_byte_characters(), show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return backend.get_vocab()


def _open_sources(path: str | None, field: str | None) -> Sequence[Source]:
    """Return the sources of the text at a path, or of the standard library's, and print what is read and left out."""
    sources: Sequence[Source]
    if path is None:
        sources = [local.build_stdlib_source()]
    elif field is None:
        way_out = "field=KEY, the key or column of the text"
        sources = [local.TextSource("text", local.find_texts(path, way_out), has_passages=True)]
    else:
        sources = local.build_field_sources(path, field)
    parts = [part for source in sources for part in source.parts()]
    print(sanitize_line(path or "the standard library"))
    print_table(describe_selection(path, parts))
    return sources


def _train_file(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    out = check_output_file(settings.to, (".tiktoken",))
    sources = list(chain.from_iterable(_open_sources(path, settings.field) for path in settings.paths or (None,)))
    try:
        documents = (document for source in sources for part in source.parts() for document in source.documents(part))
        tokens = train_vocabulary((text for text in documents if isinstance(text, str)), settings.ranks)
        write_ranks(out, tokens)
    except ConfigError as error:
        raise ConfigError(str(error).replace("dataset.field", "field")) from error
    except OSError as error:
        raise RunError(f"to={out}: can't be written ({error.strerror}).") from error
    print(f"{out}: {len(tokens):,} tokens; use it as dataset.tokenizer={out} model.vocab={len(tokens) + 1}")
    return 0


main, cli = COMMAND.bind(_train_file)

if __name__ == "__main__":
    cli()
