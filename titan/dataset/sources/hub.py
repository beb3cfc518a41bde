"""Datasets of the `datasets` library: of Hugging Face's hub, or folders in the same formats.

From the hub and from folders of files rows are streamed, a part a data shard. What `save_to_disk` wrote is read in
ranges of rows. A dataset of the hub is told by the commit that its revision resolves to, a folder by its files. Code
that comes with a dataset is never run.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.config.optional import optional_package
from titan.console.text import as_line
from titan.dataset.documents import Part, Source
from titan.dataset.sources import files
from titan.dataset.sources.files import Bad
from titan.dataset.sources.records import Field, Reader, Row, Rows, no_column, plain_rows
from titan.errors import ConfigError

_PART_ROWS = 16_384
_BATCH_ROWS = 256
_COMMIT = re.compile(r"[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def hub(
    name: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    field: str = "text",
    on_error: str = "refuse",
) -> Source:
    """The texts under `field` of a dataset's split."""
    reader = Hub(name, subset, split, revision, (field,))
    word = "hub" if reader.folder else re.sub(r"[^\w.-]", "-", name.rpartition("/")[2])
    return Rows(word, reader, Field(field), on_error)


@dataclass(frozen=True)
class Hub(Reader):
    """The rows of a dataset of the `datasets` library.

    Attributes:
        name: its name on the hub, or a folder.
        subset: its configuration; None: the only one.
        split: which of its splits.
        revision: a branch, tag or commit of the hub; None: main.
        columns: what is read of a row.
    """

    name: str
    subset: str | None
    split: str
    revision: str | None
    columns: tuple[str, ...]

    @property
    def folder(self) -> Path | None:
        """The folder, unless it is on the hub."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None

    @functools.cached_property
    def commit(self) -> str:
        """The commit that the revision resolves to.

        Raises:
            ConfigError: when there is no such dataset or revision, it is gated, or the hub can't be reached.
        """
        if self.revision and _COMMIT.fullmatch(self.revision):
            return self.revision
        api = optional_package("huggingface_hub", "dataset=hub").HfApi()
        try:
            return str(api.dataset_info(self.name, revision=self.revision).sha)
        except Exception as error:
            raise refusal(error, f"dataset.name={self.name}", f"dataset.revision={self.revision}") from error

    def parts(self) -> list[Part]:
        """The data shards, or ranges of rows."""
        return self._parts

    @functools.cached_property
    def _parts(self) -> list[Part]:
        data, name = self._data, f"{self.name} {self.split}"
        if not self._saved:
            count = data.num_shards if hasattr(data, "num_shards") else data.n_shards  # before datasets 3.1
            return [Part(f"{name}, shard {i + 1} of {count}", 0, (i, count)) for i in range(count)]
        if not len(data):
            raise ConfigError(f"dataset.split={self.split}: {self.name} has no rows in it; name another split.")
        return [Part(f"{name} from row {i}", 0, (i, i + _PART_ROWS)) for i in range(0, len(data), _PART_ROWS)]

    def digests(self, memo: Path | None) -> list[str]:
        """The commit, or the files of the folder with their names; the subset, the split and the columns."""
        about = [str(self.subset), self.split, *self.columns]
        if self.folder is None:
            return [self.name, self.commit, *about]
        found = files.walk(self.folder, files.is_hidden)
        names = [file.relative_to(self.folder).as_posix() for file in found]
        return [*names, *files.digests([files.local(file) for file in found], memo), *about]

    def rows(self, part: Part) -> Iterator[tuple[str, Row | Bad]]:
        """The rows of a part."""
        first, last = part.place
        number = first if self._saved else 0
        where = f"{self.name} {self.split}" if self._saved else part.name
        try:
            for table in self._tables(first, last):
                for row in plain_rows(table):
                    yield f"{where}, row {number}", row
                    number += 1
        except Exception as error:
            if not _is_broken(error):
                raise refusal(error, f"dataset.name={self.name}", part.name) from error
            way_out = "fetch it again, or give dataset.on_error=skip to use what comes before."
            cause = as_line(error.__cause__ or error) or type(error).__name__
            yield part.name, Bad("broken file", f"a file is broken or truncated ({cause}); {way_out}")

    def _tables(self, first: int, last: int) -> Iterator[Any]:
        """The rows of a part as Arrow tables, which are much faster than the library's dictionaries."""
        saved, data = self._saved, self._data
        rows = data.select(range(first, min(last, len(data)))) if saved else data.shard(last, first)
        tables: Iterator[Any] = rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)
        return tables

    @property
    def _saved(self) -> bool:
        folder = self.folder
        return bool(folder and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_data"}

    @functools.cached_property
    def _data(self) -> Any:
        """The dataset, only its columns; not pickled."""
        datasets = optional_package("datasets", "dataset=hub")
        try:
            data = self._disk(datasets) if self._saved else self._stream(datasets)
            known = self._known(data)
        except ConfigError:
            raise
        except Exception as error:
            raise self._refusal(error) from error
        if not known:
            raise ConfigError(f"dataset.split={self.split}: {self.name} has no rows in it; name another split.")
        for column in self.columns:
            if column not in known:
                raise ConfigError(no_column(f"dataset.name={self.name}", column, known))
        return data.select_columns(list(self.columns))

    def _known(self, data: Any) -> list[str]:
        """The columns' names, of the first row if need be."""
        try:
            return data.column_names or list(next(iter(data), {}))
        except Exception as error:
            if _is_broken(error):  # which reading tells, or skips
                return list(self.columns)
            raise

    def _disk(self, datasets: Any) -> Any:
        folder = self.folder or Path()
        index = folder / "dataset_dict.json"
        if not index.is_file():
            return datasets.load_from_disk(str(folder))
        splits = json.loads(index.read_bytes())["splits"]
        if self.split not in splits:
            raise ConfigError(self._no_split(", ".join(splits)))
        return datasets.load_from_disk(str(folder / self.split))  # alone: an empty one beside it can't be loaded

    def _stream(self, datasets: Any) -> Any:
        name, revision = (self.name, self.commit) if self.folder is None else (str(self.folder), None)
        return datasets.load_dataset(name, self.subset, split=self.split, revision=revision, streaming=True)

    def _no_split(self, known: str) -> str:
        return f"dataset.split={self.split}: {self.name} has no such split (its splits: {known}); name another."

    def _refusal(self, error: Exception) -> ConfigError:
        """What the library says of a dataset that can't be opened."""
        text = as_line(error)
        if isinstance(error, (StopIteration, IndexError)):  # the library's ways of saying that there are no rows
            return ConfigError(f"dataset.split={self.split}: {self.name} has no rows in it; name another split.")
        known = re.search(r"[Aa]vailable(?: splits| configs)?: ?\[?([^\]]*)", text)
        choices = known[1].replace("'", "") if known else ""
        if "split" in text.lower() and ("Bad split" in text or "Unknown split" in text):
            return ConfigError(self._no_split(choices or text))
        if "BuilderConfig" in text or "Config name is missing" in text or "Please pick one among" in text:
            subset = "null" if self.subset is None else self.subset
            hint = f"its subsets: {choices}" if choices else text
            return ConfigError(f"dataset.subset={subset}: {self.name} has no such subset ({hint}); name another.")
        if _is_broken(error):
            return ConfigError(f"dataset.name={self.name}: can't be read ({text}); fetch it again or name another.")
        return refusal(error, f"dataset.name={self.name}", f"dataset.revision={self.revision}")


def refusal(error: Exception, setting: str, revision: str) -> ConfigError:
    """A sentence for what the hub says, or for its silence.

    Args:
        error: of `huggingface_hub`, of `datasets` or of the network.
        setting: what the user gave, as `dataset.name=x`.
        revision: the same for the revision.
    """
    kinds = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    name = setting.partition("=")[2].partition("@")[0]
    if "GatedRepoError" in kinds or "is a gated" in str(error):
        return ConfigError(f"{setting}: {name} is gated; ask for access on its page of the hub, then {LOG_IN}.")
    if "RevisionNotFoundError" in kinds:
        return ConfigError(f"{revision}: {name} has no such revision; name a branch, a tag or a commit of it.")
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"}:
        return ConfigError(
            f"{setting}: there is no such folder, and nothing of that name on the hub; if it is private, {LOG_IN}."
        )
    if kinds & {"DataFilesNotFoundError", "EmptyDatasetError"}:
        return ConfigError(f"{setting}: no data files are there; name another dataset.")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(f"{setting}: the hub gives no access ({status}); {LOG_IN}.")
    if status is None and kinds & {"OSError", "HTTPError", "TimeoutError", "OfflineModeIsEnabled"}:
        what = f"{type(error).__name__}: {as_line(error)}"
        return ConfigError(
            f"{setting}: the hub can't be reached ({what}); check the network, or fetch it where there is one."
        )
    return ConfigError(f"{setting}: {type(error).__name__}: {as_line(error)}; name another, or mend what it says.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_broken(error: Exception) -> bool:
    """Whether it is the data's fault and not the network's."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (EOFError, zlib.error, UnicodeDecodeError)) or bool(
        kinds
        & {"BadGzipFile", "ArrowInvalid", "ArrowException", "DatasetGenerationError", "JSONDecodeError", "ZstdError"}
    )


def fetch(name: str) -> Path:
    """The tokenizer.json of `name` (OWNER/NAME or OWNER/NAME@REVISION), with its tokenizer_config.json beside it.

    Both are fetched with the user's login and kept by `huggingface_hub`, whose cache serves without a network too.

    Raises:
        ConfigError: when it can't be had.
    """
    hub = optional_package("huggingface_hub", f"dataset.tokenizer={name}")
    repository, _, revision = name.partition("@")
    try:
        file = Path(hub.hf_hub_download(repository, "tokenizer.json", revision=revision or None))
        _fetch_config(hub, repository, file.parent.name)
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "RemoteEntryNotFoundError" in kinds or kinds >= {"EntryNotFoundError", "HfHubHTTPError"}:
            raise ConfigError(
                f"dataset.tokenizer={name}: it has no tokenizer.json; name a file, or another model's."
            ) from error
        raise refusal(error, f"dataset.tokenizer={name}", f"dataset.tokenizer={name}") from error
    return file


def _fetch_config(hub: Any, repository: str, commit: str) -> None:
    """Fetch tokenizer_config.json of the same commit, if there is one."""
    name = "tokenizer_config.json"
    if hub.try_to_load_from_cache(repository, name, revision=commit) is not None:
        return  # it is there, or known to be absent
    try:
        hub.hf_hub_download(repository, name, revision=commit)
    except hub.errors.LocalEntryNotFoundError:  # the hub can't be reached: it may be there
        raise
    except hub.errors.EntryNotFoundError:
        return
