"""Prepared data that lie elsewhere: a folder of the cache stands for them, and files come to it when first read.

Any file system that fsspec knows can hold them (s3://, gs://, https://, file://, ...): what `titan.prepare` made,
copied there as it is. A corpus never changes, so that a file that is here needs no look at the one there; another
corpus at the same URL is another folder here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan.console.text import redact
from titan.dataset.documents import content_digest
from titan.errors import ConfigError, RunError
from titan.files.atomic import atomic_file
from titan.files.leases import remove_leftovers, temporary
from titan.files.untrusted import check, file_name, parse_object

ORIGIN = "origin.json"
"""In a folder of the cache: where its files come from."""
_CHUNK = 16 * 2**20
_WHOLE: dict[str, str] = {}
"""URLs with their secrets, which only this process knows, by what is written down of them."""


def mirror(url: str, cache: Path, keep_gib: float | None = None) -> Path:
    """The folder of the cache that stands for the prepared data at `url`, with all but the shards in it.

    Args:
        url: a folder with a manifest.json, as fsspec names it.
        cache: where prepared data are kept.
        keep_gib: how much of the shards is kept here; what was fetched first goes first. None: all.

    Raises:
        ConfigError: when nothing of the kind is there.
    """
    url = url.rstrip("/")
    know(url)
    try:
        with _reading(url, "manifest.json") as source:
            manifest = source.read()
        content = parse_object(manifest)
        folder = cache / "remote" / content_digest(redact(url), content["digest"])[:20]
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _write(folder / ORIGIN, [json.dumps({"url": redact(url), "keep_gib": keep_gib}).encode()])
        tokenizer = content["tokenizer"].get("file")
        for name in ("token_bytes.npy", *([file_name(tokenizer)] if tokenizer else [])):
            if not (folder / name).exists():
                _download(url, folder, name)
        with contextlib.suppress(OSError):  # there is one beside some tokenizer.json
            _download(url, folder, "tokenizer_config.json")
        _write(folder / "manifest.json", [manifest])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"dataset.path={url}: no prepared data can be read there ({type(error).__name__}: {error}); "
            "give the folder or the URL that holds manifest.json."
        ) from error
    return folder


def know(url: str) -> None:
    """Let this process fetch from a URL whose secrets are not written down."""
    _WHOLE[redact(url.rstrip("/"))] = url.rstrip("/")


def elsewhere(path: Path) -> bool:
    """Whether a shard's file can be fetched."""
    return (path.parent / ORIGIN).is_file()


def fetch(path: Path) -> None:
    """Bring a shard's file into its folder, when the folder stands for one elsewhere; else do nothing.

    Raises:
        RunError: when it can't be read there.
    """
    origin = path.parent / ORIGIN
    if not origin.is_file():
        return
    about = _origin(origin)
    try:
        _download(_WHOLE.get(about["url"], about["url"]), path.parent, path.name)
    except OSError as error:
        raise RunError(
            f"{about['url']}/{path.name}: can't be fetched ({error}); mend the connection, and resume."
        ) from error
    if about["keep_gib"] is not None:
        _make_room(path, about["keep_gib"] * 2**30)


def _origin(file: Path) -> dict[str, Any]:
    """What a folder of the cache says of where its files come from.

    Raises:
        RunError: when it is damaged.
    """
    try:
        found = parse_object(file.read_bytes())
        check(found["url"], str, "url")
        check(found["keep_gib"], float | None, "keep_gib")
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{file}: is damaged ({error}); remove its folder, and resume.") from error
    return found


def _download(url: str, folder: Path, name: str) -> Path:
    with _reading(url, name) as source:
        return _write(folder / name, iter(lambda: source.read(_CHUNK), b""))


@contextmanager
def _reading(url: str, name: str) -> Iterator[Any]:
    """A file at `url`, open; whatever its file system raises becomes an OSError."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"dataset.path={url}: needs the package fsspec: pip install fsspec.") from error
    try:
        with fsspec.open(f"{url}/{name}", "rb") as file:
            yield file
    except (OSError, ConfigError):
        raise
    except Exception as error:  # of a protocol's own package, or that there is no such protocol or package
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _write(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a file whole or not at all; several processes may do so at once."""
    with atomic_file(path, temporary=temporary(path)) as file:
        for piece in pieces:
            file.write(piece)
    return path


def _make_room(kept: Path, most: float) -> None:
    """Remove the shards' files that came first, until the rest takes at most `most` bytes; not the one just `kept`."""
    files = [(f.stat(), f) for f in kept.parent.glob("*-*.*") if f != kept and not f.name.startswith(".")]
    total = kept.stat().st_size + sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size
