"""How well the data layer does: `python -m titan.bench --suite data`.

How data are read (`titan.bench.reading`); then preparing: its speed against that of the bare tokenizer on the
same documents, of two processes against one, what is left of the work of killed ones, and the memory it takes. Speeds
are ratios of alternating rounds: other work on the machine slows both sides.
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

from titan.bench import reading as measure_reading
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.preprocess.writer import checksum
from titan.dataset.schema import Jsonl
from titan.dataset.sources.local import stdlib
from titan.dataset.tokenizers.base import RankTokenizer, load_tokenizer
from titan.errors import ConfigError

FILES = 16
KILLED_MB = 24
RUN = "import sys; from titan.prepare import main; sys.exit(main(sys.argv[1:]))"


def suite(
    rounds: int = 5, megabytes: int = 32, kills: int = 20, sizes: tuple[int, ...] = (10, 100, 1000)
) -> dict[str, Any]:
    """Measure all of it and print a line each.

    Args:
        rounds: how often speeds are taken.
        megabytes: of the text that speeds are taken on; as many million tokens are read.
        kills: how many preparations are killed.
        sizes: of the texts, in megabytes, whose preparation's memory is taken.

    Raises:
        ConfigError: when a preparation that was measured did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as name:
        place = Path(name)
        found: dict[str, Any] = {"order": measure_reading.order()}
        found["reading"] = measure_reading.reading(place, megabytes, rounds)
        found |= {"speed": _speed(place, megabytes, rounds), "kills": _kills(place, kills)}
        found["memory"] = [_memory(place, size) for size in sizes]
        return found


def write_text(folder: Path, megabytes: float) -> None:
    """Write the standard library, over and over and each time a little different, as JSON Lines."""
    folder.mkdir(parents=True, exist_ok=True)
    source = _again()
    for i in range(FILES):
        with open(folder / f"{i:02}.jsonl", "w") as file:
            written = 0
            while written < megabytes * 1e6 / FILES:
                written += file.write(json.dumps({"text": next(source)}) + "\n")


def _again() -> Iterator[str]:
    source, turn = stdlib(), 0
    texts = [text for part in source.parts() for text in source.documents(part) if isinstance(text, str)]
    while True:
        turn += 1
        yield from (f"# {turn}\n{text}" for text in texts)


def _speed(place: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """Bytes of text a second: the bare tokenizer on documents in memory, one process that prepares, and two."""
    write_text(place / "speed", megabytes)
    lines = (line for file in sorted((place / "speed").iterdir()) for line in file.open())
    documents = [json.loads(line)["text"] for line in lines]
    size = sum(len(document.encode()) for document in documents)
    tokenizer = load_tokenizer("titan4k")
    if not isinstance(tokenizer, RankTokenizer):
        raise TypeError("the built-in tokenizer is made of ranks")
    seconds: dict[str, list[float]] = {"bare": [], "one": [], "two": []}
    for number in range(rounds):
        start = time.perf_counter()
        for document in documents:
            tokenizer._encoding.encode_ordinary(document)
        seconds["bare"].append(time.perf_counter() - start)
        for name, workers in (("one", 1), ("two", 2)):
            cache = place / f"cache-{number}-{workers}"
            start = time.perf_counter()
            prepare(Jsonl(path=str(place / "speed"), cache=str(cache), workers=workers))
            seconds[name].append(time.perf_counter() - start)
    share = statistics.median(b / o for b, o in zip(seconds["bare"], seconds["one"], strict=True))
    gain = statistics.median(o / t for o, t in zip(seconds["one"], seconds["two"], strict=True))
    rates = {name: size / statistics.median(taken) / 1e6 for name, taken in seconds.items()}
    print(f"preparing {size / 1e6:.0f} MB: {rates['one']:.1f} MB/s a core, {share:.3f} of the bare tokenizer's speed")
    print(f"two processes: {rates['two']:.1f} MB/s, {gain:.2f} times one")
    return {**rates, "of_bare": share, "two_against_one": gain}


def _kills(place: Path, kills: int) -> dict[str, Any]:
    """Kill the process group of a preparation at random moments until it has ended, over and over."""
    write_text(place / "killed", KILLED_MB)
    undisturbed, seconds = _run(place, "undisturbed")
    done, twice, starts, draw = 0, 0, 0, random.Random(0)
    while done < kills:
        starts += 1
        cache, made = f"killed-{starts}", dict[str, int]()
        while done < kills and _run(place, cache, draw.uniform(0.5, 1.1) * seconds) is None:
            done += 1
            twice += _made_again(place / cache, made)
        folder, _ = _run(place, cache)
        twice += _made_again(place / cache, made)
        if _checksums(folder) != _checksums(undisturbed):
            raise ConfigError(
                "--suite data: a preparation that was killed came out otherwise; that is a fault of titan."
            )
    print(f"killed {done} times in {starts} preparations: the files are the same, {twice} finished units made again")
    return {"kills": done, "preparations": starts, "made_again": twice}


def _made_again(cache: Path, known: dict[str, int]) -> int:
    """How many units that had a receipt have got new files; `known` learns of those that have one now."""
    receipts = (str(file) for file in cache.glob("datasets/*/unit-*.json"))
    tokens = (Path(file.replace("/unit-", "/train-").replace(".json", ".tokens")) for file in receipts)
    found = {str(file): file.stat().st_mtime_ns for file in tokens}
    again = sum(known.get(name, written) != written for name, written in found.items())
    known |= found
    return again


def _run(place: Path, cache: str, limit: float | None = None) -> Any:
    """The folder of a preparation by two processes and its seconds; None when it was killed after `limit` seconds."""
    arguments = ["dataset=jsonl", f"dataset.path={place / 'killed'}", f"dataset.cache={place / cache}"]
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments, "dataset.workers=2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=_environment(),
    ) as process:  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    if code:
        raise ConfigError(f"--suite data: preparing ended with exit code {code}; see python -m titan.prepare.")
    (folder,) = (place / cache / "datasets").iterdir()
    return folder, time.perf_counter() - start


def _checksums(folder: Path) -> dict[str, list[Any]]:
    """Of all that doesn't depend on the clock."""
    kinds = (".tokens", ".offsets", ".npy")
    return {f.name: checksum(f) for f in sorted(folder.iterdir()) if f.suffix in kinds or f.name == "plan.json"}


def _memory(place: Path, megabytes: int) -> dict[str, float]:
    """The largest resident size of a process that prepares by itself."""
    write_text(place / f"memory-{megabytes}", megabytes)
    code = "from titan.dataset.preprocess.prepare import prepare\nfrom titan.dataset.schema import Jsonl\n"
    code += f"prepare(Jsonl(path={str(place / f'memory-{megabytes}')!r}, cache={str(place / 'memory')!r}, workers=1))\n"
    # Not getrusage's, which begins with that of the process that started this one.
    code += "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        raise ConfigError(f"--suite data: preparing ended with exit code {done.returncode}; see its message above.")
    seconds, mebibytes = time.perf_counter() - start, int(done.stdout) / 1024
    print(f"peak memory for {megabytes:,} MB: {mebibytes:.0f} MiB ({seconds:.0f} s)", flush=True)
    return {"megabytes": megabytes, "peak_mebibytes": mebibytes, "seconds": seconds}


def _environment() -> dict[str, str]:
    """This process's environment, with its own titan in reach."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
