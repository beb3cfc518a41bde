"""Which checkpoint, layout and data a replay uses: all checks before work starts. Free of torch.

The run's own command line is composed again, with the user's overrides behind it. Where this machine can start as many
ranks as the run had, layout, micro-batches and compilation stay as they were, and the replay is bitwise; elsewhere it
runs on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from titan.checkpoint.manifest import CorruptCheckpointError, Manifest, folder_of, inspect
from titan.config.arguments import operand
from titan.config.settings import format_value, setting
from titan.console.numbers import format_plural
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.evaluation.schema import Evaluation
from titan.numerics.differences import FP32_BOUND
from titan.run.attempts import Attempt
from titan.run.command_line import quote_value
from titan.run.model_limits import require_tokens
from titan.run.run import Run
from titan.training import recompose
from titan.training.recompose import Compose

EXCLUDED_OVERRIDES = ("name", "hydra", "sweep", "checkpoint.", "checkpoint=", "metrics", "evaluation")
"""Overrides of the run that say where it writes, by their beginnings."""


ExactType = Literal["fp32", "fp64"]
"""The type: in fp64 matmuls, attention and FSDP's sums over ranks. Weights, their gradients and updates, norms, rotary
embedding, routers' scores and loss stay in fp32."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The step of a replay, and what is shown of it."""

    run: str = operand("RUN", "the directory of a run, such as runs/NAME")
    step: int = setting(
        0, "the step to look at; 0: with against=RUN, the first at which their metrics differ", at_least=0
    )
    start: int | None = setting(
        None, "the step of the checkpoint to begin at; 0: the initial weights; null: the nearest before", at_least=0
    )
    against: str | None = setting(None, "another run, or overrides for the same step: both are compared", any_text=True)
    tolerance: float = setting(
        FP32_BOUND,
        "relative difference in the type of `exact` above which an output, gradient or update is wrong",
        above=0,
    )
    exact: ExactType = setting(
        "fp32",
        "type in which both are computed to decide; fp64: for sums so long that fp32 rounds beyond the tolerance",
    )
    repeats: int = setting(
        2,
        "randomly rounded repetitions of the step that differences of precision are measured by; 0: none",
        at_least=0,
        cap=100,
    )
    depth: Literal["module", "operation"] = setting(
        "module", "operation: compare the operations inside of the module that is named, too"
    )
    python: str | None = setting(
        None, "Python interpreter of another environment, whose titan and torch compute the second replay"
    )
    pin: Literal["routing"] | None = setting(None, "routing: the second replay uses the experts of the first")
    tokens: int = setting(10, "tokens with the largest losses to show", at_least=1, cap=1000)
    to: str | None = setting(
        None, "a file to write: .json with everything that is shown, or .html with a picture of two replays"
    )
    begin: str | None = setting(None, "folder of a checkpoint to begin at, in place of one of the run's")
    leave: str | None = setting(
        None, "empty folder to leave what ranks saw in, for a replay by another interpreter; nothing is shown"
    )


NATIVE, EXACT, ROUNDED, OPERATIONS = "native", "exact", "rounded", "operations"
"""Passes: in the run's precision, in fp32, with randomly rounded weights (followed by the repetition's number), and
with the operations of one module."""


@dataclass(frozen=True)
class ReplayJob:
    """The input of the ranks.

    Attributes:
        worker: what the ranks do.
        passes: their names, and the run of each, with a temporary directory; they differ in precision only.
        attempt: the checkpoint to begin at.
        step: the step to look at.
        tokens: how many tokens with the largest losses to collect.
        save: whether to save the state before that step, for another replay.
        repeats: how many randomly rounded repetitions of the step to compute, instead of the step.
        pin: the folder of another replay, whose experts the routers use; None: their own.
        operations: the module whose operations are recorded; None: of none.
        layers: whether the first pass has the metrics of all layers, which take another forward pass.
    """

    worker: ClassVar[str] = "titan.training.replay.worker"
    passes: tuple[tuple[str, Run], ...]
    attempt: Attempt
    step: int
    tokens: int = 10
    save: bool = False
    repeats: int = 0
    pin: str | None = None
    operations: str | None = None
    layers: bool = False

    @property
    def run(self) -> Run:
        """The run of the first pass."""
        return self.passes[0][1]


