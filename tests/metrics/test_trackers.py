from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.processes import LIMIT, wait_until
from titan.metrics import trackers, wandb
from titan.metrics.schema import Metrics, MLflow, Tracker, Trackio
from titan.metrics.tracker_run import RunDescription, extract_scalars, hide_in_labels, remove_secrets, server_answers
from titan.metrics.trackers import Trackers, find_viewers, open_trackers
from titan.metrics.wandb import find_online_obstacle, has_wandb_key

KEY = "0123456789abcdef" * 2 + "01234567"


class Listing:
    """A tracker that keeps what it gets, and fails where it is asked to."""

    def __init__(self, fails: str = "", hangs: threading.Event | None = None) -> None:
        self.fails, self.hangs = fails, hangs
        self.records: list[Mapping[str, Any]] = []
        self.result: Mapping[str, Any] | None = None

    def open(self, warn: Callable[[str], None]) -> Listing:
        self._maybe("open")
        return self

    def log(self, record: Mapping[str, Any]) -> None:
        self._maybe("log")
        self.records.append(record)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._maybe("finish")
        self.result = result

    def _maybe(self, verb: str) -> None:
        if self.fails == verb:
            if self.hangs is not None:
                self.hangs.wait(LIMIT)
            raise OSError(f"no {verb}, key {KEY}\nsecond line")


