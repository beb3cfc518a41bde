"""What a later attempt takes up, after damage, errors that pass, other runs of the same name, and parents that went
on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import start
from tests.checkpoint.test_manager import stop_at
from tests.support.corruption import flip_bit
from tests.support.ranks import RankFailedError
from tests.support.runs import are_identical, begin_run, compose_tiny_run, read_checkpoint, read_step_records, train_run
from tests.support.tiers import full
from titan.checkpoint import manifest
from titan.checkpoint.remote import Remote, open_remote
from titan.errors import ConfigError
from titan.run import attempts
from titan.run.directory import read_attempts
from titan.weights.formats import open_weights


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", full("fsdp2")])
def test_a_run_all_of_whose_checkpoints_are_damaged_is_refused_each_time(layout: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=6", layout=layout)
    train_run(run, stop_at(2))
    (folder,) = manifest.list_complete(tmp_path)
    flip_bit(folder / "__0_0.distcp")
    with pytest.raises(
        RankFailedError, match=r"ConfigError: hydra.run.dir=.*step-3 is damaged .*and there is no other"
    ):
        train_run(run)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"step-3 was found damaged, and is not used; and there is no other"):
            begin_run(run)


class TestErrorsThatPass:
    """They change nothing: what could not be read now is there the next time."""

    @pytest.mark.full
    def test_while_copies_are_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"checkpoint.path=file://{tmp_path}/copies"
        run = compose_tiny_run(tmp_path / "runs" / "x", "checkpoint.every=2", "training.steps=6", url, layout="fsdp2")
        train_run(run, stop_at(3))
        shutil.rmtree(tmp_path / "runs")
        with monkeypatch.context() as broken:
            broken.setattr(
                Remote, "_copy_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
            seen = train_run(run)
        assert all("step-4 could not be fetched (rank 0: No space left on device); fix" in str(r.failure) for r in seen)
        assert Remote(f"file://{tmp_path}/copies/x").list_steps().keys() == {2, 4}
        assert train_run(run)[0].code == 0
        assert [line["step"] for line in read_step_records(run)] == [5, 6]

    @pytest.mark.full
    def test_while_checksums_are_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = compose_tiny_run(tmp_path, "training.steps=6", layout="fsdp2")
        train_run(run, stop_at(2))
        with monkeypatch.context() as broken:
            broken.setattr(
                manifest, "checksum_stream", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
            )
            seen = train_run(run)
        assert all("can't be read by rank 0 (" in str(rank.failure) for rank in seen)
        assert all("Nothing was changed" in str(rank.failure) for rank in seen)
        assert [f.name for f in manifest.list_complete(tmp_path)] == ["step-3"]

    @pytest.mark.full
    def test_a_damaged_checkpoint_that_can_not_be_set_aside_is_no_endless_loop(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = compose_tiny_run(tmp_path, "training.steps=6")
        train_run(run, stop_at(2))
        (folder,) = manifest.list_complete(tmp_path)
        flip_bit(folder / "__0_0.distcp")
        monkeypatch.setattr(manifest, "mark_damaged", lambda folder: None)
        with pytest.raises(RankFailedError, match="and can't be set aside; remove it or move it away"):
            train_run(run)


class TestRunsOfTheSameName:
    @pytest.mark.full
    def test_each_has_copies_of_its_own_below_runs(self, tmp_path: Path) -> None:
        places = {open_remote("s3://b/x", f"/a/runs/{name}").url for name in ("one/0", "two/0", "0")}
        assert places == {"s3://b/x/one/0", "s3://b/x/two/0", "s3://b/x/0"}
        assert open_remote("s3://b/x/", "/a/runs/b/runs/c").url == "s3://b/x/c"
        assert open_remote("s3://b/x", "/scratch/one").url == "s3://b/x/one"
        assert open_remote("copies", "/scratch/one").url == f"{Path.cwd()}/copies/one"
        assert open_remote("~/copies", "/scratch/one").url == f"{Path.home()}/copies/one"

    @pytest.mark.full
    def test_copies_of_another_run_are_neither_taken_nor_overwritten(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Both have begun before either has copied anything."""
        path = f"checkpoint.path={tmp_path}/copies"
        first = compose_tiny_run(tmp_path / "a" / "x", path, "checkpoint.every=0", "training.steps=6")
        second = compose_tiny_run(tmp_path / "b" / "x", path, "optimizer.lr=5e-2", "training.steps=6")
        train_run(first, stop_at(2))
        capfd.readouterr()
        Path(second.directory).mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"checkpoint.path=.*: holds another experiment"):
            begin_run(second)
        assert not (tmp_path / "b" / "x" / "run.yaml").exists()
        index = tmp_path / "copies" / "x" / "index.json"
        kept = index.read_text()
        index.unlink()
        (tmp_path / "copies" / "x" / "run.yaml").unlink()
        begin_run(second)
        index.write_text(kept)
        with pytest.raises(
            ConfigError, match=r"has checkpoints of another run of the same name, at .*copies/x; give another"
        ):
            begin_run(second)