class ReplayEndedError(Exception):
    """The ranks of a replay failed, and have said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with exit code {code}")
        self.code = code


StartRanks = Callable[["ReplayPlan", ReplayJob], int]
"""Starts the ranks of a replay, waits for them, and returns the exit code; 0 when all have left what they saw."""


@dataclass(frozen=True)
class ReplayPlan:
    """A replay that can start.

    Attributes:
        run: with a temporary directory, and nothing that a run writes beside checkpoints.
        attempt: the checkpoint to begin at.
        mix: the rows.
        start: starts its ranks.
        recorded: the run's line of the step; empty where it has none.
        notes: on what differs from the run.
        is_foreign: whether another interpreter runs it, whose code may differ.
    """

    run: Run
    attempt: Attempt
    mix: RowMixture
    start: StartRanks
    recorded: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_foreign: bool = False

    def run_ranks(self, job: ReplayJob) -> None:
        """Run the ranks of one of its jobs.

        Raises:
            ReplayEndedError: when they failed; their error has been printed.
        """
        if code := self.start(self, job):
            raise ReplayEndedError(code)


def plan_replay(
    name: str,
    settings: Settings,
    overrides: Sequence[str],
    scratch: Path,
    compose: Compose,
    start: StartRanks,
    recorded: Mapping[str, Any],
) -> ReplayPlan:
    """Return the replay of a run's step.

    Args:
        name: the run's directory; nothing is written into it.

    Raises:
        ConfigError: when the step, the checkpoint or the data are not there, or the run can't work here.
    """
    documents = recompose.read_run_attempts(name)
    document = next((d for d in reversed(documents) if int(d.get("from_step") or 0) < settings.step), documents[0])
    steps = int(document["config"]["training"]["steps"])
    if settings.step > steps:
        raise ConfigError(
            f"step={settings.step}: the run in {name} has {format_plural(steps, 'step')}; give one of them."
        )
    command, notes = recompose.build_command(document, overrides, EXCLUDED_OVERRIDES)
    run = recompose.disable_outputs(compose(overrides, command), Evaluation(every=0, tokens=0), scratch)
    require_tokens(run.model, "titan.replay")
    mix, attempt, parent = recompose.open_run_again(name, document, run, overrides)
    checkpoint: tuple[str, Manifest] | None
    if settings.begin is not None:
        checkpoint = _read_begin(settings.begin, settings.step)
    elif settings.start == 0 or (settings.start is None and settings.step == 1):
        initial = parent.checkpoint
        checkpoint = None if initial is None else (initial.path, initial.manifest)
    else:
        checkpoints = recompose.list_checkpoints(name, document, str(documents[0]["run_id"]))
        checkpoint = _select_checkpoint(name, settings, checkpoints)
    if checkpoint is not None:
        attempt = recompose.begin_at(attempt, run, mix, *checkpoint)
    return ReplayPlan(run, attempt, mix, start, recorded, tuple(notes))


def align_start(plan: ReplayPlan, first: ReplayPlan, step: int) -> ReplayPlan:
    """Return a replay that begins a step with the state that the first one, which has run, has before it."""
    saved = folder_of(Path(first.run.directory), step - 1)
    if not saved.is_dir():  # the first one began there
        return replace(plan, attempt=replace(first.attempt, ids=plan.attempt.ids))
    rows = plan.run.training.count_rows_before(step)
    return replace(plan, attempt=replace(plan.attempt, checkpoint=str(saved), weights=None, step=step - 1, rows=rows))


def check_comparison(settings: Settings, plans: Sequence[ReplayPlan]) -> None:
    """Raise ConfigError for settings of a comparison that have no effect, or that these runs can't follow."""
    choices = {"pin": settings.pin, "depth": settings.depth}
    compared = [f"{key}={value}" for key, value in choices.items() if value not in (None, "module")]
    if compared and (len(plans) == 1 or settings.python is not None):
        raise ConfigError(
            f"{compared[0]}: compares two replays by this interpreter; give against=RUN or SETTING=VALUE, without "
            "python=."
        )
    for plan in plans if settings.pin else ():
        if reason := _explain_unpinned(plan.run):
            raise ConfigError(f"pin=routing: {reason}")
    sizes = [(plan.run.training.find_phase(settings.step).rows, plan.run.training.seq_len) for plan in plans]
    if settings.pin and sizes[0] != sizes[1]:  # experts are pinned token by token
        (rows, tokens), (other_rows, other_tokens) = sizes
        raise ConfigError(
            f"pin=routing: one replay reads {rows} rows of {tokens} tokens, and the other {other_rows} of "
            f"{other_tokens}; give both the same training.seq_len and training.global_batch."
        )