def log_steps(all_trackers: Trackers, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        all_trackers.log({"step": step, "loss": 1.0 / step})
    all_trackers.finish({"loss": 0.5})


def test_every_tracker_gets_all_in_order() -> None:
    warnings: list[str] = []
    a, b = Listing(), Listing()
    log_steps(Trackers({"a": a.open, "b": b.open}, warnings.append), 500)
    assert [record["step"] for record in a.records] == [record["step"] for record in b.records] == [*range(1, 501)]
    assert a.result == b.result == {"loss": 0.5}
    assert warnings == []


@pytest.mark.parametrize("verb", ["open", "log", "finish"])
def test_trackers_that_raise_and_hang_are_dropped_with_one_warning_each(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    release, warnings, good = threading.Event(), list[str](), Listing()
    openers = {"raises": Listing(verb).open, "hangs": Listing(verb, release).open, "good": good.open}
    log_steps(Trackers(openers, warnings.append, patience=0.2))
    assert not release.is_set()
    release.set()
    late = "it did not close within 0.2 s of the end of the run"
    assert set(warnings) == {
        f"raises: no {verb}, key ***; the run continues without it.", f"hangs: {late}; the run continues without it.",
    }  # fmt: skip
    assert len(warnings) == 2 and len(good.records) == 3 and good.result is not None


@pytest.mark.parametrize("hurry", [False, True], ids=["finished", "stopped"])
def test_a_tracker_may_send_longer_after_a_finished_run(hurry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "NOTICE_SECONDS", 0.05)
    release, warnings, slow = threading.Event(), list[str](), Listing()

    def wait(result: Mapping[str, Any]) -> None:
        release.wait(LIMIT)
        slow.result = result

    def warn(line: str) -> None:
        warnings.append(line)
        if not hurry:
            release.set()  # it has sent everything once the user is warned

    slow.finish = wait  # type: ignore[method-assign]
    both = Trackers({"slow": slow.open}, warn, patience=0.2, longer_patience={"slow": LIMIT})
    both.finish({"loss": 0.5}, hurry=hurry)
    assert slow.result == (None if hurry else {"loss": 0.5})
    late = "slow: it did not close within 0.2 s of the end of the run; the run continues without it."
    notice = f"slow: it is still sending; the run waits {0.2 if hurry else LIMIT:g} s at most."
    assert warnings == [notice, *([late] if hurry else [])]
    release.set()


def test_a_tracker_that_exits_is_dropped() -> None:
    def leave(warn: Callable[[str], None]) -> Listing:
        raise SystemExit(3)

    warnings: list[str] = []
    log_steps(Trackers({"bad": leave}, warnings.append))
    assert warnings == ["bad: SystemExit 3; the run continues without it."]


def test_too_long_a_backlog_drops_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_QUEUED_RECORDS", 5)
    release, warnings = threading.Event(), list[str]()
    log_steps(Trackers({"slow": Listing("open", release).open}, warnings.append, patience=0.2), 20)
    release.set()
    assert warnings == ["slow: its queue is full (5 records); the run continues without it."]


def test_warnings_are_shown_in_the_training_thread_and_records_are_copies() -> None:
    threads: list[threading.Thread] = []
    listing = Listing()
    both = Trackers(
        {"bad": Listing("log").open, "good": listing.open}, lambda _: threads.append(threading.current_thread())
    )
    record = {"step": 1, "loss": 1.0}
    both.log(record)
    record["step"] = 99
    both.finish({})
    both.finish({})
    assert threads == [threading.main_thread()]
    assert listing.records == [{"step": 1, "loss": 1.0}]


SCALARS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "training": ({"step": 1, "tokens": 8, "loss": 2}, {"train/tokens": 8.0, "train/loss": 2.0}),
    "validation": ({"validation_loss": 2.5, "bits_per_byte": 1.1},
                   {"validation/loss": 2.5, "validation/bits_per_byte": 1.1}),
    "both": ({"step": 1, "loss": 2.0, "validation_loss": 2.5}, {"train/loss": 2.0, "validation/loss": 2.5}),
    "no time": ({"step": 1, "time": 1.7e9, "attempt": 2, "loss": 2.0}, {"train/loss": 2.0}),
    "no numbers": ({"step": 1, "rows": [1], "hash": "ab", "skipped": True, "gone": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALARS)
def test_scalars(case: str) -> None:
    assert extract_scalars(SCALARS[case][0]) == SCALARS[case][1]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: wandb comes up in time, its server answers in time, and nobody is warned."""
    answers = wandb.server_answers
    monkeypatch.setattr(trackers, "NOTICE_SECONDS", 10 * LIMIT)
    monkeypatch.setattr(wandb, "INIT_SECONDS", LIMIT)
    monkeypatch.setattr(wandb, "server_answers", lambda url, seconds: answers(url, LIMIT))


def everything(directory: Path, warn: Callable[[str], None], metrics: Metrics, **config: Any) -> Trackers:
    about = RunDescription(run_id="abc", group_id="group", name="x", config=config)
    return open_trackers(metrics, directory=directory, description=about, warn=warn)


def test_none_wanted_opens_none(tmp_path: Path) -> None:
    warnings: list[str] = []
    log_steps(everything(tmp_path, warnings.append, Metrics()))
    assert warnings == [] and list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    warnings: list[str] = []
    log_steps(everything(tmp_path, warnings.append, Metrics(tensorboard=True, wandb=True)))
    assert len(warnings) == 2
    assert warnings[0].startswith("metrics.tensorboard=true: the package tensorboard is not installed (pip install")


@pytest.mark.usefixtures("patient")
def test_tensorboard_hides_the_steps_that_a_resumed_attempt_repeats(tmp_path: Path) -> None:
    import torch.utils.tensorboard  # noqa: F401 - not in the tracker's thread, for which a run does not wait long
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    for steps, loss in ((range(1, 6), 3.0), (range(4, 8), 2.0)):
        both = everything(tmp_path, warnings.append, Metrics(tensorboard=True))
        for step in steps:
            both.log({"step": step, "loss": loss, "rows": [1, 2]})
        both.finish({"loss": loss, "status": "finished"})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, 3.0 if step < 4 else 2.0) for step in range(1, 8)
    ]
    assert events.Scalars("result/loss")[-1].value == 2.0
    assert warnings == []


@pytest.mark.usefixtures("patient")
def test_tensorboard_has_hyperparameters_and_exact_times(tmp_path: Path) -> None:
    import torch.utils.tensorboard  # noqa: F401 - see above
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = {"model": {"dim": 64, "head_dim": None}, "optimizer": {"betas": [0.9, 0.95], "api_key": "x"}, "name": "x"}
    both = everything(tmp_path, print, Metrics(tensorboard=True), **config)
    both.log({"step": 1, "loss": 3.0, "time": 1763845128.123})
    both.finish({"loss": 3.0, "finished": True})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["result/loss", "train/loss"]
    assert events.Scalars("train/loss")[0].wall_time == 1763845128.123
    content = events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in start.items()} == {
        "model.dim": 64, "model.head_dim": "null", "optimizer.betas": "[0.9,0.95]", "name": "x",
    }  # fmt: skip
    shown = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment.metric_infos
    assert {info.name.tag for info in shown} == set(trackers.HPARAM_METRICS)
    assert HParamsPluginData.FromString(content["_hparams_/session_end_info"]).session_end_info.status == 1


@pytest.mark.usefixtures("patient")
def test_tensorboard_where_nothing_can_be_written_is_one_warning(tmp_path: Path) -> None:
    import torch.utils.tensorboard  # noqa: F401 - see above

    (tmp_path / "tensorboard").write_text("a file in the way")
    warnings: list[str] = []
    log_steps(everything(tmp_path, warnings.append, Metrics(tensorboard=True)))
    assert len(warnings) == 1 and warnings[0].startswith("metrics.tensorboard=true: ")


@pytest.fixture
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture
def end_wandb() -> Iterator[None]:
    yield
    wandb._tear_down_wandb()


@pytest.mark.usefixtures("no_wandb_key", "end_wandb", "patient")
@pytest.mark.full
def test_wandb_offline_two_attempts_and_no_secret_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_SECRET", "planted-secret")
    monkeypatch.setattr(sys, "argv", ["train", "dataset.path=https://me:planted-secret@host/x"])
    warnings: list[str] = []
    for _ in range(2):
        began = int(time.time())
        config = {"model": {"dim": 64, "api_key": "planted-secret"}, "path": "s3://me:planted-secret@host/x"}
        log_steps(everything(tmp_path, warnings.append, Metrics(wandb=True, wandb_mode="online"), **config))
        wait_until(
            lambda began=began: int(time.time()) > began, "the next second: the folder of an attempt has its name"
        )
    offline = [line for line in warnings if "stays offline" in line]  # a busy machine may be slow to close a run too
    assert len(offline) == 2 and "no API key is stored" in offline[0]
    wait_until(
        lambda: _logged(tmp_path) == [True, True], "W&B's service to write, which may be after the call that ends it"
    )
    assert not any(b"planted-secret" in file.read_bytes() for file in _files(tmp_path))
    assert not (tmp_path / "netrc").exists()


def _files(folder: Path) -> list[Path]:
    return [file for file in (folder / "wandb").rglob("*") if file.is_file() and not file.is_symlink()]


def _logged(folder: Path) -> list[bool]:
    """Of each run's file, whether the loss is in it."""
    return [b"train/loss" in file.read_bytes() for file in _files(folder) if file.name == "run-abc.wandb"]


class Status(BaseHTTPRequestHandler):
    """Answers with the status that the path names, else that nobody is logged in."""

    def do_GET(self) -> None:
        path = self.path.strip("/")
        self.send_response(int(path) if path.isdigit() else 401)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.usefixtures("no_wandb_key", "end_wandb", "patient")
@pytest.mark.full
def test_wandb_with_a_wrong_key_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server)
    warnings: list[str] = []
    log_steps(everything(tmp_path, warnings.append, Metrics(wandb=True, wandb_mode="online")))
    assert len(warnings) == 1 and "401" in warnings[0] and "stays offline" in warnings[0]
    assert len(list((tmp_path / "wandb").glob("offline-run-*-abc/run-abc.wandb"))) == 1
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(KEY.encode() in file.read_bytes() for file in files)


def test_obstacles_on_the_way_online(tmp_path: Path, server: str) -> None:
    environ = {"NETRC": str(tmp_path / "netrc"), "WANDB_API_KEY": KEY}
    assert find_online_obstacle({"NETRC": str(tmp_path / "netrc")}).startswith("no API key is stored")
    assert find_online_obstacle(environ | {"WANDB_BASE_URL": server}, LIMIT) == ""
    assert "unknown://x does not answer" in find_online_obstacle(environ | {"WANDB_BASE_URL": "unknown://x"})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert find_online_obstacle(environ | {"WANDB_BASE_URL": url}, 0.2) == f"{url} does not answer within 0.2 s"


KEYS: dict[str, tuple[str, dict[str, str], bool]] = {
    "nothing": ("", {}, False),
    "variable": ("", {"WANDB_API_KEY": KEY}, True),
    "netrc": (f"machine api.wandb.ai\n login user\n password {KEY}\n", {}, True),
    "another host": (f"machine example.org\n login user\n password {KEY}\n", {}, False),
    "own server": (f"machine own.host\n login user\n password {KEY}\n",
                   {"WANDB_BASE_URL": "https://own.host:8080/x"}, True),
    "unreadable": ("not a netrc", {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_key(case: str, tmp_path: Path) -> None:
    netrc, environ, found = KEYS[case]
    (tmp_path / ".netrc").write_text(netrc)
    assert has_wandb_key({"HOME": str(tmp_path), **environ}) is found


def test_secrets_are_left_out_of_the_config_and_settings_stay() -> None:
    kept: dict[str, Any] = {
        "tokenizer": "titan4k",
        "sample_tokens": 64,
        "num_key_value_heads": 8,
        "monkey": 1,
        "nested": {"list": [{"x": 1}], "none": None},
    }
    secret = {"api_key": "x", "HF_TOKEN": "x", "password": "x", "aws_secret_access_key": "x", "key": "x"}
    config = {**kept, **secret, "deep": [{**secret, "url": "https://me:pw@host/p", "text": "a hunter2hunter2 b"}]}
    cleaned = remove_secrets(config, {"MY_TOKEN": "hunter2hunter2", "SHORT_TOKEN": "a"})
    assert cleaned == {**kept, "deep": [{"url": "https://***@host/p", "text": "a *** b"}]}


@pytest.mark.parametrize(
    ("tag", "shown"),
    [
        ("https://me:pw@host/p", "https://***@host/p"),
        ("password=hunter2", "password=***"),
        ("api_key: hunter2", "api_key: ***"),
        ("db of me:hunter2@host", "db of me:***@host"),
        ("{'token': 'hunter2'}", "{'token': '***'}"),
        *((text, text) for text in ("tokenizer=titan4k", "keys=3", "lr=1e-3", "monkey=1", "12:30", "dataset@x")),
    ],
)
def test_no_tag_shows_a_password(tag: str, shown: str) -> None:
    assert hide_in_labels(Metrics(wandb_tags=(tag,), wandb_group=tag)).wandb_tags == (shown,)
    mlflow = MLflow(tags={"a": tag, "password": "x"}, tracking_uri="https://me:pw@host")
    assert hide_in_labels(mlflow) == replace(mlflow, tags={"a": shown})


class NoViewer(Tracker):
    packages: ClassVar[Mapping[str, str]] = {"no_such_package": "no-such-package"}

    def find_viewer(self, directory: Path) -> str | None:
        raise OSError("no viewer")


VIEWERS: dict[str, tuple[Metrics, dict[str, str]]] = {
    "none": (Metrics(), {}),
    "tensorboard": (Metrics(tensorboard=True), {"tensorboard": "tensorboard --logdir 'a run/tensorboard'"}),
    "wandb": (Metrics(wandb=True), {"wandb": "wandb sync 'a run/wandb'/offline-run-*"}),
    "mlflow": (Metrics(trackers={"m": MLflow(tracking_uri="sqlite:///runs/m.db")}),
               {"m": "mlflow ui --backend-store-uri sqlite:///runs/m.db"}),
    "server": (Metrics(trackers={"m": MLflow(tracking_uri="https://me:secret@host")}), {}),
    "trackio": (Metrics(trackers={"t": Trackio(directory="/t")}), {"t": "TRACKIO_DIR=/t trackio show"}),
    "space": (Metrics(trackers={"t": Trackio(space="me/runs")}), {}),
    "online": (Metrics(wandb=True, wandb_mode="online"), {}),
    "own that fails": (Metrics(trackers={"own": NoViewer()}), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", VIEWERS)
def test_a_run_ends_with_the_commands_that_show_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, viewers = VIEWERS[case]
    monkeypatch.setattr(trackers, "_is_installed", lambda package: True)
    assert find_viewers(metrics, Path("a run")) == viewers
    monkeypatch.setattr(trackers, "_is_installed", lambda package: False)
    assert find_viewers(metrics, Path("a run")) == {}


@pytest.mark.parametrize(
    ("path", "answers"), [("200", True), ("401", True), ("404", True), ("500", True), ("502", False), ("503", False)]
)
def test_a_gateway_is_not_the_server_behind_it(server: str, path: str, answers: bool) -> None:
    assert server_answers(f"{server}/{path}", 5) is answers


def test_a_closed_port_does_not_answer() -> None:
    assert not server_answers("http://127.0.0.1:9", 5)
