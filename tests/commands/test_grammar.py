"""One grammar for all commands: help, an unknown key, a wrong value, a missing run, and no packages."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.measure import command as measure
from tests.measure import fit_costs, predicted
from tests.support.composing import compose_test_run
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
    train,
)
from titan.config.command import Command
from titan.console import requirements
from titan.dataset.tokenizers import train as tokenizer
from titan.profile import __main__ as profile

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A command, and what it must reject.

    Attributes:
        name: of the module.
        main: takes the words.
        valid: words that a valid command line begins with.
        wrong: a key with a value of the wrong type or out of range.
        operand: the name of the required first word; empty: none.
        help: how the help begins.
    """

    name: str
    main: Callable[[Sequence[str]], int]
    valid: tuple[str, ...]
    wrong: str
    operand: str = ""


CASES = [
    Case("titan.train", train.main, (), "training.steps=few"),
    Case("titan.prepare", prepare.main, ("dataset=stdlib",), "verify=perhaps"),
    Case("titan.data", data.main, ("dataset=stdlib",), "step=three"),
    Case("titan.generate", generate.main, ("runs/x", "prompt=x"), "max_tokens=0", "MODEL"),
    Case("titan.evaluate", evaluate.main, ("runs/x",), "average=0", "MODEL"),
    Case("titan.replay", replay.main, ("runs/x", "step=3"), "tokens=0", "RUN"),
    Case("titan.status", status.main, ("runs/x",), "watch=perhaps", "DIRECTORY"),
    Case("titan.profile", profile.main, ("runs/x",), "rank=-1", "RUN"),
    Case("titan.campaign", campaign.main, ("study", "list"), "budget=0"),
    Case("titan.compare", compare.main, (".",), "margin=0", "DIR"),
    Case("titan.law", law.main, (".",), "replicates=10", "RUNS"),
    Case("titan.convert", convert.main, ("runs/x", "to=y"), "format=onnx", "SOURCE"),
    Case("titan.plan", plan.main, ("model=debug",), "plan.keep=0"),
    Case("titan.prove", prove.main, ("model=debug",), "training.steps=few"),
    Case("titan.calibrate", calibrate.main, ("to=x.yaml",), "ranks=0"),
    Case("tests.measure", measure.main, ("suite=tiny",), "rounds=0"),
    Case("tests.measure.predicted", predicted.main, ("cluster=x.yaml",), "steps=1"),
    Case("tests.measure.fit_costs", fit_costs.main, (), "to="),
    Case("titan.dataset.tokenizers.train", tokenizer.main, ("to=x.tiktoken",), "ranks=0"),
]
every_command = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has begun, runs/x."""
    folder = tmp_path_factory.mktemp("grammar")
    run = compose_test_run(
        ["dataset=synthetic", "dataset.tokens=65536", "cluster=cpu", f"hydra.run.dir={folder}/runs/x"]
    )
    Path(run.directory).mkdir(parents=True)
    begin_run(run)
    (folder / "runs/grid").mkdir()
    (folder / "runs/grid/multirun.yaml").touch()
    (folder / "runs/empty").mkdir()
    (folder / "swept/lr-1").mkdir(parents=True)
    for file in ("multirun.yaml", "lr-1/run.yaml"):
        (folder / "swept" / file).touch()
    return folder


@pytest.fixture(autouse=True)
def working_directory(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)


def rejected(case: Case, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence that rejects a command line."""
    assert case.main(words) == 2
    screen = capsys.readouterr()
    assert screen.out == "" and screen.err.startswith("titan: ") and screen.err.count("\n") == 1
    return screen.err


