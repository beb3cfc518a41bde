"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if (
        signal.getsignal(number) is signal.SIG_IGN
    ):  # in a shell's background or under nohup; so would be what tests start
        signal.signal(number, handler)
torch.set_num_threads(1)  # tiny tensors gain nothing from more, and ranks fork from this process
hypothesis.settings.register_profile("titan", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("titan")


@pytest.fixture(autouse=True, scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared data in a folder of this session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
