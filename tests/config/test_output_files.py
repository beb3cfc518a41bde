"""Files that `to=` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan.config.output_files import check_output_file, check_output_files, write_output_file
from titan.errors import ConfigError, RunError

LONG = "x" * 300


@pytest.mark.parametrize(
    ("name", "endings", "sentence"),
    [
        pytest.param("a.pdf", (".html", ".json"), "to=a.pdf: unknown file format; use one of .html, .json.", id="form"),
        pytest.param("a", (".yaml",), "to=a: unknown file format; use .yaml.", id="no-ending"),
        pytest.param("folder", (".json",), "to=folder: is a directory; give another file.", id="directory-first"),
        pytest.param("folder", (), "to=folder: is a directory; give another file.", id="directory"),
        pytest.param("gone/a", (), "to=gone/a: there is no directory gone; give another file.", id="no-folder"),
        pytest.param(
            "/proc/a",
            (),
            "to=/proc/a: nothing can be written into /proc (No such file or directory); give another file.",
            id="no-files",
        ),
        pytest.param(LONG, (), f"to={LONG}: a name in it has more than 255 bytes; give a shorter one.", id="long-name"),
    ],
)
def test_what_can_not_be_written_is_rejected(
    name: str, endings: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as rejected:
        check_output_file(name, endings)
    assert str(rejected.value) == sentence
    assert sorted(map(str, Path().iterdir())) == ["folder"]


@pytest.mark.parametrize("name", ["file/a", "file/mine/a", "link/a"])
def test_a_folder_that_can_not_be_made_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file is a file, not a directory; give another file"):
        check_output_file(f"{tmp_path}/{name}", makes_folder=True)


OWN = {
    "a.html": "<!doctype html>\n<meta content=\"default-src 'none'; style-src 'unsafe-inline'\">\n<title>x",
    "a.md": "# runs\n\nText.\n\n`2030-01-01 10:00: python -m titan.compare runs to=a.md`\n",
    "a.csv": "corpus,variant,baseline,n,d,runs,loss\n",
    "a.json": '{\n "from": "runs/x"\n}\n',
    "a.jsonl": '{"prompt": "a", "text": "b", "tokens": [1], "finish_reason": "stop"}\n',
    "a.yaml": "# a CPU, measured by titan.calibrate.\n",
}
FOREIGN = {
    "a.html": "<!doctype html>\n<title>x",
    "a.md": "# Results\n",
    "a.csv": "N,D,loss\n",
    "a.json": '{"from": 1}',
    "result.json": '{\n "finished": true\n}\n',
    "a.jsonl": '{"prompt": "a"}\n{"prompt": "b", "finish_reason": "stop"}\n',
    "a.yaml": "device: cpu\n",
    "a.tiktoken": "IQ== 0\n",
}


@pytest.mark.parametrize("name", OWN)
def test_a_file_that_titan_wrote_is_replaced(name: str, tmp_path: Path) -> None:
    for text in (OWN[name], ""):
        (tmp_path / name).write_text(text)
        write_output_file(check_output_file(f"{tmp_path}/{name}"), "new", replaces_own=True)
        assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize("name", FOREIGN)
def test_another_file_is_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FOREIGN[name])
    (tmp_path / "link").symlink_to(name)
    for given in (name, "link"):
        with pytest.raises(ConfigError, match="not recognised as a file that titan wrote; give another file, or del"):
            check_output_file(f"{tmp_path}/{given}")
    with pytest.raises(RunError, match="not recognised as a file that titan wrote"):
        write_output_file(tmp_path / name, "new", replaces_own=True)
    assert (tmp_path / name).read_text() == FOREIGN[name]


def test_a_file_that_the_command_reads_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(OWN["a.csv"])
    (tmp_path / "link.csv").symlink_to("a.csv")
    with pytest.raises(ConfigError, match="is a file that this command reads; give another file"):
        check_output_files(f"{tmp_path}/link.csv", (".csv",), [f"{tmp_path}/a.csv"])


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    file = check_output_file(f"/dev/fd/{write_end}")  # as in to=>(command)
    write_output_file(file, "text")
    assert os.read(read_end, 9) == b"text"
    os.close(read_end)
    os.close(write_end)


def test_a_device_has_no_ending() -> None:
    assert check_output_file("/dev/null", (".json",)) == Path("/dev/null")


def test_several_files_or_none(tmp_path: Path) -> None:
    assert check_output_files(None, ()) == () == check_output_files((), ())
    assert check_output_files(f"{tmp_path}/a", ()) == (tmp_path / "a",)
    assert check_output_files([f"{tmp_path}/a", f"{tmp_path}/b"], ()) == (tmp_path / "a", tmp_path / "b")


def test_a_folder_is_made_where_the_command_does(tmp_path: Path) -> None:
    file = check_output_file(f"{tmp_path}/mine/cluster/here.yaml", (".yaml",), makes_folder=True)
    write_output_file(file, "text", makes_folder=True)
    assert file.read_text() == "text"


def test_data_is_json(tmp_path: Path) -> None:
    write_output_file(tmp_path / "a", {"b": [1]})
    assert (tmp_path / "a").read_text() == '{\n "b": [\n  1\n ]\n}\n'


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    write_output_file(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"


def test_a_full_disk_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"full: can't be written \(No space left on device\)"):
        write_output_file(tmp_path / "full", "text")
