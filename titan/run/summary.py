"""Print what a run trains and its results. Free of torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.config.kinds import get_kind
from titan.config.modules import VARIABLE
from titan.config.settings import format_value
from titan.console.numbers import format_count, format_plural, format_rounded
from titan.console.progress import format_duration, format_loss, print_table
from titan.estimate import fit
from titan.files.run_directory import shorten_path
from titan.metrics.trackers import find_viewers
from titan.run import budget, hydra_session, identity
from titan.run.budget import describe_hours
from titan.run.directory import describe_hook_end, read_result
from titan.run.run import Run

if TYPE_CHECKING:
    from titan.dataset.mixture import RowMixture
    from titan.run.attempts import Attempt

SHOWN_FIGURES = 6
"""Files and tasks of an evaluation that the terminal shows."""


def show_run(run: Run, attempt: Attempt, mix: RowMixture, applied: Sequence[str]) -> None:
    """Print the run's settings, and what was `applied` to the model in which order, before the first step."""
    training, choices = run.training, run.choices
    memory = fit.estimate_memory(run, run.layout, run.microbatches, run.machine.device).gib
    origin = f" of {attempt.parent}" if attempt.kind == "fork" else ""
    state = f"attempt {attempt.number}, {attempt.kind}{origin} from step {attempt.step}"
    state = "new" if attempt.kind == "start" else state
    seconds = attempt.prediction and format_rounded(attempt.prediction.step_seconds.value)  # if hardware is described
    extensions = {
        "loss terms": [f"{name} {term.coefficient:g}{_name_own_class(term)}" for name, term in training.terms.items()],
        "hooks": [f"{name}{_name_own_class(hook)}" for name, hook in (run.hooks or {}).items()],
        "own code": [f"{name} ({', '.join(used) or 'imported'})" for name, used in identity.list_uses(run).items()],
    }
    later = [f"{phase.rows * training.seq_len:,} from step {phase.step:,}" for phase in training.phases[1:]]
    print_table(
        {
            "run": f"{shorten_path(run.directory)}  ({state}, science id {attempt.ids.science})",
            **{"note" if i == 0 else " " * (i + 1): note for i, note in enumerate(attempt.notes)},
            "model": f"{choices.get('model', '')}: {run.model.describe_size()}, "
            f"{format_plural(run.model.layers, 'layer')} of width {run.model.dim}, "
            f"vocabulary {run.model.vocab:,}",
            **_describe_data(run, mix),
            "batch": f"{training.global_batch:,} tokens = {format_plural(training.rows, 'row')}; "
            f"{run.rank_rows} per rank in {format_plural(run.microbatches, 'micro-batch', 'micro-batches')}"
            f"{'; ' * bool(later)}{', '.join(later)}",
            "steps": f"{training.steps:,}, {format_count(training.total_tokens)} tokens; "
            f"{choices.get('optimizer', '')}, lr {format_value(run.optimizer.lr)}, {choices.get('schedule', '')}; seed "
            f"{training.seed}",
            **({"budget": hours} if (hours := describe_hours(training)) else {}),
            **{name: ", ".join(parts) for name, parts in extensions.items() if parts},
            "layout": f"{choices.get('parallelism', '')}: {run.layout}",
            **_describe_dimensions(run),
            **{f"{'' if i else 'applied':<9}{i + 1}": step for i, step in enumerate(applied)},
            "devices": f"{run.machine.describe()}; estimated memory {memory:.1f} GiB per rank"
            f"{f', predicted step {seconds} s' if seconds else ''}",
        }
    )


def _name_own_class(value: Any) -> str:
    """Return the path of a class outside of titan in brackets; empty for titan's own."""
    path = get_kind(type(value))
    return "" if path.startswith("titan.") else f" ({path})"


