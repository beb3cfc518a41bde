"""Measure the preparing of data: `python -m tests.measure suite=data`, which also runs `tests.measure.loading`.

The speed of preparing relative to the bare tokenizer on the same documents, and of two processes relative to one; the
finished work that killed preparations repeat; and peak memory. Speeds are ratios of alternating rounds, because other
work on the machine slows both sides.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.measure import loading
from tests.measure.common import build_environment, read_last_line
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.preprocess.writer import compute_checksum
from titan.dataset.schema import Jsonl
from titan.dataset.sources.local import build_stdlib_source
from titan.dataset.tokenizers.load import RankTokenizer, load_tokenizer
from titan.errors import ConfigError

FILES = 16
KILLED_MB = 24
RUN = "import sys; from titan.prepare import main; sys.exit(main(sys.argv[1:]))"


def suite(
    rounds: int = 5, megabytes: int = 32, kills: int = 20, sizes: tuple[int, ...] = (10, 100, 1000)
) -> dict[str, Any]:
    """Run all measurements and print one line for each.

    Args:
        rounds: number of rounds of each speed.
        megabytes: size of the text for speeds; also the millions of tokens that are loaded.
        kills: number of preparations that are killed.
        sizes: sizes of the texts for peak memory, in megabytes.

    Raises:
        ConfigError: if a measured preparation fails.
    """
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as name:
        folder = Path(name)
        figures: dict[str, Any] = {"order": loading.check_permutation()}
        figures["reading"] = loading.measure_loader_speed(folder, megabytes, rounds)
        figures |= {"speed": _measure_speed(folder, megabytes, rounds), "kills": _measure_kills(folder, kills)}
        figures["memory"] = [_measure_memory(folder, size) for size in sizes]
        return figures


def write_text(folder: Path, megabytes: float) -> None:
    """Write Python's standard library as JSON Lines, repeated with a different first line each time."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = _generate_texts()
    for i in range(FILES):
        with open(folder / f"{i:02}.jsonl", "w") as file:
            written = 0
            while written < megabytes * 1e6 / FILES:
                written += file.write(json.dumps({"text": next(texts)}) + "\n")


def _generate_texts() -> Iterator[str]:
    source, repetition = build_stdlib_source(), 0
    texts = [text for part in source.parts() for text in source.documents(part) if isinstance(text, str)]
    while True:
        repetition += 1
        yield from (f"# {repetition}\n{text}" for text in texts)


