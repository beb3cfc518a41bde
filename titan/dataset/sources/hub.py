"""Datasets of the `datasets` library: of Hugging Face's hub, or folders in the same formats.

Rows of the hub and of folders of files are streamed, one part per data shard; folders of `save_to_disk` are read in
ranges of rows. A dataset of the hub is identified by the commit of its revision, a folder by its files. A dataset's own
code is never run.
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

from titan.config.optional import import_optional
from titan.console.text import format_error
from titan.dataset.documents import Source, SourcePart
from titan.dataset.sources import files
from titan.dataset.sources.files import BadDocumentError
from titan.dataset.sources.records import (
    RowSource,
    TableRow,
    TextField,
    convert_rows,
    describe_missing_column,
)
from titan.errors import ConfigError

_PART_ROWS = 16_384
_BATCH_ROWS = 256
_COMMIT = re.compile(r"[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def build_hub_source(
    name: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    field: str = "text",
    on_error: str = "refuse",
) -> Source:
    """Return the source of the texts in the column `field` of a dataset's split."""
    is_folder = Path(name).expanduser().is_dir()
    return HubSource(
        name="hub" if is_folder else re.sub(r"[^\w.-]", "-", name.rpartition("/")[2]),
        row_format=TextField(field),
        on_error=on_error,
        dataset=name,
        subset=subset,
        split=split,
        revision=revision,
    )


