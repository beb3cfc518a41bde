"""A run of somebody else is data: what its record would read, open or start, the user must have typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from launchers.command import run_command
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, begin_run
from titan import data, evaluate, plan, prove, replay
from titan.console.text import redact
from titan.errors import ConfigError
from titan.run import trust
from titan.run.run import Run

SECRET = "abcdefgh12345678"


WORDS: dict[str | None, tuple[str, ...]] = {
    None: (
        "optimizer.lr=0.1", "dataset.path=data/*.txt", "dataset.path=file:///data/x", "model.ffn=${model.dim}",
        "cluster=h100", "cluster.devices=4", "hydra.sweeper.params={optimizer.lr: 1}", "hydra.run.dir=runs/${name}",
        "evaluation.sets={a: {field: '${model.dim}'}, b: {}}", "dataset.path=../data", "optimizer.lr=[",
        "sweep.question='see https://arxiv.org/abs/1'", "cluster.partition=gpu",
        "hydra.sweep.subdir=${name}/${hydra.job.num}", "optimizer.args={betas: [0.9, 0.99], foreach: true}",
        "cluster.setup=[]", "dataset.path=${evaluation.sets.a.path}", "optimizer.cls=torch.optim.Adafactor",
    ),
    "reads the environment": (
        "dataset.path='https://host/${oc.env:HOME}'", "name=${oc.env:HOME}", "name=${oc.decode:${oc.env:HOME}}",
        "dataset.cache=/x/${oc.${name}:AWS_SECRET_ACCESS_KEY}",
    ),
    "names a URL": (
        "dataset.path=s3://bucket/x", "evaluation.sets={a: {path: https://host/x}}",
        "dataset.path='reference::file:///x/refs.json'", "dataset.path=simplecache::/x",
        "dataset.path=arrow_hdfs://host:8020/x", "dataset.path=my_file://x",
    ),
    "decides which programs run": (
        "cluster.environment={LD_PRELOAD: x.so}", "+cluster.environment.CXX=x", "++cluster.setup=x",
        "cluster.srun=[--x]", "+hydra.job.env_set.PATH=x", "+hydra.job={env_set: {PATH: x}}",
        "hydra.searchpath=[file:///x]", " cluster.setup=x", "hydra={job: {env_set: {PATH: x}}}",
        "cluster={setup: [x]}", "cluster.modules=[./x]", "hydra.sweeper.params={cluster.setup: [x]}",
        "hydra.sweeper.sampler._target_=os.system", "+hydra.callbacks.x._target_=titan.files.atomic.write_atomic",
        "+hydra.overrides.task=[cluster.setup=x]", "hydra/launcher=slurm", "cluster.environment={PYTHONINSPECT: 1}",
    ),
    "may decide which programs run": (
        "cluster=${hooks.x}", "hydra.sweeper.sampler=${hooks.x}", "optimizer.args={backend: mine}",
        "hooks={a: {command: mine}}", "+model.kernel=mine", "metrics.trackers=${sweep.baseline}",
    ),
    "asks for a sweep": ("hydra.mode=MULTIRUN",),
    "may join a URL": (
        "dataset.path=${cluster.partition}//host/x", "dataset.path=${sweep.question}", "dataset.path=${.name}",
    ),
    "may name a file outside of the folders of settings": ("cluster=../../home/x/site", "hooks=[../x]"),
    "is an option that names files of settings": ("--config-dir=/x", "--config-di"),
    "decides which code is imported": (
        "optimizer.cls=mine.SGD", "optimizer.cls=${model.dim}", "hydra.sweeper.params={optimizer.cls: mine.A}",
        "optimizer.cls=torch.optim.x.Adafactor",
    ),
    "decides where files are written": (
        "checkpoint.path=copies", "hydra.sweep.subdir=../x", "hydra.sweep.subdir='x\n/../../x'",
        "hydra.job.name=${sweep.question}", "hydra.sweeper.storage=study",
    ),
    "decides where data are sent": ("metrics.trackers={a: {tracking_uri: 'sqlite:///x'}}",),
    "names an account": ("metrics.trackers={a: {space: me/x}}", "metrics.wandb_entity=me", "cluster.account=mine"),
}  # fmt: skip
"""What words of a record would do."""


@pytest.mark.parametrize(("risk", "word"), [(risk, word) for risk, words in WORDS.items() for word in words])
def test_what_a_recorded_word_would_do(risk: str | None, word: str) -> None:
    assert trust.find_foreign(word) == risk


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """A run whose record has further words, which nobody here has typed."""

    def make(*words: str, options: tuple[str, ...] = ()) -> Path:
        run = compose_test_run([*TINY, f"hydra.run.dir={tmp_path}/foreign"])
        (tmp_path / "foreign").mkdir()
        begin_run(run)
        file = tmp_path / "foreign/run.yaml"
        document = yaml.safe_load(file.read_text())
        document["overrides"] = [*document["overrides"], *words]
        document["options"] = list(options)
        file.write_text(yaml.safe_dump(document, explicit_start=True))
        return tmp_path / "foreign"

    return make


COMMANDS: dict[str, Callable[[str], int]] = {
    "resume": lambda run: run_command([f"resume={run}"], lambda run: 1),
    "replay": lambda run: replay.main([run, "step=1"]),
    "evaluate": lambda run: evaluate.main([run]),
    "data": lambda run: data.main([run]),
    "plan": lambda run: plan.main([f"resume={run}"]),
    "prove": lambda run: prove.main([f"resume={run}"]),
}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_record_reads_no_secret(
    command: str, foreign: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    run = foreign("dataset.skip=[]", "dataset.cache=/x/${oc.env:AWS_SECRET_ACCESS_KEY}")
    assert COMMANDS[command](str(run)) == 2
    error = capsys.readouterr().err
    assert "titan: dataset.cache=/x/${oc.env:AWS_SECRET_ACCESS_KEY}: the run has recorded this setting" in error
    assert SECRET not in error and error.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_only_a_record_names(
    command: str,
    foreign: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mod_evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = foreign("optimizer=external", "optimizer.cls=mod_evil.Opt")
    assert COMMANDS[command](str(run)) == 2
    assert "titan: optimizer.cls=mod_evil.Opt: the run has recorded this setting" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


def test_a_class_of_a_listed_package_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = ["optimizer=external", "optimizer.cls=mine.Opt"]
    assert trust.select_recorded(recorded, ["modules=[mine]"]) == recorded
    with pytest.raises(ConfigError, match=r"optimizer.cls=mine.Opt: the run has recorded"):
        trust.select_recorded(recorded, ["modules=[mi]"])
    monkeypatch.setenv("TITAN_MODULES", "mine")
    assert trust.select_recorded(recorded, []) == recorded


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("cluster.environment={LD_PRELOAD: /x.so}",), ()),
        (("+hydra.job.env_set={CXX: /x}",), ()),
        (("dataset.path=http://localhost:1/x",), ()),
        ((), ("--config-dir", "/x")),
    ],
    ids=["environment", "env_set", "url", "option"],
)
def test_a_foreign_record_starts_and_opens_nothing(
    words: tuple[str, ...], options: tuple[str, ...], foreign: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMANDS["resume"](str(foreign(*words, options=options))) == 2
    assert "type it here if you trust it" in capsys.readouterr().err


@pytest.mark.full
def test_what_is_typed_is_not_merged_with_what_is_recorded(foreign: Callable[..., Path]) -> None:
    run = foreign("+hydra.job.env_set={CXX: /x}", "cluster.environment={LD_PRELOAD: /x.so}")
    seen: list[Mapping[str, str] | None] = []
    typed = ["cluster.environment={A: b}", "hydra.job.env_set={}"]
    assert run_command([f"resume={run}", *typed], lambda run: bool(seen.append(run.cluster.environment))) == 0
    assert seen == [{"A": "b"}]


@pytest.mark.full
def test_what_is_typed_counts_now_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TITAN_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    word = "dataset.cache=${oc.env:TITAN_TEST_CACHE}"
    caches: list[str | None] = []

    def see(run: Run) -> int:
        caches.append(run.dataset.cache)
        return 0

    line = [*(o for o in TINY if not o.startswith("hydra.run.dir")), word, "name=own"]
    Path("runs/own").mkdir(parents=True)
    assert run_command(line, lambda run: bool(begin_run(run)) - 1) == 0
    assert run_command(["resume=runs/own"], see) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert run_command(["resume=runs/own"], see) == 2
    assert run_command(["resume=runs/own", "dataset.cache=x"], see) == 0
    assert run_command(["resume=runs/own", word], see) == 0
    assert caches == [str(tmp_path / "cache"), "x", str(tmp_path / "cache")]


@pytest.mark.full
def test_a_foreign_record_asks_for_no_sweep_in_which_its_modules_counted(
    foreign: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMANDS["resume"](str(foreign("hydra.mode=MULTIRUN", "modules=[theirs]"))) == 2
    assert "hydra.mode=MULTIRUN: the run has recorded this setting, which asks for a sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        ("cluster.environment={A: b, C: d}", "+cluster.environment.C=d"),
        ("cluster.setup=['a b']", 'cluster.setup=["a b"]'),
        ("checkpoint.path=s3://me@host/***", "checkpoint.path=s3://me@host/***"),
    ],
    ids=["part", "quotes", "no override"],
)
def test_the_setting_counts_and_not_how_it_is_typed(
    typed: str, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert trust.find_foreign(recorded)
    trust.remember_typed([typed])
    assert not trust.find_foreign(recorded)


def test_a_home_that_can_not_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    trust.remember_typed(["dataset.path=s3://bucket/x"])
    assert trust.find_foreign("dataset.path=s3://bucket/x")


def test_messages_show_no_value_of_a_secret_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("TOKEN_MODE", "parallelism")
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_ed25519")
    assert redact(f"https://host/{SECRET}/x: no such file") == "https://host/***/x: no such file"
    assert redact("parallelism=fsdp /home/me/.ssh/id_ed25519") == "parallelism=fsdp /home/me/.ssh/id_ed25519"