@pytest.mark.full
def test_a_finished_run_whose_last_copy_was_cut_off_makes_it_up(tmp_path: Path) -> None:
    plain = compose_tiny_run(tmp_path / "runs" / "x", "evaluation.tokens=64")
    train_run(plain)
    assert begin_run(plain) is None
    owing = [f"checkpoint.path={tmp_path}/copies", "checkpoint.export=hf", "evaluation.tokens=64"]
    run = compose_tiny_run(tmp_path / "runs" / "x", *owing)
    assert train_run(run)[0].code == 0
    assert Remote(f"{tmp_path}/copies/x").list_steps().keys() == {3}
    assert (manifest.folder_of(tmp_path / "runs" / "x", 3) / "hf" / "config.json").is_file()
    assert begin_run(run) is None
    assert [line["step"] for line in read_step_records(run)] == [1, 2, 3]


class TestParentsThatGoOn:
    def weights(self, run: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: t for name, t in read_checkpoint(run, step).items() if name.startswith("model.")}

    @pytest.mark.full
    def test_given_weights_are_those_of_the_first_life(self, tmp_path: Path) -> None:
        parent = compose_tiny_run(tmp_path / "parent", "checkpoint.keep=9")
        train_run(parent)
        run = compose_tiny_run(tmp_path / "run", f"checkpoint.weights={tmp_path}/parent")
        Path(run.directory).mkdir()
        begin_run(run)  # and is killed before it saves
        train_run(compose_tiny_run(tmp_path / "parent", "checkpoint.keep=9", "training.steps=4"))
        with pytest.raises(
            ConfigError, match=r"checkpoint.weights=.*: are not the weights that the run in .* started from"
        ):
            begin_run(run)
        named = compose_tiny_run(tmp_path / "run", f"checkpoint.weights={tmp_path}/parent/checkpoints/step-3")
        first = {n: t for n, t in train_run(named)[0].first.items() if n.startswith("model.")}
        assert are_identical(first, self.weights(parent, 3))

    @pytest.mark.full
    def test_every_rank_opens_the_folder_that_was_settled(self, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path / "parent", "checkpoint.keep=9"))
        run = compose_tiny_run(tmp_path / "run", f"checkpoint.weights={tmp_path}/parent")
        Path(run.directory).mkdir()
        attempt = begin_run(run)
        assert isinstance(attempt, attempts.Attempt)
        assert attempt.weights == str(tmp_path / "parent" / "checkpoints" / "step-3")

    @pytest.mark.full
    def test_another_parent_than_the_first_lifes_is_refused(self, tmp_path: Path) -> None:
        for name, seed in (("a", 0), ("b", 1)):
            train_run(compose_tiny_run(tmp_path / name, f"training.seed={seed}"))
        train_run(compose_tiny_run(tmp_path / "run", f"checkpoint.weights={tmp_path}/a"))
        with pytest.raises(ConfigError, match="are not the weights that the run in"):
            begin_run(compose_tiny_run(tmp_path / "run", f"checkpoint.weights={tmp_path}/b", "training.steps=5"))

    @pytest.mark.full
    def test_a_parent_that_retires_the_checkpoint_meanwhile_does_not_matter(self, tmp_path: Path) -> None:
        parent = compose_tiny_run(tmp_path / "parent")
        last = train_run(parent)[0].last
        fork = compose_tiny_run(tmp_path / "fork", f"checkpoint.resume={tmp_path}/parent", "training.steps=4")
        begin_attempt = attempts.begin_attempt

        def late(*args: Any) -> Any:
            attempt = begin_attempt(*args)
            manifest.retire(manifest.folder_of(tmp_path / "parent", 3))
            return attempt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempts, "begin_attempt", late)
            assert are_identical(train_run(fork)[0].first, last)


