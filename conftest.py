"""What all tests share."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from launchers import start
from tests.measure import cpu_time
from tests.support import failure_names, tiers
from tests.support.machines import NO_COMPILER, make_detector
from titan.cluster import devices
from titan.dataset.preprocess.prepare import ProgressMeter
from titan.run.run import Run

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if (
        signal.getsignal(number) is signal.SIG_IGN
    ):  # in a shell's background or under nohup; so would be what tests start
        signal.signal(number, handler)
torch.set_num_threads(1)  # tiny tensors gain nothing from more, and ranks fork from this process
for name, examples in (("quick", 20), ("thorough", 200)):  # the Makefile chooses
    hypothesis.settings.register_profile(  # the same examples in each run, and a busy machine is no fault
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile(os.environ.get("TITAN_EXAMPLES", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of CPU times."""
    cpu_time.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier before test modules are imported, and measure CPU times where an option asks for it."""
    tiers.choose_by_arguments(config.args)
    tiers.choose_tier()
    cpu_time.register(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Name failures at once."""
    failure_names.register(session.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers."""
    selected = tiers.select_items(items)
    kept = {item.nodeid for item in selected}
    left_out = [item for item in items if item.nodeid not in kept]
    if left_out:
        items[:] = selected
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Let the garbage collector, of this process and of ranks that it forks, pass over what all tests share.

    A training of this process must not undo that when it ends, and lists of half a million objects be walked again by
    each that follows.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.set_threshold(50_000, 20, 20)  # small objects come and go by the million, and few are in cycles


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Start each test with the same random numbers, and undo what it changes in the environment."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before, level, handlers = dict(os.environ), logging.root.level, set(logging.root.handlers)
    yield
    logging.root.setLevel(level)
    for handler in [h for h in logging.root.handlers if isinstance(h, logging.StreamHandler) and h not in handlers]:
        if not type(handler).__module__.startswith("_pytest"):  # Hydra's write to a stream that ends with the test
            logging.root.removeHandler(handler)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CPU with 16 GiB, and a directory of the test's own, which is the current one."""
    monkeypatch.setattr(devices, "detect_machine", make_detector("cpu"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_CONF", raising=False)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that commands start on this machine, none of which takes place."""
    runs: list[Run] = []
    monkeypatch.setattr(start, "run_local", lambda run, **_: runs.append(run) or 0)
    return runs


@pytest.fixture
def without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the lines of a preparation that takes longer than half a second."""
    monkeypatch.setattr(ProgressMeter, "_is_due", lambda meter: False)


@pytest.fixture
def compiler() -> None:
    """Skip a test that compiles for CPUs where that can't be done."""
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)


@pytest.fixture(autouse=True, scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared data, and what was typed, in folders of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