def _explain_unpinned(run: Run) -> str:
    """Return why a run's routers can't be given experts, and the way out; empty where they can."""
    if not getattr(run.model, "experts", 0):
        return "the model has no experts; leave it out."
    if run.compile.scope != "off":
        return f"routers are inside of compiled code with compile={run.compile.scope}; add compile=off."
    if run.layout.pipeline > 1 and (kind := run.memory.checkpointing) != "none":
        return f"a pipeline recomputes earlier micro-batches with memory.checkpointing={kind}; add memory=none."
    if run.parallelism.exchange.is_own:
        return "parallelism.exchange of one's own may call no router as a module; leave it out."
    return ""


def find_changes(name: str, other: str) -> list[str]:
    """Return the overrides that give a run the settings of another one, as far as overrides made them differ.

    Args:
        name: the run's directory.
    """
    document, other_document = (recompose.read_run_attempts(directory)[-1] for directory in (name, other))
    overrides, other_overrides = (
        [o for o in d.get("overrides") or () if not o.lstrip("+").startswith(EXCLUDED_OVERRIDES)]
        for d in (document, other_document)
    )
    other_keys = set(map(_parse_key, other_overrides))
    keys = [key for key in dict.fromkeys(map(_parse_key, overrides)) if key not in other_keys]
    choices, changes = other_document.get("choices") or {}, [o for o in other_overrides if o not in overrides]
    chosen = [f"{key}={choices[key]}" for key in keys if key in choices]
    for key in (key for key in keys if key not in choices):  # where the values differ
        value = _find_value(other_document["config"], key)
        if value not in (MISSING, _find_value(document["config"], key)):
            chosen.append(f"{key}={quote_value(value) if isinstance(value, str) else format_value(value)}")
    return [*chosen, *changes]


def _parse_key(override: str) -> str:
    """Return the group or the setting that an override names."""
    return override.partition("=")[0].lstrip("+")


def _find_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the resolved value of a setting by its dotted name; MISSING where the run has no such setting."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def _select_checkpoint(
    name: str, settings: Settings, checkpoints: Mapping[int, tuple[str, Manifest]]
) -> tuple[str, Manifest]:
    """Return the checkpoint to begin at, of those of the run by their steps."""
    earlier_steps = [step for step in checkpoints if step < settings.step]
    if settings.start is not None and settings.start not in earlier_steps:
        listed = ", ".join(map(str, sorted(earlier_steps)))
        steps = f"one of {listed}, or 0" if listed else "0, the initial weights"
        raise ConfigError(
            f"start={settings.start}: the run has no complete checkpoint of this step before step {settings.step}; "
            f"give {steps}."
        )
    if not earlier_steps:
        raise ConfigError(
            f"step={settings.step}: the run in {name} has no complete checkpoint before this step"
            f"{f', the first is of step {min(checkpoints)}' if checkpoints else ''}; give a later step, or start=0 to "
            "begin at the initial weights."
        )
    return checkpoints[max(earlier_steps) if settings.start is None else settings.start]


def _read_begin(folder: str, step: int) -> tuple[str, Manifest]:
    """Return path and manifest of a checkpoint that the user names."""
    try:
        found = inspect(Path(folder).expanduser())
    except CorruptCheckpointError as error:
        raise ConfigError(f"begin={folder}: {error}; give another checkpoint's folder.") from error
    if found is None or found.step >= step:
        what = "no complete checkpoint" if found is None else f"the checkpoint of step {found.step}"
        raise ConfigError(f"begin={folder}: is {what}; give the folder of a checkpoint before step {step}.")
    return str(Path(folder).expanduser().absolute()), found
