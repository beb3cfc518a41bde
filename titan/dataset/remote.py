"""Prepared data at a URL: a folder of the cache mirrors them, and each file is fetched when it is first read.

Any file system of fsspec works (s3://, gs://, https://, file://, ...); copy the folder that `titan.prepare` made. A
corpus never changes, so a fetched file is never compared again; another corpus at the same URL gets another folder.
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
"""The file in a mirror that names its URL."""
_CHUNK = 16 * 2**20
_WHOLE: dict[str, str] = {}
"""URLs with credentials, by their redacted form: credentials are never written to disk."""


def mirror(url: str, cache: Path, keep_gib: float | None = None) -> Path:
    """Return the folder of the cache that mirrors the prepared data at `url`, with all files but the shards.

    Args:
        url: the fsspec URL of a folder with a manifest.json.
        cache: the cache's folder.
        keep_gib: the maximum size of the shards kept locally, in GiB; the oldest are removed first. None: unlimited.

    Raises:
        ConfigError: when no prepared data can be read there.
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
        with contextlib.suppress(OSError):  # only some tokenizers have one
            _download(url, folder, "tokenizer_config.json")
        _write(folder / "manifest.json", [manifest])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"dataset.path={url}: can't read prepared data ({type(error).__name__}: {error}); "
            "give the folder or the URL that holds manifest.json."
        ) from error
    return folder


def know(url: str) -> None:
    """Register a URL with its credentials in this process, for later fetches."""
    _WHOLE[redact(url.rstrip("/"))] = url.rstrip("/")


def elsewhere(path: Path) -> bool:
    """Return whether a shard's file can be fetched from a URL."""
    return (path.parent / ORIGIN).is_file()


def fetch(path: Path) -> None:
    """Fetch a shard's file into its folder if the folder mirrors a URL; otherwise do nothing.

    Raises:
        RunError: when the file can't be fetched.
    """
    origin = path.parent / ORIGIN
    if not origin.is_file():
        return
    about = _origin(origin)
    try:
        _download(_WHOLE.get(about["url"], about["url"]), path.parent, path.name)
    except OSError as error:
        raise RunError(
            f"{about['url']}/{path.name}: can't be fetched ({error}); check the connection, then resume."
        ) from error
    if about["keep_gib"] is not None:
        _make_room(path, about["keep_gib"] * 2**30)


def _origin(file: Path) -> dict[str, Any]:
    """Read a mirror's URL and size limit.

    Raises:
        RunError: when the file is corrupt.
    """
    try:
        found = parse_object(file.read_bytes())
        check(found["url"], str, "url")
        check(found["keep_gib"], float | None, "keep_gib")
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{file}: is corrupt ({error}); remove its folder, then resume.") from error
    return found


def _download(url: str, folder: Path, name: str) -> Path:
    with _reading(url, name) as source:
        return _write(folder / name, iter(lambda: source.read(_CHUNK), b""))


@contextmanager
def _reading(url: str, name: str) -> Iterator[Any]:
    """Open a file at `url`; every error of its file system becomes an OSError."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"dataset.path={url}: needs the package fsspec: pip install fsspec.") from error
    try:
        with fsspec.open(f"{url}/{name}", "rb") as file:
            yield file
    except (OSError, ConfigError):
        raise
    except Exception as error:  # each protocol's package has its own errors
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _write(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a file atomically; several processes and machines may do so at once."""
    with atomic_file(path, temporary=temporary(path)) as file:
        for piece in pieces:
            file.write(piece)
    return path


def _make_room(kept: Path, most: float) -> None:
    """Remove the oldest shard files until the rest takes at most `most` bytes, but not `kept`."""
    files = [(f.stat(), f) for f in kept.parent.glob("*-*.*") if f != kept and not f.name.startswith(".")]
    total = kept.stat().st_size + sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size