@dataclass(kw_only=True)
class HubSource(RowSource):
    """The rows of a dataset of the `datasets` library.

    Attributes:
        dataset: its name on the hub, or a folder.
        subset: its configuration; None: the only one.
        split: which of its splits.
        revision: a branch, tag or commit of the hub; None: main.
    """

    dataset: str
    subset: str | None
    split: str
    revision: str | None

    @property
    def folder(self) -> Path | None:
        """The folder; None for a dataset of the hub."""
        path = Path(self.dataset).expanduser()
        return path if path.is_dir() else None

    @functools.cached_property
    def commit(self) -> str:
        """The commit of the revision.

        Raises:
            ConfigError: when there is no such dataset or revision, it is gated, or the hub can't be reached.
        """
        if self.revision and _COMMIT.fullmatch(self.revision):
            return self.revision
        api = import_optional("huggingface_hub", "dataset=hub").HfApi()
        try:
            return str(api.dataset_info(self.dataset, revision=self.revision).sha)
        except Exception as error:
            raise translate_hub_error(
                error, f"dataset.name={self.dataset}", f"dataset.revision={self.revision}"
            ) from error

    def parts(self) -> list[SourcePart]:
        """Return the data shards, or ranges of rows."""
        return self._parts

    @functools.cached_property
    def _parts(self) -> list[SourcePart]:
        data, name = self._data, f"{self.dataset} {self.split}"
        if not self._is_saved:
            count = data.num_shards if hasattr(data, "num_shards") else data.n_shards  # before datasets 3.1
            return [SourcePart(f"{name}, shard {i + 1} of {count}", 0, (i, count)) for i in range(count)]
        if not len(data):
            raise ConfigError(f"dataset.split={self.split}: {self.dataset} has no rows; choose another split.")
        return [SourcePart(f"{name} from row {i}", 0, (i, i + _PART_ROWS)) for i in range(0, len(data), _PART_ROWS)]

    def compute_digests(self, memo: Path | None) -> list[str]:
        """Return the commit, or the folder's file names and digests; the subset, the split and the columns."""
        selection = [str(self.subset), self.split, *self.row_format.columns]
        if self.folder is None:
            return [self.dataset, self.commit, *selection]
        paths = files.walk_files(self.folder, files.is_hidden)
        names = [file.relative_to(self.folder).as_posix() for file in paths]
        return [*names, *files.compute_digests([files.build_local_file(file) for file in paths], memo), *selection]

    def read_rows(self, part: SourcePart) -> Iterator[tuple[str, TableRow | BadDocumentError]]:
        """Yield the rows of a part."""
        first, last = part.location
        number = first if self._is_saved else 0
        location = f"{self.dataset} {self.split}" if self._is_saved else part.name
        try:
            data = self._data
            rows = data.select(range(first, min(last, len(data)))) if self._is_saved else data.shard(last, first)
            # Arrow tables are much faster than the library's dictionaries
            for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
                for row in convert_rows(table):
                    yield f"{location}, row {number}", row
                    number += 1
        except Exception as error:
            if not _is_broken(error):
                raise translate_hub_error(error, f"dataset.name={self.dataset}", part.name) from error
            way_out = "fetch it again, or give dataset.on_error=skip to use the content before it."
            cause = format_error(error.__cause__ or error) or type(error).__name__
            yield part.name, BadDocumentError("broken file", f"a file is broken or truncated ({cause}); {way_out}")

    @property
    def _is_saved(self) -> bool:
        folder = self.folder
        return bool(folder and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_data"}

    @functools.cached_property
    def _data(self) -> Any:
        """The dataset with only the columns to read; not pickled."""
        datasets = import_optional("datasets", "dataset=hub")
        try:
            if self._is_saved:
                data = self._load_from_disk(datasets)
            else:
                name, revision = (self.dataset, self.commit) if self.folder is None else (str(self.folder), None)
                data = datasets.load_dataset(name, self.subset, split=self.split, revision=revision, streaming=True)
            column_names = self._list_columns(data)
        except ConfigError:
            raise
        except Exception as error:
            raise self._translate_open_error(error) from error
        if not column_names:
            raise ConfigError(f"dataset.split={self.split}: {self.dataset} has no rows; choose another split.")
        for column in self.row_format.columns:
            if column not in column_names:
                raise ConfigError(describe_missing_column(f"dataset.name={self.dataset}", column, column_names))
        return data.select_columns(list(self.row_format.columns))

    def _list_columns(self, data: Any) -> list[str]:
        """Return the columns' names, from the first row if the dataset doesn't list them."""
        try:
            return data.column_names or list(next(iter(data), {}))
        except Exception as error:
            if _is_broken(error):  # `read_rows` reports or skips it
                return list(self.row_format.columns)
            raise

    def _load_from_disk(self, datasets: Any) -> Any:
        folder = self.folder or Path()
        index = folder / "dataset_dict.json"
        if not index.is_file():
            return datasets.load_from_disk(str(folder))
        splits = json.loads(index.read_bytes())["splits"]
        if self.split not in splits:
            raise ConfigError(self._describe_missing_split(", ".join(splits)))
        return datasets.load_from_disk(str(folder / self.split))  # only this split: empty ones can't be loaded

    def _describe_missing_split(self, splits: str) -> str:
        return f"dataset.split={self.split}: {self.dataset} has no such split (its splits: {splits}); choose another."

    def _translate_open_error(self, error: Exception) -> ConfigError:
        """Translate the library's error of a dataset that can't be opened."""
        text = format_error(error)
        if isinstance(error, (StopIteration, IndexError)):  # the library raises them for an empty dataset
            return ConfigError(f"dataset.split={self.split}: {self.dataset} has no rows; choose another split.")
        match = re.search(r"[Aa]vailable(?: splits| configs)?: ?\[?([^\]]*)", text)
        choices = match[1].replace("'", "") if match else ""
        if "split" in text.lower() and ("Bad split" in text or "Unknown split" in text):
            return ConfigError(self._describe_missing_split(choices or text))
        if "BuilderConfig" in text or "Config name is missing" in text or "Please pick one among" in text:
            subset = "null" if self.subset is None else self.subset
            hint = f"its subsets: {choices}" if choices else text
            return ConfigError(f"dataset.subset={subset}: {self.dataset} has no such subset ({hint}); choose another.")
        if _is_broken(error):
            return ConfigError(
                f"dataset.name={self.dataset}: can't be read ({text}); fetch it again or choose another."
            )
        return translate_hub_error(error, f"dataset.name={self.dataset}", f"dataset.revision={self.revision}")


def translate_hub_error(error: Exception, setting: str, revision: str) -> ConfigError:
    """Translate an error of the hub or of the network into a ConfigError.

    Args:
        setting: the user's setting, such as `dataset.name=x`.
        revision: the same for the revision.
    """
    kinds = {kind.__name__ for cause in _iterate_causes(error) for kind in type(cause).__mro__}
    name = (setting.partition("=")[2] or setting).partition("@")[0]
    if "GatedRepoError" in kinds or "is a gated" in str(error):
        return ConfigError(f"{setting}: {name} is gated; ask for access on its page of the hub, then {LOG_IN}.")
    if "RevisionNotFoundError" in kinds:
        return ConfigError(f"{revision}: {name} has no such revision; give one of its branches, tags or commits.")
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"}:
        return ConfigError(
            f"{setting}: there is no such folder, and no such repository on the hub; if it is private, {LOG_IN}."
        )
    if kinds & {"DataFilesNotFoundError", "EmptyDatasetError"}:
        return ConfigError(f"{setting}: has no data files; choose another dataset.")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(f"{setting}: the hub denies access ({status}); {LOG_IN}.")
    if status is None and kinds & {"OSError", "HTTPError", "TimeoutError", "OfflineModeIsEnabled"}:
        reason = f"{type(error).__name__}: {format_error(error)}"
        return ConfigError(
            f"{setting}: the hub can't be reached ({reason}); check the network, or fetch it on another machine."
        )
    return ConfigError(f"{setting}: {type(error).__name__}: {format_error(error)}; fix this, or choose another.")


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_broken(error: Exception) -> bool:
    """Return whether the data are corrupt (and not the network at fault)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (EOFError, zlib.error, UnicodeDecodeError)) or bool(
        kinds
        & {"BadGzipFile", "ArrowInvalid", "ArrowException", "DatasetGenerationError", "JSONDecodeError", "ZstdError"}
    )


def fetch_tokenizer(name: str) -> Path:
    """Fetch the tokenizer.json of `name` (OWNER/NAME or OWNER/NAME@REVISION) and its tokenizer_config.json.

    Both are fetched with the user's login into the cache of `huggingface_hub`, which also works without a network.
    """
    hub = import_optional("huggingface_hub", f"dataset.tokenizer={name}")
    repository, _, revision = name.partition("@")
    try:
        file = Path(hub.hf_hub_download(repository, "tokenizer.json", revision=revision or None))
        _fetch_config(hub, repository, file.parent.name)
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "RemoteEntryNotFoundError" in kinds or kinds >= {"EntryNotFoundError", "HfHubHTTPError"}:
            raise ConfigError(
                f"dataset.tokenizer={name}: it has no tokenizer.json; give a file, or another model's name."
            ) from error
        raise translate_hub_error(error, f"dataset.tokenizer={name}", f"dataset.tokenizer={name}") from error
    return file


def _fetch_config(hub: Any, repository: str, commit: str) -> None:
    """Fetch tokenizer_config.json of the same commit, if there is one."""
    name = "tokenizer_config.json"
    if hub.try_to_load_from_cache(repository, name, revision=commit) is not None:
        return  # it is cached, or known to be absent
    try:
        hub.hf_hub_download(repository, name, revision=commit)
    except hub.errors.LocalEntryNotFoundError:  # the hub can't be reached: the file may exist
        raise
    except hub.errors.EntryNotFoundError:
        return