@every_command
def test_help_has_the_same_sections(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.main(["--help"]) == 0
    text = capsys.readouterr().out
    headings = [f"\n\nUsage: python -m {case.name} ", "\n\nExamples:\n", "\n\nSettings:\n", "\n\nExit codes: 0 "]
    positions = [text.index(heading) for heading in headings]
    assert positions == sorted(positions) and positions[0] < 120
    examples = text[positions[1] : positions[2]]
    assert f"\n  python -m {case.name}" in examples and text.count("\n\nExamples:\n") == 1
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.full
@every_command
def test_an_unknown_key_is_rejected(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unheard_of" in rejected(case, [*case.valid, "unheard_of=1"], capsys)


@pytest.mark.full
@every_command
def test_a_wrong_value_is_rejected(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"titan: {case.wrong}: " in rejected(case, [*case.valid, case.wrong], capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "typed", "key"),
    [
        ("titan.prepare", "dry_rn=true", "dry_run"),
        ("titan.data", "rowz=1", "rows"),
        ("tests.measure", "suit=cpu", "suite"),
        ("titan.evaluate", "avrage=2", "average"),
        ("titan.replay", "tolerence=2", "tolerance"),
        ("titan.plan", "serch=true", "plan.search"),
        ("titan.evaluate", "seq_len=32", "training.seq_len"),
        ("titan.data", "seed=1", "training.seed"),
        ("titan.data", "modle=debug", "model"),
    ],
)
def test_the_nearest_key_of_the_command_or_of_titan_train_is_suggested(
    name: str, typed: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case.name == name)
    sentence = f"titan: {typed}: there is no such setting; did you mean {key!r}? See --help and "
    assert rejected(case, [*case.valid, typed], capsys) == f"{sentence}python -m titan.train --cfg job.\n"


OPTIONS = ("-m", "--multirun", "--cfg", "--cfg=job", "--info", "--hydra-help")


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "titan.train"], ids=lambda case: case.name)
def test_an_option_of_titan_train_is_rejected_alike(
    case: Case, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.name != "titan.plan" or option not in ("-m", "--multirun"):
        sentence = f"titan: {option}: is an option of titan.train; leave it out.\n"
        assert rejected(case, [*case.valid, option], capsys) == sentence


@every_command
def test_an_option_of_another_grammar_is_rejected(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--unheard-of" in rejected(case, [*case.valid, "--unheard-of"], capsys)


@pytest.mark.parametrize("case", [case for case in CASES if case.operand], ids=lambda case: case.name)
def test_a_missing_run_is_named(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = f"titan: {case.operand} is missing: "
    assert rejected(case, [], capsys).startswith(sentence)
    assert rejected(case, [*case.valid[1:], case.wrong], capsys).startswith(sentence)
    assert rejected(case, ["", *case.valid[1:]], capsys).startswith(sentence)


@pytest.mark.parametrize("case", [case for case in CASES if case.operand], ids=lambda case: case.name)
@pytest.mark.parametrize("name", [pytest.param("gone/lr=0.1", id="gone"), pytest.param("x" * 300, id="long")])
def test_a_run_that_does_not_exist_is_named(case: Case, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = rejected(case, [name, *case.valid[1:]], capsys)
    assert name[:100] in sentence


def test_a_long_path_in_a_setting_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such file" in rejected(CASES[0], [f"resume={'x' * 300}"], capsys)


@pytest.mark.parametrize("case", [case for case in CASES if case.operand], ids=lambda case: case.name)
def test_a_directory_that_does_not_exist_is_rejected_alike(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gone", "runs/gone"):
        assert rejected(case, [name, *case.valid[1:]], capsys).startswith(f"titan: {name}: there is no such directory")


@pytest.mark.parametrize("main", [data.main, profile.main, lambda words: replay.main([*words, "step=3"])])
def test_what_is_no_run_is_rejected_alike(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    problems = {
        "runs/gone": "there is no such directory",
        "runs/grid": "holds a sweep",
        "runs/empty": "holds no run",
        "runs/x/run.yaml": "is a file",
    }
    for name, problem in problems.items():
        assert main([name]) == 2
        assert capsys.readouterr().err.startswith(f"titan: {name}: {problem}")


TAKE_ONE_RUN: dict[str, tuple[Callable[[Sequence[str]], int], tuple[str, ...], str]] = {
    "replay": (replay.main, ("swept", "step=3"), "swept"),
    "replay against": (replay.main, ("runs/x", "step=3", "against=swept"), "against=swept"),
    "evaluate": (evaluate.main, ("swept",), "swept"),
    "generate": (generate.main, ("swept", "prompt=x"), "swept"),
    "convert": (convert.main, ("swept", "to=y"), "swept"),
    "profile": (profile.main, ("swept",), "swept"),
    "data": (data.main, ("swept",), "swept"),
    "train resume": (train.main, ("resume=swept",), "resume=swept"),
    "train checkpoint.resume": (train.main, ("checkpoint.resume=swept",), "checkpoint.resume=swept"),
    "train checkpoint.weights": (train.main, ("checkpoint.weights=swept",), "checkpoint.weights=swept"),
}


@pytest.mark.full
@pytest.mark.parametrize(("main", "words", "typed"), TAKE_ONE_RUN.values(), ids=TAKE_ONE_RUN)
def test_a_sweep_in_place_of_a_run_names_one_of_its_trials(
    main: Callable[[Sequence[str]], int], words: Sequence[str], typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if main is train.main:
        words = [*words, "dataset=synthetic", "dataset.tokens=65536"]
    assert main(words) == 2
    sentence = f"titan: {typed}: holds a sweep; give one of its trials, such as swept/lr-1"
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


def test_a_run_and_a_file_in_place_of_a_setting_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan_case = next(case for case in CASES if case.name == "titan.plan")
    assert "or as resume=runs/x" in rejected(plan_case, ["runs/x"], capsys)
    assert "dataset=text dataset.path=swept/multirun.yaml" not in rejected(plan_case, ["swept/multirun.yaml"], capsys)
    assert "dataset=text dataset.path=runs/x/env.json" in rejected(plan_case, ["runs/x/env.json"], capsys)


FILE_WRITERS = {
    "titan.generate", "titan.evaluate", "titan.replay", "titan.compare", "titan.plan", "titan.prove", "titan.calibrate",
    "titan.law", "titan.dataset.tokenizers.train",
    "tests.measure", "tests.measure.predicted", "tests.measure.fit_costs",
}  # fmt: skip
"""Commands that write a file where `to=` says."""


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FILE_WRITERS], ids=lambda case: case.name)
def test_a_file_of_another_format_is_rejected(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in case.valid if not word.startswith("to=")]
    assert "titan: to=x.odd: unknown file format; use " in rejected(case, [*words, "to=x.odd"], capsys)


def test_a_missing_file_of_a_cluster_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted.main(["cluster=none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("titan: cluster=none.yaml: there is no such file; ")


def test_all_commands_are_here() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {target.partition(":")[0].removesuffix(".__main__") for target in scripts.values()}
    assert modules <= {case.name for case in CASES}
    declared = [
        module for module in list(sys.modules.values()) if isinstance(getattr(module, "COMMAND", None), Command)
    ]
    names = {module.COMMAND.name for module in declared if module.COMMAND.name.startswith("titan.")}
    assert names == {case.name for case in CASES if case.name.startswith("titan.")} - {"titan.train"}


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("titan.")], ids=lambda case: case.name)
def test_without_packages_one_sentence_says_what_to_do(case: Case) -> None:
    command = [sys.executable, "-S", "-m", case.name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"titan: {sys.executable} has no torch, ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "prefix", "advice"),
    [
        pytest.param([".venv/bin/activate"], "/usr", "activate titan's environment: source ", id="activate"),
        pytest.param([".venv/bin/activate", "pyproject.toml"], "{}/.venv", " -m pip install -e ", id="broken"),
        pytest.param(["pyproject.toml"], "/usr", " -m pip install -e ", id="clone"),
        pytest.param([], "/usr", " -m pip install hydra-core pyyaml", id="installed"),
    ],
)
def test_the_way_out_without_packages(files: list[str], prefix: str, advice: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    sentence = requirements.describe_missing(["hydra", "yaml"], tmp_path, prefix.format(tmp_path))
    assert advice in sentence and sentence.startswith(f"{sys.executable} has no hydra, yaml; ")


@pytest.mark.parametrize("file", ["train.py", "profile/__main__.py"])
def test_a_module_of_titan_that_is_started_as_a_script_is_named(file: str) -> None:
    script = requirements.find_script(SimpleNamespace(__file__=str(ROOT / "titan" / file), __spec__=None))
    assert script == ROOT / "titan" / file
    name = file.partition("/")[0].removesuffix(".py")
    assert requirements.describe_script(script).endswith(f": is a module of a package; write -m titan.{name}")


def test_scripts_of_others_and_modules_are_no_such_scripts() -> None:
    file = str(ROOT / "titan" / "train.py")
    for main in (None, SimpleNamespace(), SimpleNamespace(__file__="/x/a.py", __spec__=None)):
        assert requirements.find_script(main) is None
    assert requirements.find_script(SimpleNamespace(__file__=file, __spec__=object())) is None


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(requirements, "OLDEST_PYTHON", (9, 1))
    with pytest.raises(SystemExit, match="2"):
        requirements.check_requirements(["-m"])
    assert "and titan needs 9.1 or newer; install it" in capsys.readouterr().err


def test_a_library_is_imported_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda package: None)
    for program in ([], ["/x/notebook.py"], ["-c"]):
        requirements.check_requirements(program)
    for program in (["-m"], ["/x/bin/titan-train"]):
        with pytest.raises(SystemExit, match="2"):
            requirements.check_requirements(program)


def test_the_packages_are_those_that_installing_brings() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(requirements.REQUIREMENTS.values()) == {line.partition(">")[0] for line in dependencies}
