"""Every command in README and docs/ is run: trained for real, in miniature, where one rank is enough."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launchers import start
from launchers.command import run_command as launch
from tests.support import made_weights, task_files, tiers
from tests.support.runs import begin_run
from titan import (
    calibrate,
    campaign,
    compare,
    convert,
    data,
    evaluate,
    generate,
    law,
    plan,
    prepare,
    prove,
    replay,
    status,
)
from titan.checkpoint import manifest
from titan.dataset.tokenizers import train
from titan.model.schema import Llama
from titan.profile import __main__ as profile
from titan.run import compose
from titan.run.run import Run
from titan.sweep import ledger

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted((ROOT / "experiments").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *EXPERIMENTS]
SMALL = [
    "model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=32", "training.steps=2",
    "training.seq_len=32", "training.global_batch=64", "metrics.sample_tokens=4", "evaluation.tokens=64",
    "metrics.plot=false", "metrics.wandb=false",
]  # fmt: skip

FEW_ROWS = [
    "dataset.images=64", "dataset.validation=0", "training.steps=1", "evaluation.tokens=0", "metrics.plot=false",
]  # fmt: skip
"""For models whose rows have a length that their settings give."""

ELSEWHERE = (
    "dataset=c4", "dataset=fineweb_edu", "OWNER/NAME", "meta-llama/", "s3://bucket", "srun --nodes 16",
    "bench_8b_128 cluster.nodes=4", "bench_8b_128 hydra/launcher=slurm$", "train_8b cluster=h200", "to=mine/cluster",
    "--config-dir mine cluster=here", "bench_405b_512 plan.trace", "bench_405b_512 cluster.hardware",
    "against=parallelism=3d", "study withdraw", "against=runs/first", "(evaluate|convert) exported",
    "-m .*experiments/.*sweep=",
    f"compare runs/({'|'.join(page.parent.name for page in EXPERIMENTS)})$",
)  # fmt: skip
"""Patterns of commands that are only parsed: they need the network, a cluster, minutes, or files of other pages."""


@dataclass(frozen=True)
class DocumentedCommand:
    """One line of a bash block."""

    words: tuple[str, ...]
    refused: bool
    elsewhere: bool  # reads what can't be reached in a test


def commands(page: Path) -> list[DocumentedCommand]:
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S):
        for line in filter(None, block.splitlines()):
            code, _, comment = line.partition(" #")
            elsewhere = any(re.search(part, code.rstrip()) for part in ELSEWHERE)
            found.append(
                DocumentedCommand(tuple(shlex.split(code.replace("$PWD", str(ROOT)))), "rejected" in comment, elsewhere)
            )
    return found


def shown(page: str, beginning: str) -> str:
    """The block of a page that begins so: a table, or a file."""
    (text,) = re.findall(rf"```{beginning}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.S)
    return str(text)


def kind(given: DocumentedCommand) -> tuple[object, ...]:
    """What a command shows: its program, flags, launcher, sweep and recipe, and whether it is refused or read only."""
    names = {word.partition("=")[0] for word in given.words if word.startswith(SHOWN)}
    program = [word for word in given.words if word in ("make", "eval", "srun", "torchrun") or "titan" in word]
    last = given.words.index(program[-1])
    flags = [word for word in given.words[last + 1 :] if word in ("-m", "--help", "--cfg")]
    return (*program, *flags, given.refused, given.elsewhere, *sorted(names))


def table() -> list[Any]:
    """All commands; in the quick tier the first of each kind in README that takes no seconds."""
    found, first = [], dict[tuple[object, ...], str]()
    for page in PAGES:
        name = page.parent.name if page in EXPERIMENTS else page.stem
        for i, given in enumerate(commands(page)):
            words = " ".join(given.words).replace(str(ROOT), "")
            found.append(pytest.param(given, id=f"{name}-{i}-{words[:60]}"))
            first.setdefault(kind(given), found[-1].id)
    quick = [id for id in first.values() if id.startswith("README-") and not any(part in id for part in SECONDS)]
    return tiers.select_cases(found, quick)


MODULES: dict[str, Any] = {
    "prepare": prepare, "generate": generate, "convert": convert, "replay": replay, "prove": prove,
    "evaluate": evaluate, "status": status, "profile": profile, "campaign": campaign, "compare": compare, "law": law,
    "plan": plan, "calibrate": calibrate, "data": data,
}  # fmt: skip
ONLY_PARSED = ("profile", "calibrate")
MADE = ["runs/low", "runs/high"]
REPLACED: dict[str, dict[str, list[str]]] = {
    "generate": {"runs/tutorial": ["runs/first"]},
    "replay": {"runs/first": MADE[:1], "runs/mine": MADE[:1], "step=310": ["step=1"], "step=150": ["step=1"]},
    "prove": {"recipe=train_8b": []},
    "evaluate": {"runs/first": MADE[:1], "step=200": ["step=2"], "average=4": ["average=1"]},
    "compare": {f"runs/{name}": MADE for name in ("grid", "muon", "muon_lengths", "muon_layouts")},
}
"""Words of commands on runs that other commands make, which may run elsewhere, and those on runs made here."""
SECONDS = ("name=grid", "name=jobs", "runs/grid", "titan.replay", "titan.prove", "model=llama405b", "sweep=")
"""In commands that take seconds."""


SHOWN = ("hydra/launcher=", "sweep=", "recipe=", "checkpoint.resume=", "checkpoint.weights=")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((stdlib / name).read_text() for name in ("argparse.py", "typing.py", "tarfile.py", "inspect.py"))
    (folder / "book.txt").write_text(text)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text(text)
    (folder / "corpus" / "b.jsonl").write_text('{"content": "one two three", "text": "four five six seven"}\n' * 300)
    (folder / "ladder.csv").write_text(shown("laws.md", "csv"))
    (folder / "site" / "cluster").mkdir(parents=True)
    (folder / "site" / "cluster" / "ours.yaml").write_text(shown("tutorial.md", "yaml\n# site/cluster/ours.yaml"))
    (folder / "site" / "optimizer").mkdir()
    text = shown("optimizers.md", "yaml\n# optimizer/adafactor.yaml")
    (folder / "site" / "optimizer" / "adafactor.yaml").write_text(text)
    with gzip.open(folder / "chat.jsonl.gz", "wt") as file:
        conversations = (
            [{"role": "user", "content": f"Twice {i}?"}, {"role": "assistant", "content": f"{2 * i}."}]
            for i in range(200)
        )
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    made_weights.write_native(folder / "runs" / "mine" / "checkpoints" / "step-200", made_weights.LLAMA)
    made_weights.write_meta(folder / "llama", made_weights.LLAMA, 2)
    assert convert.main([f"{folder}/llama", f"to={folder}/exported"]) == 0
    first = compose.compose_run(["training.seq_len=256", "cluster=cpu", f"hydra.run.dir={folder}/runs/first"])
    Path(first.directory).mkdir(parents=True)
    begin_run(first)
    made_weights.write_native(
        manifest.folder_of(Path(first.directory), 400), Llama(**made_weights.SMALL | {"vocab": 4096})
    )
    rates = folder / "runs" / "rates"
    rates.mkdir()
    point = {"event": "point", "id": "a", "directory": "lr-0.001", "overrides": ["optimizer.lr=0.001"]}
    ledger.add_events(rates, point | {"steps": 200, "devices": 1, "asked": ""})
    (folder / "prompts.txt").write_text("import\nclass\n")
    task_files.write_tasks(folder)
    for step in (200, 300):
        made_weights.write_native(folder / "runs" / "trunk" / "checkpoints" / f"step-{step}", made_weights.LLAMA)
    return folder


@pytest.fixture(scope="module")
def compared(workplace: Path) -> Path:
    """The workplace with the runs that the page on comparing speaks of."""
    for name, rate in (("low", "3e-4"), ("high", "3e-3")):
        made = [f"optimizer.lr={rate}", "model.vocab=4096", f"hydra.run.dir={workplace}/runs/{name}"]
        assert launch([*SMALL, *made], TRAIN) == 0
    return workplace


@pytest.mark.parametrize("command", table())
def test_command(
    command: DocumentedCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(workplace)
    folders = [*(page.parent / "conf" for page in EXPERIMENTS), workplace / "site"]
    monkeypatch.setenv("TITAN_CONF", os.pathsep.join(map(str, folders)))
    monkeypatch.setattr(start, "run_local", train_small)
    words = list(command.words)
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0
    elif words[0] == "eval":
        assert shutil.which("bash") and launch(["-sc", "install=bash"], train_small) == 0
    elif "titan.dataset.tokenizers.train" in words:
        smaller = ["ranks=700" if w == "ranks=8191" else w for w in words[words.index("-m") + 2 :]]
        assert train.main(smaller) == 0
    elif program := next((word.removeprefix("titan.") for word in words if word.removeprefix("titan.") in MODULES), ""):
        module, options = MODULES[program], words[words.index(f"titan.{program}") + 1 :]
        options = [new for word in options for new in REPLACED.get(program, {}).get(word, [word])]
        if program in ("replay", "evaluate", "compare"):
            request.getfixturevalue("compared")
        if program == "prove":
            options += ["parallelism=fsdp", "compile=off", "precision=fp32", "cluster=cpu", "dataset=synthetic"]
        if program == "campaign":
            monkeypatch.setattr(module.TitanTrainer, "train", draw_losses)  # as in tests/commands/test_campaign.py
            opening = next(c.words for c in commands(ROOT / "docs" / "campaigns.md") if "open" in c.words)
            assert module.main(list(opening[opening.index("titan.campaign") + 1 :])) == 0
        is_elsewhere = command.elsewhere and program not in ("prepare", "data", "prove", "status")
        if program in ONLY_PARSED or (is_elsewhere and program not in ("campaign", "compare", "law", "plan")):
            assert module.COMMAND.parse(options)
        elif not is_elsewhere:  # the trials that a status shows are trained elsewhere
            assert module.main(options) in ((0, 1) if program == "status" else (2 * command.refused,))
    elif command.elsewhere and "-m" in words[3:]:
        sweep = [word for word in words[words.index("titan.train") + 1 :] if word != "-m"]
        assert launch([*sweep, "--cfg", "job"], train_small) == 0
    elif command.elsewhere:
        clusters = words[0] == "srun" or "hydra/launcher=slurm" in words
        compose.compose_run(words[words.index("titan.train") + 1 :], remote=clusters)
    else:
        if "dataset.tokenizer=my.tiktoken" in words and not Path("my.tiktoken").exists():  # that of the command before
            assert train.main(["corpus/", "to=my.tiktoken", "ranks=700"]) == 0
        ranks = {"torchrun": 2, "srun": 16}.get(words[0])
        overrides = words[words.index("titan.train") + 1 :]
        overrides = [o for o in overrides if not o.startswith("hydra.launcher.at_once=")]  # so that this process trains
        others = {f"training.measured=runs/{name}" for name in ("pilot", "optimizers")}  # runs of other commands
        overrides = ["training.step_seconds=0.1" if word in others else word for word in overrides]
        overrides += ["hydra.launcher.dry_run=true"] if "hydra/launcher=slurm" in words else []
        assert launch(overrides, train_small, ranks=ranks) == (2 if command.refused else 0)


def draw_losses(trainer: Any, folder: Path, runs: Any, metric: str) -> list[float | None]:
    """Return a loss for each run of a campaign, which depends on its seed and its overrides."""
    return [3.0 + 0.01 * (seed * (7 + len(recipe)) % 11) for recipe, seed in runs]


def train_small(run: Run, **_: Any) -> int:
    """Train what a command composed, at a size that takes no time; what needs several ranks is composed only."""
    if run.layout.devices > 1 or (run.compile.scope != "off" and not run.compile_why.endswith("of work")):
        return 0
    small = SMALL if run.model.row_format is None else FEW_ROWS
    replaced = (
        "name", "hydra.", "sweep=", "checkpoint.resume", "checkpoint.weights", "checkpoint.decay_steps",
        "training.tokens", "training.hours", *(override.partition("=")[0] for override in small),
    )  # fmt: skip
    kept = [o for o in run.overrides if not o.startswith(replaced)]
    vocabulary = [f"model.vocab={run.model.vocab}"]
    directory = f"hydra.run.dir={Path.cwd()}/small/{len(list(Path.cwd().glob('small/*')))}"
    return launch([*kept, *small, *vocabulary, directory], TRAIN)


TRAIN = start.run_local
