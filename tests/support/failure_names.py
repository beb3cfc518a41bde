"""Failed tests are named at once: output that is cut before the summary has them."""

from __future__ import annotations

import pytest

LENGTH = 300


class FailureNames:
    """Writes a line for each failed test."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name and the error of a failed test."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message if crash else report.longreprtext[-LENGTH:]
            self.terminal.write_line(f"\nFAILED {report.nodeid}: {' '.join(error.split())[:LENGTH]}")


def register(config: pytest.Config) -> None:
    """Name failures in the process that prints."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureNames(terminal), "failure_names")