@pytest.mark.full
def test_checkpoints_without_their_run_are_not_taken_up(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=6")
    train_run(run, stop_at(2))
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds checkpoints, and no run.yaml that says of which run"):
        begin_run(compose_tiny_run(tmp_path, "training.steps=6", "optimizer.lr=5e-2"))


class TestWhatAUserDoes:
    @pytest.mark.full
    @pytest.mark.parametrize("setting", ["resume", full("weights")])
    def test_a_folder_of_copies_may_be_named(self, setting: str, tmp_path: Path) -> None:
        parent = compose_tiny_run(tmp_path / "runs" / "x", f"checkpoint.path={tmp_path}/copies")
        last = train_run(parent)[0].last
        shutil.rmtree(tmp_path / "runs")
        run = compose_tiny_run(tmp_path / "other", f"checkpoint.{setting}={tmp_path}/copies/x", "training.steps=5")
        first = train_run(run)[0].first
        names = [n for n in last if setting == "resume" or n.startswith("model.")]
        assert all(torch.equal(first[name], last[name]) for name in names)

    @pytest.mark.full
    @pytest.mark.parametrize("layout", ["single", full("fsdp2")])
    def test_a_fork_that_is_refused_leaves_its_name_free(
        self, layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        train_run(compose_tiny_run(tmp_path / "parent"))
        fork = [f"checkpoint.resume={tmp_path}/parent", "training.steps=5"]
        refused = compose_tiny_run(tmp_path / "fork", *fork, "optimizer=sgd", layout=layout)
        if layout == "single":
            with pytest.raises(ConfigError, match="with another model or optimizer"):
                start.run_local(refused)
        else:
            assert start.run_local(refused) == 2
            assert "with another model or optimizer" in capfd.readouterr().err
        assert not (tmp_path / "fork").exists()

    @pytest.mark.full
    def test_a_life_that_is_refused_is_not_recorded(self, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path))
        (folder,) = manifest.list_complete(tmp_path)
        flip_bit(folder / "__0_0.distcp")
        with pytest.raises(ConfigError, match="and there is no other"):
            start.run_local(compose_tiny_run(tmp_path, "training.steps=5"))
        assert [document["config"]["training"]["steps"] for document in read_attempts(tmp_path)] == [3]

    @pytest.mark.full
    def test_a_life_that_has_trained_stays_recorded_whatever_ends_it(self, tmp_path: Path) -> None:
        run = compose_tiny_run(tmp_path)
        Path(run.directory).mkdir(exist_ok=True)
        attempt = begin_run(run)
        assert isinstance(attempt, attempts.Attempt)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 4.0, "attempt": 1}) + "\n")
        attempts.withdraw_attempt(run, attempt)
        assert [document["attempt"] for document in read_attempts(tmp_path)] == [1]
        (tmp_path / "metrics.jsonl").unlink()
        attempts.withdraw_attempt(run, attempt)
        assert read_attempts(tmp_path) == []

    @pytest.mark.full
    def test_what_was_passed_over_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        train_run(compose_tiny_run(tmp_path, "checkpoint.every=2"))
        (manifest.folder_of(tmp_path, 3) / "__0_0.distcp").write_bytes(b"")
        assert open_weights(tmp_path).path.endswith("step-2")
        assert "checkpoint step-3 is damaged and not used: __0_0.distcp has 0 bytes" in capsys.readouterr().err
        manifest.mark_damaged(manifest.folder_of(tmp_path, 3))
        with pytest.raises(ConfigError, match="step-3: is corrupt; give another checkpoint"):
            open_weights(manifest.folder_of(tmp_path, 3))
