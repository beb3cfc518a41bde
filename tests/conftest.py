"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - once, before any test forks ranks


@pytest.fixture(autouse=True, scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared data in a folder of this session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
