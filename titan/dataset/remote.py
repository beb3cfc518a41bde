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

from titan.config.optional import import_fsspec
from titan.console.text import redact
from titan.dataset.documents import content_digest
from titan.errors import ConfigError, RunError
from titan.files.atomic import atomic_file
from titan.files.leases import remove_leftovers, temporary_path
from titan.files.untrusted import check_file_name, check_type, parse_object

ORIGIN = "origin.json"
"""The file in a mirror that names its URL."""
_CHUNK = 16 * 2**20
_FULL_URLS: dict[str, str] = {}
"""URLs with credentials, by their redacted form: credentials are never written to disk."""


def mirror_folder(url: str, cache: Path, keep_gib: float | None = None) -> Path:
    """Return the folder of the cache that mirrors the prepared data at `url`, with all files but the shards.

    Args:
        url: the fsspec URL of a folder with a manifest.json.
        keep_gib: the maximum size of the shards kept locally, in GiB; the oldest are removed first. None: unlimited.
    """
    url = url.rstrip("/")
    shown = register_url(url)
    try:
        with _open_remote(url, "manifest.json") as source:
            manifest = source.read()
        content = parse_object(manifest)
        folder = cache / "remote" / content_digest(shown, content["digest"])[:20]
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _write_file(folder / ORIGIN, [json.dumps({"url": shown, "keep_gib": keep_gib}).encode()])
        tokenizer = content["tokenizer"].get("file")
        for name in ("token_bytes.npy", *([check_file_name(tokenizer)] if tokenizer else [])):
            if not (folder / name).exists():
                _download_file(url, folder, name)
        with contextlib.suppress(OSError):  # only some tokenizers have one
            _download_file(url, folder, "tokenizer_config.json")
        _write_file(folder / "manifest.json", [manifest])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"dataset.path={url}: can't read prepared data ({type(error).__name__}: {error}); "
            "give the folder or the URL that holds manifest.json."
        ) from error
    return folder


def register_url(url: str) -> str:
    """Register a URL with its credentials in this process, for later fetches; return it without them."""
    shown = redact(url.rstrip("/"))
    _FULL_URLS[shown] = url.rstrip("/")
    return shown


def fetch_file(path: Path) -> None:
    """Fetch a shard's file into its folder if the folder mirrors a URL; otherwise do nothing."""
    origin_file = path.parent / ORIGIN
    if not origin_file.is_file():
        return
    origin = _read_origin(origin_file)
    try:
        _download_file(_FULL_URLS.get(origin["url"], origin["url"]), path.parent, path.name)
    except OSError as error:
        raise RunError(
            f"{origin['url']}/{path.name}: can't be fetched ({error}); check the connection, then resume."
        ) from error
    if origin["keep_gib"] is not None:
        _evict_oldest(path, origin["keep_gib"] * 2**30)


def _read_origin(file: Path) -> dict[str, Any]:
    """Read a mirror's URL and size limit."""
    try:
        origin = parse_object(file.read_bytes())
        check_type(origin["url"], str, "url")
        check_type(origin["keep_gib"], float | None, "keep_gib")
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{file}: is corrupt ({error}); remove its folder, then resume.") from error
    return origin


def _download_file(url: str, folder: Path, name: str) -> Path:
    with _open_remote(url, name) as source:
        return _write_file(folder / name, iter(lambda: source.read(_CHUNK), b""))


@contextmanager
def _open_remote(url: str, name: str) -> Iterator[Any]:
    """Open a file at `url`; every error of its file system becomes an OSError."""
    fsspec = import_fsspec(f"dataset.path={url}")
    try:
        with fsspec.open(f"{url}/{name}", "rb") as file:
            yield file
    except ConfigError:
        raise
    except Exception as error:  # each protocol's package has its own errors
        if isinstance(error, OSError) and error.__cause__ is None:
            raise
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _write_file(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a file atomically; several processes and machines may do so at once."""
    with atomic_file(path, temporary=temporary_path(path)) as file:
        for piece in pieces:
            file.write(piece)
    return path


def _evict_oldest(fetched_file: Path, max_bytes: float) -> None:
    """Remove the oldest shard files until the rest takes at most `max_bytes` bytes, but not `fetched_file`."""
    files = [
        (f.stat(), f) for f in fetched_file.parent.glob("*-*.*") if f != fetched_file and not f.name.startswith(".")
    ]
    total = fetched_file.stat().st_size + sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if total <= max_bytes:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size
