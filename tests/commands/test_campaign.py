"""`python -m titan.campaign`: its verbs as words and as JSON, how it trains, what it prints and what it rejects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers import plugin, start
from launchers.trials import Trial
from tests.support.page_reader import PageReader
from titan import campaign
from titan.errors import ConfigError, RunError
from titan.evidence.book import FILE
from titan.run.run import Run

TINY = [
    "model=debug", "model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
    "training.steps=3", "training.seq_len=32", "training.global_batch=64", "metrics.sample_tokens=0",
    "evaluation.tokens=64", "metrics.plot=false", "dataset=synthetic", "dataset.tokens=65536", "cluster=cpu",
    "checkpoint=off", "compile=off",
]  # fmt: skip
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that carries out a command line about the campaign "study", and returns its only line."""

    def ask(*words: str, code: int = 0, error: str = "") -> dict[str, Any]:
        assert campaign.main(["study", *words]) == code
        screen = capfd.readouterr()
        if error:
            assert error in screen.err and screen.out == ""
            return {}
        answer: dict[str, Any] = json.loads(screen.out)
        assert screen.out.count("\n") == 1 and ("error" in answer) == bool(code)
        return answer

    return ask


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Replace training: a higher learning rate is better; the runs that would be trained."""
    runs: list[Run] = []

    def run_local(run: Run, **_: Any) -> int:
        print("what a run prints")
        os.write(1, b"what its ranks print\n")
        runs.append(run)
        return 0

    def read_metric(directory: Path, code: int, metric: str) -> float:
        run = next(run for run in runs if run.directory == str(directory))
        return 3.0 - 10 * run.optimizer.lr + 1e-4 * (run.training.seed * 7 % 5)

    monkeypatch.setattr(start, "run_local", run_local)
    monkeypatch.setattr(campaign, "read_metric", read_metric)
    return runs


@pytest.mark.full
def test_a_campaign_from_words(ask: Ask, trained: list[Run], tmp_path: Path) -> None:
    assert ask("open", *TINY, "budget=0.1", "slope=0.2")["budget"] == 0.1
    tried = ask("try", "optimizer.lr=0.1", "hypothesis=a higher rate is better", "batch=8")
    assert tried["state"] == "kept" and tried["changes"] == ["optimizer.lr=0.1"] and tried["speed_up"] > 1
    seeds = [run.training.seed for run in trained]
    assert sorted(seeds) == sorted([*tried["seeds"], *tried["seeds"]])
    assert all(Path(run.directory).parent.parent == tmp_path / "runs/study/ideas" for run in trained)
    assert ask("try", "optimizer.lr=1e-1", code=2, error="optimizer.lr=1e-1: changes nothing that is learned") == {}
    count = len(trained)
    chain = ask("chain", "batch=6")["chain"]
    assert chain["pairs"] == 6 and chain["better_by"] == pytest.approx(tried["better_by"], abs=1e-3)
    assert len(trained) == count + 12
    assert ask("list")["ideas"] == {"kept": 1}
    assert ask("show", f"idea={tried['idea']}")["text"].startswith("kept, as baseline 1: better by")


def test_requests_of_a_file_are_answered_a_line_each(ask: Ask, capfd: pytest.CaptureFixture[str]) -> None:
    ask('{"verb": "open", "baseline": "mine", "metric": "nats"}')
    lines = [{"idea": {"b": 1, "a": 2}, "seed": s, "baseline_loss": 2.0, "loss": 2.0 - s / 99} for s in range(1, 6)]
    lines[3]["idea"] = {"a": 2, "b": 1}
    Path("results.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0]])) + "\n\n{oh\n")
    assert campaign.main(["study", "result", "requests=results.jsonl"]) == 2
    screen = capfd.readouterr()
    answers = [json.loads(line) for line in screen.out.splitlines()]
    assert [answer.get("exit_code", 0) for answer in answers] == [0] * 5 + [2, 2]
    assert len({answer["idea"] for answer in answers[:5]}) == 1 and answers[4]["state"] == "confirming"
    assert answers[5]["error"].startswith("seed=1: this idea has used it") and screen.err.count("titan: ") == 2


def test_an_idea_is_withdrawn(ask: Ask) -> None:
    ask("open", "baseline=mine")
    idea = ask("result", "idea=a mistake", "seed=1", "baseline_loss=2", "loss=1.9")["idea"]
    answer = ask("withdraw", "idea=a mistake", "reason=wrong branch")
    assert (answer["idea"], answer["state"], answer["budget_spent"]) == (idea, "withdrawn", 0.0)
    assert ask(json.dumps({"verb": "withdraw", "idea": idea}))["text"] == answer["text"]
    assert ask("list")["ideas"] == {"withdrawn": 1}
    ask("withdraw", code=2, error="withdraw: idea is missing")
    ask("withdraw", "idea=other", code=2, error="this campaign has no such idea")
    ask("page")
    page = PageReader(Path("runs/study/campaign.html").read_text())
    assert "Taken back before they were judged" in page.text and "a mistake" in page.text


def test_requests_of_stdin(ask: Ask, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    ask("open", "baseline=mine")
    monkeypatch.setattr(sys, "stdin", ['{"verb": "noise", "losses": [1.0, 1.1, 1.2, 1.1]}\n', '{"verb": "list"}\n'])
    assert campaign.main(["study", "requests=-"]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [answer["verb"] for answer in answers] == ["noise", "list"] and answers[1]["noise"]["pairs"] == 2


@pytest.mark.full
def test_trials_reach_slurm_through_its_launcher(ask: Ask, trained: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Trial] = []

    class Sweep:
        def __init__(self, root: Path, batch: list[Trial], settings: Any, *_: Any) -> None:
            assert settings.at_once == 8
            sent.extend(batch)

        def launch(self) -> list[int]:
            return [start.run_local(trial.run) for trial in sent[-2:]]

    monkeypatch.setattr(plugin.slurm_sweep, "SlurmSweep", Sweep)
    ask("open", *TINY, "hydra/launcher=slurm", "hydra.launcher.at_once=8")
    assert ask("try", "optimizer.lr=0.0001", "batch=1")["state"] == "rejected"
    assert len(sent) == len(trained) and {trial.run.optimizer.lr for trial in sent} == {1e-4, 1e-3}


WORDS: dict[str, tuple[list[str], str]] = {
    "no verb": ([], "the verb is missing; give one of open, noise"),
    "unknown verb": (["shw"], "shw: there is no such verb; did you mean 'show'?"),
    "two verbs": (["list", "show"], "list show: one verb is expected"),
    "nan": (["result", "idea=x", "seed=1", "loss=nan", "baseline_loss=1"], "loss=nan: "),
    "infinite": (["result", "idea=x", "seed=1", "loss=1", "baseline_loss=inf"], "baseline_loss=inf: "),
    "a word for a loss": (["result", "idea=x", "seed=1", "loss=1", "baseline_loss=low"], "baseline_loss=low: is no"),
    "no loss": (["result", "idea=x", "seed=1", "loss=1"], "baseline_loss=: is no finite number"),
    "no seed": (["result", "idea=x", "loss=1", "baseline_loss=1"], "seed is missing"),
    "a key of another verb": (["list", "seed=1"], "seed=1: list takes no settings; leave it out"),
    "overrides of list": (["list", "model=debug"], "model=debug: list takes no overrides"),
    "options": (["open", "model=debug", "--config-name=x"], "and takes no options"),
    "a seed": (["open", "model=debug", "training.seed=3"], "training.seed=3: the campaign sets seeds and folders"),
    "a sweep": (["open", "model=debug", "optimizer.lr=1,2"], "optimizer.lr=1,2"),
    "an unknown setting": (["open", "modl=debug"], "modl"),
    "no evaluation": (["open", "model=debug", "evaluation.tokens=0"], "evaluation.tokens=0 asks for no evaluation"),
    "two baselines": (["open", "model=debug", "baseline=mine"], "baseline= is given as well"),
    "a large budget": (["open", "model=debug", "budget=0.9"], "budget=0.9: "),
    "no file": (["requests=none.jsonl"], "requests=none.jsonl: can't be read (No such file or directory)"),
    "no regular file": (["requests=/dev/zero"], "requests=/dev/zero: can't be read (it is not a regular file)"),
    "JSON and words": (["{}", "seed=1"], "a request as JSON holds everything"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", WORDS)
def test_a_wrong_command_line_is_rejected_in_a_sentence(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    words, sentence = WORDS[case]
    assert campaign.main(["study", *words]) == 2
    screen = capfd.readouterr()
    assert screen.err.startswith("titan: ") and sentence in screen.err and screen.err.count("\n") == 1
    assert not Path("runs/study", FILE).exists() and screen.out == ""


LINES = {
    "no object": ("{1]", "is no JSON object"),
    "nan": ('{"verb": "result", "idea": "x", "seed": 1, "loss": NaN}', "loss=nan: must be a finite"),
    "unknown key": ('{"verb": "try", "ide": ["a=1"]}', "ide: a request has no such key; did you mean 'idea'?"),
    "unknown verb": ('{"verb": "drop"}', "drop: there is no such verb"),
    "a number": ('{"verb": 3}', "3: there is no such verb"),
    "a seed that is none": ('{"verb": "result", "idea": "x", "seed": 1.5}', "seed=1.5: "),
    "settings of another program": ('{"verb": "try", "idea": {"lr": 1}}', "give overrides of titan.train, as a list"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_wrong_request_is_answered_with_an_error(ask: Ask, case: str) -> None:
    line, sentence = LINES[case]
    assert sentence in ask(line, code=2)["error"]


@pytest.mark.full
def test_a_failed_run_is_an_error_and_its_seeds_are_tried_again(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("open", *TINY)
    monkeypatch.setattr(start, "run_local", lambda run, **_: 1)
    for _ in range(2):
        assert "the run ended with exit code 1" in ask('{"verb": "try", "idea": ["optimizer.lr=0.1"]}', code=1)["error"]
    events = [json.loads(line)["event"] for line in Path("runs/study", FILE).read_text().splitlines()]
    assert events == ["opened", "idea", "seeds"]


@pytest.mark.full
def test_a_recorded_baseline_imports_nothing_that_the_user_has_not_typed(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ask("open", *TINY)
    book = Path("runs/study", FILE)
    event = json.loads(book.read_text())
    event["baseline"].append("modules=[evil]")
    book.write_text(json.dumps(event) + "\n")
    for line in ('{"verb": "try", "idea": ["optimizer.lr=0.1"]}', '{"verb": "noise"}'):
        assert "modules=[evil]: a configuration file asks for it" in ask(line, code=2)["error"]
    event["baseline"][-1] = "dataset.path=https://example.invalid/x"
    book.write_text(json.dumps(event) + "\n")
    assert "the run has recorded this setting, which names a URL" in ask('{"verb": "noise"}', code=2)["error"]


@pytest.mark.full
def test_the_page_lists_the_chain_and_the_evidence(ask: Ask, tmp_path: Path) -> None:
    ask("open", "baseline=<b>mine</b>", "slope=0.1")
    kept = {"next_seed": 1, "state": ""}
    while kept["state"] != "kept":
        seed = kept["next_seed"]
        words = ["idea=<i>good</i>", f"seed={seed}", "baseline_loss=2", f"loss={1.9 + 0.001 * (seed % 7)}"]
        kept = ask("result", *words, "hypothesis=why\x1b[31m<u>") if seed == 1 else ask("result", *words)
    for seed in range(8):
        ask("result", "idea=worse", f"seed={seed}", "baseline_loss=2", "loss=2.5")
    assert ask("page")["written"] == "runs/study/campaign.html"
    page = Path("runs/study/campaign.html").read_text()
    assert "<i>good" not in page and "<b>mine" not in page and "\x1b" not in page and "<script" not in page
    reader = PageReader(page)
    assert not reader.open
    for words in ("1 of 2 ideas became the baseline", "Accepted changes", "Rejected", "Effective speed-up"):
        assert words in reader.text
    assert f"{kept['speed_up']:.3g}" in page and "default-src 'none'" in page


@pytest.mark.full
def test_a_pair_is_one_sweep_of_titans_launcher(trained: list[Run], tmp_path: Path) -> None:
    runs = [((*TINY, f"optimizer.lr={rate}"), 7) for rate in (0.1, 0.01)]
    assert campaign.TitanTrainer().train(tmp_path / "sweep", runs, "last_loss") == pytest.approx([2.0004, 2.9004])
    assert [run.training.seed for run in trained] == [7, 7] and (tmp_path / "sweep/ledger.jsonl").exists()


IN_PROCESS = """
import sys
from launchers import start
from titan import campaign
run_local = start.run_local
start.run_local = lambda run, apart, report: run_local(run, apart=False, report=report)
sys.exit(campaign.main(sys.argv[1:]))
"""
"""The command, whose runs are trained in its own process: starting others takes longer than three steps."""


@pytest.mark.full
def test_a_campaign_is_trained_and_survives_a_kill() -> None:
    """Two ideas, trained for real; the first process is killed in the middle, and the same command continues."""
    command = [sys.executable, "-c", IN_PROCESS, "study"]

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    run("open", *TINY, "optimizer.lr=1e-5")
    words = [*command, "try", "optimizer.lr=3e-2", "batch=1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    book = Path("runs/study", FILE)
    while '"event": "pair"' not in book.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with book.open("a") as file:
        file.write('{"schema": 1, "event": "pa')
    tried = run("try", "optimizer.lr=3e-2", "batch=8")
    assert tried["state"] == "kept" and tried["better_by"] > 0 and len(set(tried["seeds"])) == len(tried["seeds"])
    assert run("try", "optimizer.lr=1e-6", "batch=4")["state"] == "rejected"
    assert run("list")["damaged_lines"] == 1


@pytest.mark.full
def test_metrics_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_local = start.run_local
    monkeypatch.setattr(start, "run_local", lambda run, apart, report: run_local(run, apart=False, report=report))
    trainer = campaign.TitanTrainer()
    runs = [((*TINY, "training.bad_steps=1", f"optimizer.lr={rate}"), 1) for rate in ("1e-3", "1e30")]
    losses = trainer.train(tmp_path / "sweep", runs, "last_loss")
    assert losses[0] is not None and losses[1] is None  # it diverged
    assert trainer.train(tmp_path / "sweep", runs[:1], "last_loss") == losses[:1]  # read, not trained again
    with pytest.raises(ConfigError, match=r"metric=nothing: .* has no such number; it has .*last_loss"):
        trainer.train(tmp_path / "sweep", runs[:1], "nothing")
    with pytest.raises(RunError, match="exit code 3; the same command tries it again"):
        campaign.read_metric(tmp_path, 3, "last_loss")


@pytest.mark.full
def test_other_spellings_machines_and_names_are_the_same_idea() -> None:
    identify = campaign.TitanTrainer().identify
    words = [(), ("optimizer.lr=1e-3",), ("parallelism=ddp", "metrics.console_every=3"), ("optimizer.lr=2e-3",)]
    ids = [identify(overrides, TINY, "last_loss") for overrides in words]
    assert ids[0] == ids[1] == ids[2] != ids[3]