def _describe_data(run: Run, mix: RowMixture) -> dict[str, str]:
    """Return the line about the data, or one line per source of a mixture."""
    training, dataset_choice = run.training, run.choices.get("dataset", "")
    reads = mix.count_rows_read(training.count_rows_before(training.steps + 1))
    masked = "; attention within documents" if run.dataset.mask_documents else ""
    heading = f"{dataset_choice}; tokenizer {mix.sources[0].corpus.tokenizer['name']}{masked}"
    lines = {}
    for source, read in zip(mix.sources, reads, strict=True):
        corpus, rows = source.corpus, source.split.count_rows(training.seq_len)
        done, total = corpus.shard_jobs
        state = f", {read / rows:.2f} epochs" if rows else ""
        state = state if corpus.complete else f" so far ({done} of {total} shard jobs)"
        lines[source.name] = (
            f"{format_count(corpus.train.tokens)} tokens in {rows:,} rows of {training.seq_len}{state}, "
            f"{format_count(corpus.validation.tokens)} tokens for evaluation"
        )
    if len(lines) == 1:
        return {"data": f"{dataset_choice}: {next(iter(lines.values()))}; {heading.partition('; ')[2]}"}
    shares = [f"{read / max(1, sum(reads)):.1%} of the rows, of " for read in reads]
    return {"data": heading, **{f"  {name}": share + lines[name] for name, share in zip(lines, shares, strict=True)}}


PURPOSES = {
    "pipeline": "pass on hidden states",
    "replicate": "all-reduce the gradients of replicas",
    "shard": "all-gather weights, reduce-scatter gradients",
    "context": "split rows, and exchange what attention needs of them",
    "tensor": "split each matmul",
    "expert": "have different experts, and exchange tokens",
}
"""What ranks along each dimension communicate."""


def _describe_dimensions(run: Run) -> dict[str, str]:
    """Return one line per mesh dimension: its groups of ranks, and what they communicate."""
    lines = {}
    for name, degree in {**run.layout.degrees(), "expert": run.layout.expert}.items():
        if degree > 1:
            groups = [" ".join(map(str, _abbreviate_list(list(group)))) for group in run.layout.list_groups(name)]
            lines[f"  {name} {degree}"] = f"ranks {' | '.join(_abbreviate_list(groups))} {PURPOSES[name]}"
    if run.staging.count > 1:
        layers = [f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in run.staging.layers]
        batches = format_plural(run.microbatches, "micro-batch", "micro-batches")
        lines["  stages"] = (
            f"layers {' | '.join(_abbreviate_list(layers))}; {run.staging.schedule} with {batches}, "
            f"ranks idle {run.staging.idle:.0%} of a step"
        )
    return lines


def _abbreviate_list(items: list[Any]) -> list[Any]:
    return items if len(items) <= 8 else [*items[:4], "...", items[-1]]


def show_result(run: Run, result: Mapping[str, Any]) -> None:
    """Print the results of a run."""
    names = [key.partition("/")[2] for key in result if key.startswith("validation_loss/")]  # sources of a mixture
    sources = [
        f"{n} {format_loss(result[f'validation_loss/{n}'])}{_describe_bits(result, f'/{n}')}" for n in names if n
    ]
    rows = {
        "loss": _describe_loss(result),
        **({"  by source": ", ".join(sources)} if sources else {}),
        "speed": _describe_speed(result),
        "checkpoint": shorten_path(result["checkpoint"]) if result.get("checkpoint") else "none saved",
        "metrics": shorten_path(f"{run.directory}/metrics.jsonl"),
        "loss curve": shorten_path(result["plot"]) if result.get("plot") else "not drawn",
        **find_viewers(run.metrics, Path(shorten_path(run.directory))),
    }
    if result.get("checkpoint"):
        if result.get("sample"):
            package = type(run.model).__module__.partition(".")[0]
            variables = _format_variables("", [] if package in ("titan", "experiments") else [package])
            directory = shlex.quote(shorten_path(run.directory))
            rows["generate"] = f'{variables}python -m titan.generate {directory} prompt="..."'
        rows["continue" if result["finished"] else "resume"] = build_next_command(run, result)
    hook_note = f" ({hook})" if (hook := describe_hook_end(result)) else ""
    status = "Done" if result["finished"] else "Stopped"
    print(f"\n{status} after step {result['step']:,} of {run.training.steps:,}{hook_note}.")
    print_table(rows)
    if result.get("sample"):
        print("\nSample of the trained model (prompt | continuation):")
        start, text = result["sample"]["start"], result["sample"]["text"]
        print("\n".join("  " + line for line in f"{start}|{text}".splitlines()))


