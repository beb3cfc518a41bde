"""Faults of scaling laws: fits, intervals, floors, speed-ups and the reading of tables.

Their texts occur once in their files.
"""

from __future__ import annotations

from tests.support.fault import define_fault

FAULTS = (
    define_fault(
        "laws: the bend has another derivative",
        "titan/scaling/law.py",
        "slopes[..., BEND] = -bend * share *",
        "slopes[..., BEND] = bend * share *",
        "scaling/test_law.py",
    ),
    define_fault(
        "laws: bad rungs count in full",
        "titan/scaling/law.py",
        "np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))",
        "np.minimum(1.0, 1e9 * limit)",
        "scaling/test_law.py",
    ),
    define_fault(
        "laws: intervals have no noise of a new run",
        "titan/scaling/fit.py",
        "np.exp(logs + (self.draws.noise * self.normals)",
        "np.exp(logs + (0 * self.draws.noise * self.normals)",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: replicates fit the same losses",
        "titan/scaling/fit.py",
        "y -= draws.noise[:, None] * generator",
        "y -= 0 * draws.noise[:, None] * generator",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: seeds of a rung are rungs",
        "titan/scaling/table.py",
        "setdefault((name, float(n), float(d)), [])",
        "setdefault((name, float(n), float(d) + 1e-3 * len(groups)), [])",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: variants always share a law",
        "titan/scaling/fit.py",
        "return self.p >= ALPHA",
        "return self.p >= 0",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: corpora are pooled",
        "titan/scaling/fit.py",
        "if len(table.corpora) > 1:",
        "if len(table.corpora) > 9:",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: a floor whose profile reaches 0 is determined",
        "titan/scaling/study.py",
        "return self.low <= NOTHING * self.least_loss",
        "return self.low < 0",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: held-out runs are fitted",
        "titan/scaling/study.py",
        "table.select(is_held), table.select(~is_held)",
        "table.select(is_held), table",
        "scaling/test_fit.py",
    ),
    define_fault(
        "laws: a speed-up is upside down",
        "titan/scaling/speedup.py",
        "return np.asarray(np.exp((low + high) / 2))",
        "return np.asarray(np.exp(-(low + high) / 2))",
        "scaling/test_speedup.py",
    ),
    define_fault(
        "laws: rising losses give a speed-up",
        "titan/scaling/speedup.py",
        "return np.where(short > long, mixed, np.nan)",
        "return mixed",
        "scaling/test_speedup.py",
    ),
    define_fault(
        "laws: units are not checked",
        "titan/scaling/table.py",
        "if values[low] < LEAST_COUNT:",
        "if values[low] < 0:",
        "scaling/test_table.py",
    ),
    define_fault(
        "laws: unfinished runs are rungs",
        "titan/report/law_runs.py",
        'if result.state != "finished":',
        'if result.state == "queued":',
        "commands/test_law.py::test_runs_are_a_table",
    ),
    define_fault(
        "laws: names of a table change the terminal",
        "titan/scaling/table.py",
        "return tuple(sanitize_line(cell.get(key",
        "return tuple(str(cell.get(key",
        "commands/test_law.py::test_names_in_a_table_are_escaped",
    ),
)
