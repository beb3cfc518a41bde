"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.support import cpu_time, tiers

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if (
        signal.getsignal(number) is signal.SIG_IGN
    ):  # in a shell's background or under nohup; so would be what tests start
        signal.signal(number, handler)
torch.set_num_threads(1)  # tiny tensors gain nothing from more, and ranks fork from this process
for name, examples in (("quick", 20), ("thorough", 200)):  # the Makefile chooses
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile(os.environ.get("TITAN_EXAMPLES", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of CPU times."""
    cpu_time.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier before test modules are imported, and measure CPU times where an option asks for it."""
    tiers.choose_by_arguments(config.args)
    tiers.chosen()
    cpu_time.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers."""
    left_out = [item for item in items if not tiers.is_selected(item)]
    if left_out:
        items[:] = [item for item in items if tiers.is_selected(item)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Let the garbage collector, of this process and of ranks that it forks, pass over what all tests share."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared data in a folder of this session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
