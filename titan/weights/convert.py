"""Convert weights from one format to another, as `titan.convert` does.

The target has a marker file while the conversion runs, and the file that makes the folder valid is written last. To
restart an interrupted conversion, rerun its command. Only files that a conversion wrote are replaced.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan.config.arguments import operand
from titan.config.command import CommandLine
from titan.config.settings import setting
from titan.console.numbers import format_bytes, format_plural
from titan.console.progress import open_bar, print_table
from titan.errors import ConfigError, RunError
from titan.files.atomic import write_atomic
from titan.files.run_directory import RUN
from titan.files.untrusted import read_regular_file
from titan.weights.origin import check_source

if TYPE_CHECKING:
    from titan.weights.interface import Weights

FORMAT_NAMES = {"TitanFormat": "titan", "HuggingFaceFormat": "Hugging Face", "MetaFormat": "Meta"}
MARK = ".titan-convert"
"""The marker file of a folder whose conversion is not finished."""
RECORD = ".titan-converted"
"""The file with the names of the files that a conversion wrote, one a line: another conversion replaces only these."""
VALIDITY_FILES = ("config.json", "params.json", "manifest.json")
"""The file that makes a folder valid, in each format."""
WRITTEN_PATTERNS = (
    "model*.safetensors", "model.safetensors.index.json", "consolidated.*.pth", "__*.distcp", ".metadata", ".*.tmp",
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer.tiktoken", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", ".*.part",
)  # fmt: skip
"""The other files that a conversion writes."""
SPARE = 64 * 2**20
"""Bytes of disk space to require in addition to the tensors."""


@dataclass(frozen=True)
class Convert:
    """The source, the target and the format of a conversion."""

    source: str = operand(
        "SOURCE", "a run, a checkpoint, a folder in Hugging Face's or Meta's format, or OWNER/NAME on the hub"
    )
    to: str = setting(help="the folder to write")
    format: Literal["hf", "meta", "titan"] = setting(
        "hf", "hf: safetensors, for transformers; meta: consolidated.NN.pth; titan: a checkpoint"
    )
    dtype: Literal["fp32", "bf16", "fp16", "keep"] = setting("bf16", "dtype of the weights; keep: as they are stored")
    shard_gb: float = setting(5.0, "largest file in 10^9 bytes (hf, titan)", above=0, cap=1e9)
    meta_ranks: int = setting(1, "tensor parallel ranks, one file per rank (meta)", at_least=1, cap=10_000)
    overwrite: bool = setting(False, "replace the files of an earlier conversion in the folder")


def run_conversion(command_line: CommandLine[Convert]) -> int:
    """Convert, print a report, and return the exit code."""
    settings, started = command_line.settings, time.monotonic()
    target = Path(settings.to).expanduser().absolute()
    check_source(settings.source)
    _check_target(settings, target)
    weights, files = convert_weights(settings, target)
    _print_report(weights, settings, files, time.monotonic() - started)
    return 0


def convert_weights(settings: Convert, target: Path) -> tuple[Weights, list[Path]]:
    """Convert; return the weights that were read and the tensor files that were written."""
    from titan.weights import export, tokenizer_files
    from titan.weights.formats import open_weights

    weights = open_weights(settings.source, "", verify=True)
    tokenizer_files.check_packages(weights.tokenizer, settings.format, f"to={settings.to}")
    if Path(weights.path).resolve() == target.resolve():
        raise ConfigError(f"to={settings.to}: is the folder of {settings.source}; choose another folder.")
    limit = int(settings.shard_gb * 10**9)
    export.check_export(weights.model, settings.format, settings.meta_ranks)
    exported = export.Export(weights, settings.format, settings.dtype, limit, settings.meta_ranks)
    files = exported.list_files()
    size = sum(file.bytes for file in files)
    _check_space(target, size)
    _mark_target(target)
    try:
        with show_progress(size) as show:
            exported.write(target, show)
        write_atomic(target / RECORD, "".join(f"{name}\n" for name in sorted(_list_written(target))), sync=True)
        (target / MARK).unlink()
    except OSError as error:
        raise RunError(
            f"to={settings.to}: can't be written ({error.strerror or error}); fix this and rerun the same command."
        ) from error
    return weights, [target / file.name for file in files]


def _check_target(settings: Convert, target: Path) -> None:
    if settings.meta_ranks > 1 and settings.format != "meta":
        raise ConfigError(f"meta_ranks={settings.meta_ranks}: applies to format=meta only; remove it.")
    source = Path(settings.source).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise ConfigError(f"to={settings.to}: is a file; name a folder.")
    if source.is_dir() and target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"to={settings.to}: is inside {settings.source}; choose a folder outside of it.")
    _check_folder(settings, target)
    is_marked = (target / MARK).exists()
    if target.is_dir() and any(target.iterdir()) and not (is_marked or settings.overwrite):
        raise ConfigError(f"to={settings.to}: is not empty; choose another folder, or give overwrite=true.")
    recorded: set[str] = set()
    with suppress(OSError, ValueError):  # there is none without an earlier conversion
        recorded = set(read_regular_file(target / RECORD).decode(errors="replace").splitlines())
    if foreign_files := [] if is_marked else sorted(_list_written(target) - recorded):
        raise ConfigError(
            f"to={settings.to}: holds {foreign_files[0]}, which titan.convert did not write; choose another folder, or "
            "remove it yourself."
        )


def _check_folder(settings: Convert, target: Path) -> None:
    """Raise ConfigError for a folder with more than one model in it: a home, one above it, a run's, one with runs."""
    folder = target.resolve()
    if any(home.is_relative_to(folder) for home in (Path("/"), Path(os.path.expanduser("~")).resolve())):
        raise ConfigError(f"to={settings.to}: is a home directory or above one; name a folder for the model alone.")
    for run_file in (file for pattern in ("", "*/", "*/*/") for file in folder.glob(f"{pattern}{RUN}")):
        problem = "is a run's directory" if run_file.parent == folder else f"holds the run {run_file.parent.name}"
        raise ConfigError(f"to={settings.to}: {problem}; name a folder for the model alone.")


