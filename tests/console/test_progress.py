"""Progress in a log: lines that say how far it is, and not more of them than one reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from titan.console import progress


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [pytest.param(4, 1, id="short"), pytest.param(21, 5, id="seconds"), pytest.param(3 * 3600, 61, id="hours")],
)
def test_a_log_has_few_lines_of_one_kind(
    seconds: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with progress.progress_line() as show:
        for second in range(seconds):
            clock.now = float(second)
            show(f"preparing made: {second / seconds:.0%} of 10.4 MB, {second} tokens/s")
        show("preparing made: counting duplicates")
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "preparing made: counting duplicates" and "\r" not in "".join(shown)
    assert len(shown) - 1 == lines
