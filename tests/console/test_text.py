"""What is shown and written down holds no secrets, and no characters that change what a terminal shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers import start, trials
from launchers.command import run_command
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, begin_run
from tests.support.tiers import full, select_cases
from titan import status
from titan.console.text import escape, is_redacted, redact, redact_nested
from titan.dataset import corpora, remote
from titan.errors import ConfigError, RunError
from titan.report import collect
from titan.run import attempts, compose, identity, lineage, summary
from titan.run.run import Run
from titan.sweep import ledger

SECRET, OTHER = "horse" * 3, "swordfish" * 2  # so that no diff of this file has them
REDACTED = {
    "password": (f"https://me:{SECRET}@host/p", "https://***@host/p"),
    "token as user": (f"git+https://{SECRET}@host/p.git", "git+https://***@host/p.git"),
    "user is kept elsewhere": (f"s3://me:{SECRET}@host/x", "s3://me:***@host/x"),
    "slash in a password": (f"s3://me:a/{SECRET}@host/x", "s3://me:***@host/x"),
    "@ in a password": (f"s3://me:a@{SECRET}@host/x", "s3://me:***@host/x"),
    "no user": (f"redis://:{SECRET}@host/0", "redis://:***@host/0"),
    "list": (f"[s3://a:{SECRET}@h/x,s3://b:{SECRET}@h/y]", "[s3://a:***@h/x,s3://b:***@h/y]"),
    "token": (f"https://h/x?v=1&token={SECRET}&w=2", "https://h/x?v=1&token=***&w=2"),
    "signature": (f"https://h/x?X-Amz-Signature={SECRET}", "https://h/x?X-Amz-Signature=***"),
    "sig of two": (f"[https://h/x?sig={SECRET},https://h/y?sig={SECRET}]", "[https://h/x?sig=***,https://h/y?sig=***]"),
    "in a sentence": (f"a=https://h/x?token={SECRET}: no.", "a=https://h/x?token=***: no."),
    "variable": (f"cluster.environment={{A_KEY:{SECRET},B:1}}", "cluster.environment={A_KEY:***,B:1}"),
}
PLAIN = (
    "hdfs://user@host:8020/p@v2", full("http://host:8080/p@v2"), full("abfs://box@account/x"), "file:///a/b@c",
    "https://h/x?tokenizer=gpt2", "gs://b/x?generation=3", full("${oc.env:HF_TOKEN}"), full("dataset.field=a?token=b"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "due"), select_cases([pytest.param(*case, id=name) for name, case in REDACTED.items()], ("list",))
)
def test_secrets_are_redacted(text: str, due: str) -> None:
    assert redact(text) == redact(due) == due
    for sentence in (ConfigError(f"x={text}: no."), RunError(f"x={text}: no.")):
        assert SECRET not in str(sentence)


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert not is_redacted(text)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["name='x\n#SBATCH --account=other'"], id="name"),
        full(["hydra.run.dir='a\nb'"], id="directory"),
        pytest.param(["-m", "training.seed=0,1", "name='a\nb'"], id="grid"),
        full(["-m", "training.seed=0,1", "hydra.sweep.dir='a\nb'"], id="grid's directory"),
        full(["name='x\x1b[2J'"], id="escape"),
        full(["name='x\u202ey'"], id="direction"),
        pytest.param(["name='x\udcff'"], id="no utf-8"),
        full(["metrics.wandb_project='a\rb'"], id="project"),
    ],
)
def test_control_characters_are_refused(overrides: list[str], laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*overrides, *TINY], lambda run: 0) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and escape(said[:-1]) == said[:-1]
    assert not list(laptop.iterdir())


@pytest.mark.full
def test_texts_that_may_have_lines_keep_them(laptop: Path) -> None:
    (laptop / "a.txt").write_text("x")
    run = compose_test_run(["dataset=text", f"dataset.path={laptop}/a.txt", "dataset.separator='\n\n'", "name=x"])
    assert run.dataset.separator == "\n\n"  # type: ignore[attr-defined]
    assert compose_test_run(["cluster.setup=['a\nb']", "name=x"]).cluster.setup == ("a\nb",)


def test_names_found_on_disk_are_escaped(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (laptop / "grid" / "a").mkdir(parents=True)
    about = {"event": "point", "id": "a", "directory": "a", "steps": 1, "devices": 1, "asked": ""}
    point = {**about, "overrides": ["x=a\n\x1b[2Jb"]}
    ended = {"event": "ended", "id": "a", "code": 1, "reason": "rank 0 on n\x1b[1m: x"}
    ledger.add_events(laptop / "grid", point, ended)
    assert status.main([str(laptop / "grid"), "watch=false"]) == 1
    said = capsys.readouterr().out
    assert "a\\n\\x1b[2Jb" in said and "n\\x1b[1m" in said and "\x1b" not in said
    (label,) = {run.label for run in collect.collect_runs([laptop / "grid"]).failed}
    assert label == "x=a\\n\\x1b[2Jb"


def test_nested_settings_are_redacted() -> None:
    found = redact_nested({"a": [f"https://u:{SECRET}@h"], "HF_TOKEN": SECRET, "n": 1, "t": (None,)})
    assert found == {"a": ["https://***@h"], "HF_TOKEN": "***", "n": 1, "t": [None]}


def test_control_characters_are_escaped() -> None:
    assert escape("a\nb\x1b[2J\u202ec\udcff é\u200d") == "a\\nb\\x1b[2J\\u202ec\\udcff é\u200d"
    assert str(ConfigError("x=a\n#SBATCH: no.")) == "x=a\\n#SBATCH: no."


def files_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text(errors="replace") for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        pytest.param("DB_PASSWORD", "hunter2xyz", True, id="password"),
        pytest.param("PGPASSWORD", "abc12345", True, id="eight-characters"),
        pytest.param("WANDB_PASSWORD", "correct-horse-battery", True, id="words"),
        pytest.param("SSH_PASSPHRASE", "correct horse battery", True, id="blanks"),
        pytest.param("HF_SECRET", "123456789012345678", True, id="digits"),
        pytest.param("API_KEY", "abcdef123456", True, id="generated"),
        pytest.param("TOKEN_MODE", "filesystem", False, id="word-of-a-mode"),
        pytest.param("SSH_KEY", "/home/me/key-1234567", False, id="path"),
        pytest.param("A_PASSWORD", "short", False, id="short"),
    ],
)
def test_values_of_secret_variables_are_redacted(
    name: str, value: str, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"server said: {value}!") == f"server said: {'***' if is_hidden else value}!"


def address(secret: str, path: Path) -> str:
    return f"memory://me:{secret}@host{path}?token={secret}"


def run_of(secret: str, folder: Path, *more: str) -> Run:
    return compose_test_run([*TINY, "name=x", f"checkpoint.resume='{address(secret, folder)}'", *more])


def test_a_run_writes_no_secret_down(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(SECRET, laptop)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.prepare_corpora(run.dataset))
    attempt = attempts.Attempt(
        1, "id", identity.compute_ids(run, {}), {}, None, 0, 0, "start", notes=(f"copy to {run.checkpoint.resume}",)
    )
    Path(run.directory).mkdir(parents=True)
    attempts.record_attempt(run, attempt, {}, [])
    summary.show_run(run, attempt, mix, ())
    assert SECRET in str(run.checkpoint.resume)
    assert not [name for name, text in files_of(laptop).items() if SECRET in text]
    document = yaml.safe_load((Path(run.directory) / "run.yaml").read_text())
    assert document["config"]["checkpoint"]["resume"] == redact(address(SECRET, laptop))
    assert SECRET not in summary.build_next_command(run, {"finished": False}) and SECRET not in capsys.readouterr().out


def test_another_password_goes_on_with_the_same_run(laptop: Path) -> None:
    one, other = run_of(SECRET, laptop), run_of(OTHER, laptop)
    assert identity.compute_trial_id(one) == identity.compute_trial_id(other)
    assert identity.select_settings(one, science=False) == identity.select_settings(other, science=False)
    recorded: Any = redact_nested({"resume": one.checkpoint.resume, "weights": None})
    before: dict[str, Any] = {"config": {"checkpoint": recorded}, "parent": "a@1"}
    mix: Any = None
    assert lineage.find_parent(other, [before], mix, has_checkpoint=True).id == "a@1"


@pytest.mark.full
def test_a_run_resumes_when_its_url_is_given_again(laptop: Path) -> None:
    kinds = []
    for secret in (SECRET, OTHER):
        run = compose_test_run([*TINY, "name=x", f"checkpoint.path='{address(secret, laptop)}'"])
        Path(run.directory).mkdir(parents=True, exist_ok=True)
        attempt = begin_run(run)
        assert isinstance(attempt, attempts.Attempt)
        kinds.append((attempt.kind, attempt.ids.execution))
    assert kinds == [("start", kinds[0][1]), ("resume", kinds[0][1])]
    assert not [name for name, text in files_of(laptop / "runs").items() if SECRET in text or OTHER in text]


def test_a_redacted_url_is_refused_as_it_is(laptop: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.resume=.*\*\*\* stands for a secret"):
        compose_test_run([f"checkpoint.resume='{redact(address(SECRET, laptop))}'"])


def test_a_url_from_the_environment_is_written_down_as_typed(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_URL", address(SECRET, laptop))
    run = compose_test_run([*TINY, "checkpoint.resume=${oc.env:DATA_URL}"])
    assert run.checkpoint.resume == address(SECRET, laptop)
    assert "checkpoint.resume=${oc.env:DATA_URL}" in run.overrides


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        full("metrics.wandb_project=${oc.env:MY_TOKEN}", True, id="value"),
        full("cluster.environment={A: '${oc.env:MY_TOKEN}'}", True, id="nested"),
        full("metrics.wandb_project=${oc.env:MY_KEY}", False, id="redacted by its value"),
        full("checkpoint.path=https://me:${oc.env:MY_TOKEN}@h/x", False, id="redacted"),
        pytest.param("cluster.environment={MY_TOKEN: '${oc.env:MY_TOKEN}'}", False, id="redacted by its key"),
        full("metrics.wandb_project=${oc.env:MY_PLACE}", False, id="no secret"),
        full("metrics.wandb_project=${oc.env:NO_TOKEN,x}", False, id="not set"),
    ],
)
def test_a_secret_of_the_environment_is_warned_of(
    override: str, warned: bool, laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compose.warn_once.cache_clear()
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("MY_KEY", f"{SECRET}1")
    monkeypatch.setenv("MY_PLACE", "somewhere")
    compose_test_run([*TINY, override])
    compose_test_run([*TINY, override])
    said = capsys.readouterr().err
    assert said.count("goes into run.yaml") == warned and SECRET not in said


@pytest.mark.full
def test_a_grid_writes_no_secret_down(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "run_local", lambda run, **_: 0)
    paths = ",".join(f"'{address(SECRET, laptop / name)}'" for name in "ab")
    assert run_command(["-m", *TINY, "name=grid", f"checkpoint.path={paths}"], start.run_local) == 0
    texts = files_of(laptop)
    assert {"runs/grid/multirun.yaml", f"runs/grid/{ledger.LEDGER}", f"runs/grid/{ledger.SWEEP}"} <= texts.keys()
    assert not [name for name, text in texts.items() if SECRET in text + name]
    assert SECRET not in "".join(capsys.readouterr())


@pytest.mark.full
def test_what_is_shown_of_a_configuration_has_no_secret(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = f"checkpoint.resume='{address(SECRET, laptop)}'"
    for arguments in (["--cfg", "job"], ["--cfg", "all"], ["--info", "config"]):
        assert run_command([*arguments, override], lambda run: 1) == 0
        said = "".join(capsys.readouterr())
        assert "memory://me:***@host" in said and SECRET not in said


def test_a_frozen_point_is_its_users_alone(laptop: Path) -> None:
    point = trials.Trial("a", (), compose_test_run([*TINY]))
    assert trials.write_run(point, laptop).stat().st_mode & 0o777 == 0o600


def test_where_data_come_from_is_written_down_without_secrets(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def download(url: str, folder: Path, name: str) -> Path:
        seen.append(url)
        return folder / name

    monkeypatch.setattr(remote, "_download_file", download)
    monkeypatch.setattr(remote, "_FULL_URLS", {})
    folder = laptop / "mirror"
    folder.mkdir()
    url = address(SECRET, laptop)
    (folder / remote.ORIGIN).write_text(f'{{"url": "{redact(url)}", "keep_gib": null}}')
    remote.register_url(url)
    remote.fetch_file(folder / "train-00000.bin")
    assert seen == [url]