def _list_written(target: Path) -> set[str]:
    """Return the names of the target's files that could be a conversion's."""
    return {file.name for pattern in (*VALIDITY_FILES, *WRITTEN_PATTERNS) for file in target.glob(pattern)}


def _check_space(target: Path, size: int) -> None:
    """Raise ConfigError when the disk is too small; files to be replaced count as free space."""
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    replaced = sum(file.lstat().st_size for pattern in WRITTEN_PATTERNS for file in target.glob(pattern))
    free = shutil.disk_usage(existing).free + replaced
    if free < size + SPARE:
        raise ConfigError(
            f"to={target}: needs {format_bytes(size + SPARE)}, and the disk has {format_bytes(free)} "
            "free; free space, or choose another folder."
        )


def _mark_target(target: Path) -> None:
    """Write the marker file, then remove the files that make the folder valid and those that will be written."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / MARK).touch()
        for name in (*VALIDITY_FILES, RECORD):
            (target / name).unlink(missing_ok=True)
        for pattern in WRITTEN_PATTERNS:
            for file in target.glob(pattern):
                file.unlink()
    except OSError as error:
        raise ConfigError(f"to={target}: can't be written to ({error.strerror}); choose another folder.") from error


@contextmanager
def show_progress(size: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds written bytes to a progress bar of `size`, on a terminal with tqdm installed."""
    bar = open_bar(total=size, unit="B", unit_scale=True)
    with nullcontext() if bar is None else bar:
        yield (lambda _: None) if bar is None else bar.update


def _print_report(weights: Weights, settings: Convert, files: list[Path], seconds: float) -> None:
    model, parameters = weights.model, sum(math.prod(shape) for shape in weights.shapes.values())
    kinds = sorted({str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()})
    print("converted:")
    print_table(
        {
            "from": f"{settings.source}: {FORMAT_NAMES[type(weights).__name__]}, {', '.join(kinds)}",
            "model": f"{type(model).__name__}, {parameters:,} parameters, {format_plural(model.layers, 'layer')} of "
            f"width {model.dim}",
            "to": f"{settings.to}: {settings.format}, {settings.dtype}",
            "files": f"{len(files):,}, {format_bytes(sum(file.stat().st_size for file in files))}",
            "tokenizer": weights.tokenizer or "none",
            "time": f"{seconds:.1f} s",
        }
    )