def _describe_loss(result: Mapping[str, Any]) -> str:
    first, last, validation = map(result.get, ("first_loss", "last_loss", "validation_loss"))
    timed = result.get("tokens_per_second") or last is not None
    text = f"{format_loss(first)} -> {format_loss(last)}" if timed else "no step in this attempt"
    text += f", validation {format_loss(validation)}" if validation is not None else ""
    return text + _describe_bits(result)


def _describe_bits(result: Mapping[str, Any], source: str = "") -> str:
    bits = result.get(f"bits_per_byte{source}")
    return "" if bits is None else f" ({bits:.3f} bits/byte)"


def describe_evaluation(figures: Mapping[str, Any]) -> str:
    """Return what an evaluation found, for the terminal: the loss, and the first figure of some files and tasks."""
    named: dict[str, str] = {}
    for key, value in figures.items():
        kind, _, rest = key.partition("/")
        if kind == "evaluation":
            name, _, figure = rest.rpartition("/")
            named.setdefault(name, f"{name} {figure} {value:.4f}")
    loss = [f"validation loss {figures['validation_loss']:.4f}"] if "validation_loss" in figures else []
    shown = list(named.values())[:SHOWN_FIGURES]
    more = [f"{len(named) - len(shown)} more in metrics.jsonl"] if len(named) > len(shown) else []
    return ", ".join([*loss, *shown, *more])


def show_finished(run: Run) -> None:
    """Print that the finished run in a directory has nothing to do, and its results."""
    result, _ = read_result(Path(run.directory))
    state, hint = "is finished", f"with {' '.join(budget.build_continuation(run, result['step'] * 2))}"
    if hook := describe_hook_end(result):
        state, hint = f"was ended by {hook}", "without the hook"
    print(f"{shorten_path(run.directory)} {state}: {format_plural(result['step'], 'step')}; nothing to do.")
    print_table(
        {
            "loss": _describe_loss(result),
            "speed": _describe_speed(result),
            "checkpoint": shorten_path(result["checkpoint"]) if result.get("checkpoint") else "none saved",
            "continue": f"the same command {hint}",
        }
    )


def build_next_command(run: Run, result: Mapping[str, Any]) -> str:
    """Return the command that resumes the run, or continues a finished one."""
    overrides = budget.build_continuation(run, run.training.steps * 2) if result["finished"] else []
    words = (*run.choices.values(), *run.overrides)
    return format_next_command(run.directory, words, run.modules, identity.find_packages(run), overrides)


def format_next_command(
    directory: str, words: Iterable[str], modules: Sequence[str], packages: Iterable[str], overrides: Sequence[str] = ()
) -> str:
    """Return the command that resumes a run, with the environment that it needs.

    Args:
        modules: of its settings, which the recorded command can't permit.
        packages: outside of titan that it names.
    """
    overrides = [*overrides, *([f"modules={format_value(modules)}"] if modules else [])]
    named_packages = [name for name in packages if name not in ("experiments", *modules)]
    named = {*re.findall(r"[\w.-]+", " ".join(map(str, words)))}  # files of a folder of $TITAN_CONF among them
    own_files = (file for folder in hydra_session.list_own_folders() for file in Path(folder).rglob("*.yaml"))
    folders = os.environ.get(hydra_session.VARIABLE, "") if any(file.stem in named for file in own_files) else ""
    command = shlex.join(["python", "-m", "titan.train", f"resume={shorten_path(directory)}", *overrides])
    return _format_variables(folders, named_packages) + command


def _format_variables(folders: str, packages: Sequence[str]) -> str:
    """Return the variables of the environment before a command: of configuration folders, and of packages to import."""
    values = {hydra_session.VARIABLE: folders, VARIABLE: ",".join(packages)}
    return "".join(f"{name}={shlex.quote(value)} " for name, value in values.items() if value)


def _describe_speed(result: Mapping[str, Any]) -> str:
    rate, seconds = result.get("tokens_per_second"), result.get("seconds")
    if rate is None:
        return "not measured"
    mfu = f", MFU {result['mfu']:.1%}" if result.get("mfu") else ""
    memory = f"peak memory {result.get('memory_gib') or 0:.2f} GiB per rank"
    wait = result.get("data_wait") or 0
    stalled = f", {wait:.0%} of the time waiting for data" if wait >= 0.01 else ""
    return f"{rate:,.0f} tokens/s{mfu}, {memory}, {format_duration(seconds or 0)} in total{stalled}"
