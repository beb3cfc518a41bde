"""`python -m titan.convert`: what it writes and shows, what it refuses, and how it begins anew."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.made_weights import LLAMA, QWEN3, has_tensors, write_hf, write_meta, write_native
from tests.support.tiers import full
from titan import convert
from titan.errors import ConfigError
from titan.weights import convert as conversion
from titan.weights import export
from titan.weights.formats import open_weights


def rows(screen: str) -> dict[str, str]:
    lines = [line.strip().partition("  ") for line in screen.splitlines() if line.startswith("  ")]
    return {name: value.strip() for name, _, value in lines}


@pytest.mark.full
@pytest.mark.parametrize("target", ["hf", "meta", "titan"])
@pytest.mark.parametrize("source", [write_native, write_hf, write_meta])
def test_from_every_format_to_every_format(source: Any, target: str, tmp_path: Path) -> None:
    source(tmp_path / "a", LLAMA)
    weights = open_weights(tmp_path / "a")
    wanted = {name: weights.read(name) for name in weights.shapes}
    arguments = [str(tmp_path / "a"), f"to={tmp_path / 'b'}", f"format={target}", "dtype=keep"]
    assert convert.main([*arguments, *(["meta_ranks=2"] if target == "meta" else ["shard_gb=0.0001"])]) == 0
    assert has_tensors(open_weights(tmp_path / "b"), wanted)
    assert len(list((tmp_path / "b").glob({"hf": "*.safetensors", "meta": "*.pth", "titan": "*.distcp"}[target]))) > 1
    assert not list((tmp_path / "b").glob(".*.tmp")) and not (tmp_path / "b" / conversion.MARK).exists()


def test_it_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_native(tmp_path / "run" / "checkpoints" / "step-3", LLAMA)
    assert convert.main([f"{tmp_path}/run", f"to={tmp_path}/b"]) == 0
    screen = capsys.readouterr()
    found = rows(screen.out)
    assert screen.err == "" and screen.out.startswith("converted:\n")
    assert found["from"] == f"{tmp_path}/run: titan, float32"
    assert found["model"] == "Llama, 78,144 parameters, 2 layers of width 64"
    assert found["to"] == f"{tmp_path}/b: hf, bf16"
    assert found["files"] == "1, 158 kB"
    assert found["tokenizer"] == "titan4k"


@pytest.mark.parametrize(
    ("package", "arguments", "sentence"),
    [
        pytest.param("tokenizers", ["a", "to=b"], "to=b: writing the tokenizer titan4k needs the package tokenizers: "
                     "pip install tokenizers", id="tokenizers"),
        pytest.param("huggingface_hub", ["some/model", "to=b"], "some/model: there is no such directory, and a model "
                     "of the hub needs the package huggingface_hub: pip install huggingface_hub", id="hub"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_before_work_starts(
    package: str,
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_native(Path("a"), LLAMA)
    monkeypatch.setitem(sys.modules, package, None)
    assert convert.main(arguments) == 2
    assert capsys.readouterr().err == f"titan: {sentence}\n"
    assert not Path("b").exists()
    assert convert.main(["a", "to=b", "format=titan"]) == 0


def test_a_hub_out_of_reach_is_not_the_only_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=refuse))
    assert convert.main(["some/model", "to=b"]) == 2
    sentence = (
        "titan: some/model: there is no such directory, and the hub can't be reached (ConnectionError: no route); "
    )
    assert capsys.readouterr().err.startswith(sentence)


SOURCES = {"titan": write_native, "hf": write_hf, "meta": lambda folder, model: write_meta(folder, model)}
REFUSED = [
    pytest.param([], "to is missing: the folder to write; give to=VALUE.", id="no-target"),
    pytest.param(["to=b", "form=hf"], "form=hf: there is no such setting; did you mean 'format'?", id="unknown"),
    pytest.param(["to=b", "format=gguf"], "format=gguf: choose one of hf, meta, titan", id="format"),
    pytest.param(["to=b", "dtype=fp8"], "dtype=fp8: choose one of fp32, bf16, fp16, keep", id="dtype"),
    pytest.param(["to=b", "shard_gb=0"], "shard_gb=0: must be above 0", id="no-size"),
    pytest.param(["to=b", "meta_ranks=2"], "meta_ranks=2: applies to format=meta", id="ranks"),
    pytest.param(["to=b", "format=meta", "meta_ranks=3"], "meta_ranks=3: must divide model.heads=4", id="heads"),
    pytest.param(["to=a"], "to=a: is inside a", id="onto-itself"),
    pytest.param(["to=a/b"], "to=a/b: is inside a", id="into-itself"),
    pytest.param(["to=link"], "to=link: is inside a", id="through-a-link"),
    pytest.param(["to=full"], "to=full: is not empty; choose another folder, or give overwrite=true", id="not-empty"),
    pytest.param(["to=file"], "to=file: is a file", id="a-file"),
    pytest.param(["to=file/b"], "file/b: can't be written to", id="below-a-file"),
    pytest.param(["to=b", "gone"], "gone: not understood; give KEY=VALUE", id="twice"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_refusals(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_native(Path("a"), LLAMA)
    before = sorted(Path("a").iterdir())
    Path("link").symlink_to("a")
    Path("full").mkdir()
    Path("full/x").touch()
    Path("file").touch()
    assert convert.main(["a", *arguments]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.startswith("titan: ") and err.count("\n") == 1
    assert sorted(Path("a").iterdir()) == before and not Path("b").exists()


def test_what_is_no_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main([f"{tmp_path}/gone", f"to={tmp_path}/b"]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    write_native(tmp_path / "q", QWEN3)
    assert convert.main([f"{tmp_path}/q", f"to={tmp_path}/b", "format=meta"]) == 2
    assert "Meta has no Qwen3" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_run_whose_checkpoint_is_the_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_native(tmp_path / "a", LLAMA)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "checkpoints" / "step-3")
    target = tmp_path / "b" / "checkpoints" / "step-3"
    assert convert.main([f"{tmp_path}/b", f"to={target}", "overwrite=true"]) == 2
    assert ": is inside " in capsys.readouterr().err
    open_weights(tmp_path / "b")


FOREIGN = [
    pytest.param("/", "is a home directory or above one", id="root"),
    pytest.param("home", "is a home directory or above one", id="home"),
    pytest.param(".", "is a home directory or above one", id="above-home"),
    pytest.param("runs/x", "is a run's directory", id="run"),
    pytest.param("runs", "holds the run x", id="runs"),
    pytest.param("other", "holds config.json, which titan.convert did not write", id="foreign-model"),
    pytest.param("link", "holds config.json, which titan.convert did not write", id="link"),
]


@pytest.mark.parametrize(("target", "sentence"), FOREIGN)
def test_only_what_a_conversion_wrote_is_replaced(
    target: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_native(Path("a"), LLAMA)
    for file in ("home/x", "runs/x/run.yaml", "other/config.json", "other/model.safetensors"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    Path("link").symlink_to("other")
    assert convert.main(["a", f"to={target}", "overwrite=true"]) == 2
    assert capsys.readouterr().err.startswith(f"titan: to={target}: {sentence}")
    assert Path("other/config.json").exists() and Path("other/model.safetensors").exists()


def test_a_disk_that_is_too_small_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(tmp_path / "a", LLAMA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=67_200_000))
    assert convert.main([f"{tmp_path}/a", f"to={tmp_path}/b", "dtype=fp32"]) == 2
    assert "needs 67.4 MB, and the disk has 67.2 MB free" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert convert.main([f"{tmp_path}/a", f"to={tmp_path}/b", "dtype=bf16", "format=hf"]) == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=67_300_000))
    assert convert.main([f"{tmp_path}/a", f"to={tmp_path}/b", "dtype=bf16"]) == 0


@pytest.mark.parametrize("target", ["hf", "meta", "titan"])
def test_an_interrupted_conversion_does_not_count_and_begins_anew(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, calls = write_native(tmp_path / "a", LLAMA), list[str]()
    arguments = [f"{tmp_path}/a", f"to={tmp_path}/b", f"format={target}", "dtype=keep", "shard_gb=0.0001"]

    def interrupted(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        calls.append(name)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(export, "cast_tensor", interrupted)
        patch.setattr("titan.weights.export.cast_tensor", interrupted)
        assert convert.main(arguments) == 130
    assert any((tmp_path / "b").iterdir())
    (tmp_path / "b" / ".__0_0.distcp.1.tmp").touch()  # as a killed conversion leaves
    with pytest.raises(ConfigError):
        open_weights(tmp_path / "b")
    assert convert.main(arguments) == 0
    assert has_tensors(open_weights(tmp_path / "b"), written)
    assert not list((tmp_path / "b").glob(".*.tmp"))


def test_a_full_disk_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write_native(tmp_path / "a", LLAMA)
    monkeypatch.setattr(export.Export, "finish", full)
    assert convert.main([f"{tmp_path}/a", f"to={tmp_path}/b"]) == 1
    assert "can't be written (No space left on device)" in capsys.readouterr().err
    assert (tmp_path / "b" / conversion.MARK).exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("meta", "meta"), ("meta", "titan"), ("titan", "meta"), ("titan", "titan"), full("hf", "meta"),
        full("titan", "hf"),
    ],
)  # fmt: skip
def test_overwriting_leaves_nothing_of_what_was_there(first: str, second: str, tmp_path: Path) -> None:
    write_native(tmp_path / "a", LLAMA)
    common = [f"{tmp_path}/a", "dtype=keep"]
    assert convert.main([*common, f"to={tmp_path}/b", f"format={first}", "shard_gb=0.00005"]) == 0
    (tmp_path / "b" / "README.md").write_text("mine")
    assert convert.main([*common, f"to={tmp_path}/b", f"format={second}", "overwrite=true"]) == 0
    assert convert.main([*common, f"to={tmp_path}/c", f"format={second}"]) == 0
    left, wanted = ({file.name for file in (tmp_path / f).iterdir()} for f in ("b", "c"))
    assert left == wanted | {"README.md"} and (tmp_path / "b" / "README.md").read_text() == "mine"
    assert open_weights(tmp_path / "b").shapes == open_weights(tmp_path / "a").shapes


def test_a_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with conversion.show_progress(2_000_000) as show:
        show(500_000)
        show(1_500_000)
    assert "2.00M/2.00M" in capsys.readouterr().err


@pytest.mark.full
def test_help_and_refusals_come_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys, titan.convert as c\n"
        "codes = [c.main(['--help']), c.main(['x']), c.main(['x', 'to=' + sys.argv[1]])]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    (tmp_path / "x").touch()
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] False"
    assert all(word in done.stdout for word in ("SOURCE", "to=", "meta_ranks=1", "overwrite=false", "Exit codes"))


@pytest.mark.full
def test_a_checkpoint_of_a_conversion_names_its_files(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", LLAMA)
    assert convert.main([f"{tmp_path}/a", f"to={tmp_path}/b", "format=titan"]) == 0
    found = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert found["step"] == 0 and found["model"]["_target_"] == "titan.model.schema.Llama"
    assert set(found["files"]) == {"__0_0.distcp", ".metadata"}