def _measure_speed(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """Measure MB/s of text: the bare tokenizer on documents in memory, preparing with one process and with two."""
    write_text(folder / "speed", megabytes)
    lines = (line for file in sorted((folder / "speed").iterdir()) for line in file.open())
    documents = [json.loads(line)["text"] for line in lines]
    size = sum(len(document.encode()) for document in documents)
    tokenizer = load_tokenizer("titan4k")
    if not isinstance(tokenizer, RankTokenizer):
        raise TypeError("titan4k is not a RankTokenizer")
    seconds: dict[str, list[float]] = {"bare": [], "one": [], "two": []}
    for number in range(rounds):
        start = time.perf_counter()
        for document in documents:
            tokenizer._encoding.encode_ordinary(document)
        seconds["bare"].append(time.perf_counter() - start)
        for name, workers in (("one", 1), ("two", 2)):
            cache = folder / f"cache-{number}-{workers}"
            start = time.perf_counter()
            prepare(Jsonl(path=str(folder / "speed"), cache=str(cache), workers=workers))
            seconds[name].append(time.perf_counter() - start)
    share = statistics.median(b / o for b, o in zip(seconds["bare"], seconds["one"], strict=True))
    gain = statistics.median(o / t for o, t in zip(seconds["one"], seconds["two"], strict=True))
    rates = {name: size / statistics.median(times) / 1e6 for name, times in seconds.items()}
    print(f"preparing {size / 1e6:.0f} MB: {rates['one']:.1f} MB/s per core, {share:.3f} x the bare tokenizer")
    print(f"two processes: {rates['two']:.1f} MB/s, {gain:.2f} x one process")
    return {**rates, "of_bare": share, "two_against_one": gain}


def _measure_kills(folder: Path, kills: int) -> dict[str, Any]:
    """Kill preparations at random moments, rerun each until it ends, and compare its files to an undisturbed one's."""
    write_text(folder / "killed", KILLED_MB)
    undisturbed, seconds = _run_preparation(folder, "undisturbed")
    killed, repeated, starts, generator = 0, 0, 0, random.Random(0)
    while killed < kills:
        starts += 1
        cache, written = f"killed-{starts}", dict[str, int]()
        while killed < kills and _run_preparation(folder, cache, generator.uniform(0.5, 1.1) * seconds) is None:
            killed += 1
            repeated += _count_repeated(folder / cache, written)
        prepared, _ = _run_preparation(folder, cache)
        repeated += _count_repeated(folder / cache, written)
        if _compute_checksums(prepared) != _compute_checksums(undisturbed):
            raise ConfigError(
                "suite=data: a preparation that was killed and rerun wrote other files; this is a bug in titan."
            )
    print(f"killed {killed} times in {starts} preparations: same files, {repeated} finished shard jobs repeated")
    return {"kills": killed, "preparations": starts, "made_again": repeated}


def _count_repeated(cache: Path, write_times: dict[str, int]) -> int:
    """Return how many shard jobs wrote their files again; update `write_times` with all that have a manifest."""
    manifests = (str(file) for file in cache.glob("datasets/*/unit-*.json"))
    tokens = (Path(file.replace("/unit-", "/train-").replace(".json", ".tokens")) for file in manifests)
    current_times = {str(file): file.stat().st_mtime_ns for file in tokens}
    repeated = sum(write_times.get(name, written) != written for name, written in current_times.items())
    write_times |= current_times
    return repeated


def _run_preparation(folder: Path, cache: str, limit: float | None = None) -> Any:
    """Return the directory and seconds of a preparation by two processes; None if killed after `limit` seconds."""
    arguments = ["dataset=jsonl", f"dataset.path={folder / 'killed'}", f"dataset.cache={folder / cache}"]
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments, "dataset.workers=2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=build_environment(),
    ) as process:  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    if code:
        raise ConfigError(f"suite=data: preparing ended with exit code {code}; see python -m titan.prepare.")
    (prepared,) = (folder / cache / "datasets").iterdir()
    return prepared, time.perf_counter() - start


def _compute_checksums(folder: Path) -> dict[str, list[Any]]:
    """Return the checksums of all files that do not depend on the clock."""
    kinds = (".tokens", ".offsets", ".npy")
    return {f.name: compute_checksum(f) for f in sorted(folder.iterdir()) if f.suffix in kinds or f.name == "plan.json"}


def _measure_memory(folder: Path, megabytes: int) -> dict[str, float]:
    """Measure the peak resident memory of a process that prepares alone."""
    write_text(folder / f"memory-{megabytes}", megabytes)
    code = "from titan.dataset.preprocess.prepare import prepare\nfrom titan.dataset.schema import Jsonl\n"
    code += (
        f"prepare(Jsonl(path={str(folder / f'memory-{megabytes}')!r}, cache={str(folder / 'memory')!r}, workers=1))\n"
    )
    code += "from titan.files.platform import read_peak_resident_bytes\nprint(read_peak_resident_bytes())"
    start = time.perf_counter()
    mebibytes = int(read_last_line(["-c", code])) / 2**20
    seconds = time.perf_counter() - start
    print(f"peak memory for {megabytes:,} MB: {mebibytes:.0f} MiB ({seconds:.0f} s)", flush=True)
    return {"megabytes": megabytes, "peak_mebibytes": mebibytes, "seconds": seconds}
