"""Why two replays differ: questions in the order in which their answers exclude causes. Free of torch.

1. Are rows, weights and optimizer state equal? Where they and the code are, results must be, bitwise.
2. Do both agree in fp32? What differs by more than rounding there is a fault of layout or model: the first module in
   the forward pass, then the loss, gradients in the order of the backward pass, the gradients' norm, and updates.
3. What is left is precision: how large is it beside that of random rounding?
4. What could not be compared?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.numerics import differences as diff
from titan.numerics.differences import (
    FP32_BOUND,
    GRADIENT,
    START,
    STATE,
    UPDATE,
    Difference,
    Key,
    Spread,
    compare_figures,
)
from titan.training.replay.observation import ReplayedStep

RATE = "rate"
"""The kind of a finding that two learning rates are not the same: a setting, and no fault."""
NAMED = 6
"""Names that are listed of what was not compared."""


@dataclass(frozen=True)
class Finding:
    """Something that differs, and is no rounding.

    Attributes:
        kind: "rows", START, STATE, "replicas", "bitwise", "forward", "loss", GRADIENT, "backward", "grad_norm", UPDATE,
            RATE or "rounding".
        name: the module or parameter.
        relative: size of the difference; infinite where only one side has a finite value.
        where: ranks, micro-batch and rows.
        text: the sentence.
    """

    kind: str
    name: str
    relative: float
    where: str
    text: str


@dataclass(frozen=True)
class ReplayPair:
    """Two replays of a step in one precision, by the name that answers give it, such as "fp32".

    `is_mixed`: both have different precisions, so that their difference is not that of rounding alone.
    """

    a: ReplayedStep
    b: ReplayedStep
    name: str
    is_mixed: bool = False

    @cached_property
    def activations(self) -> list[Difference]:
        """How far outputs and gradients of modules are apart."""
        return diff.compare_activations(self.a.samples, self.b.samples, self.a.seq_len)

    def compare_tensors(self, *kinds: str) -> list[Difference]:
        """Return how far tensors of some kinds are apart."""
        return [d for kind in kinds for d in diff.compare_tensors(self.a.tensors, self.b.tensors, kind)]

    @cached_property
    def tensors(self) -> dict[str, tuple[Difference, ...]]:
        """How far gradients and updates are apart."""
        return {kind: tuple(self.compare_tensors(kind)) for kind in (GRADIENT, UPDATE)}

    @property
    def all(self) -> list[Difference]:
        """How far all that the step computes is apart."""
        return [*self.activations, *self.tensors[GRADIENT], *self.tensors[UPDATE]]

    def read_figures(self, key: str) -> tuple[float, float]:
        """Return a figure of both steps' lines."""
        return float(self.a.record[key]), float(self.b.record[key])


@dataclass(frozen=True)
class Answers:
    """What the questions found.

    Attributes:
        findings: the first of each question; the first is the cause to look at.
        sentences: one for each question.
        activations: differences of outputs and gradients, of the pair that decides.
        tensors: differences of weights, gradients and updates, by kind.
        summary: what is left to say where nothing was found.
        comparable: whether both began the step alike; else nothing behind the start was compared.
        bound: relative difference that counts as rounding.
    """

    findings: tuple[Finding, ...]
    sentences: tuple[str, ...]
    activations: tuple[Difference, ...] = ()
    tensors: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    summary: str = ""
    comparable: bool = True
    bound: float = FP32_BOUND

    @property
    def verdict(self) -> str:
        """The first finding in one sentence, or that there is none."""
        return self.findings[0].text if self.findings else self.summary


def ask_questions(
    native: ReplayPair, exact: ReplayPair, *, same_code: bool, bound: float = FP32_BOUND, spread: Spread | None = None
) -> Answers:
    """Ask all questions.

    Args:
        native: both in the runs' precision.
        exact: both in the deciding type, `native` itself where the runs are.
        same_code: whether both are the same computation in the same order.
        spread: of random rounding; None where it was not measured.
    """
    starts, start_sentence, comparable = _compare_starts(native, exact, bound)
    if not comparable:
        return Answers(tuple(starts), (start_sentence,), comparable=False, bound=bound)
    findings = [*starts]
    if same_code and not starts:
        findings += _find_bitwise(native)
    faults = list(_find_faults(exact, bound))
    findings += faults[:1]
    sentences = [start_sentence, _describe_faults(exact, faults, bound)]
    if exact is not native and not faults:
        found, sentence = _judge_precision(native, exact, spread)
        findings += found
        sentences.append(sentence)
    sentences += _describe_missing(native)
    summary = "" if findings else _summarize(native, exact, bound)
    return Answers(tuple(findings), tuple(sentences), tuple(exact.activations), exact.tensors, summary, bound=bound)


# --- 1. the start


def _compare_starts(native: ReplayPair, decider: ReplayPair, bound: float) -> tuple[list[Finding], str, bool]:
    """Return what differs before the step, a sentence, and whether the step can be compared."""
    a, b = native.a, native.b
    step = f"step {a.record['step']:,}"
    if a.record["batch_hash"] != b.record["batch_hash"]:
        rows = " to ".join(map(str, a.record["rows"])), " to ".join(map(str, b.record["rows"]))
        detail = f"rows {rows[0]} and {rows[1]}" if rows[0] != rows[1] else f"rows {rows[0]} with other tokens"
        text = f"the batches of {step} differ ({detail}), so its activations are not compared"
        return [Finding("rows", "rows", math.inf, detail, text)], f"1. the rows of {step} differ", False
    unequal = [
        (side, d) for side, s in (("A", a), ("B", b)) for k in (START, STATE) for d in diff.list_unequal(s.tensors, k)
    ]
    findings = [
        _make_finding("replicas", d, f"{side}'s ranks have different values of {_name(d)} before {step}: {_measure(d)}")
        for side, d in unequal[:1]
    ]
    weights, state = find_largest(decider.compare_tensors(START)), find_largest(native.compare_tensors(STATE))
    has_drifted = weights is not None and weights.relative > bound
    if weights is not None and has_drifted:
        text = f"weights have drifted before {step}: {_name(weights)} differs by {_measure(weights)}"
        findings.append(_make_finding(START, weights, f"{text}, so activations are not compared"))
    elif state is not None and state.relative > bound:
        text = f"the optimizer's state differs before {step}: {_name(state)} by {_measure(state)}"
        findings.append(_make_finding(STATE, state, text))
    return findings, _describe_starts(native, step, findings), not has_drifted


def _describe_starts(native: ReplayPair, step: str, findings: Sequence[Finding]) -> str:
    if findings:
        return f"1. what {step} begins with differs: {findings[0].name}"
    differences = native.compare_tensors(START, STATE)
    count, largest = format_plural(len(differences), "tensor"), find_largest(differences)
    if largest is None:
        return f"1. rows, weights and optimizer state before {step} are equal, bitwise ({count})"
    return (
        f"1. rows of {step} are equal; of {count} of weights and optimizer state "
        f"{sum(d.relative > 0 for d in differences)} differ, by up to {_measure(largest)}, in {_name(largest)}"
    )


def _find_bitwise(native: ReplayPair) -> Iterator[Finding]:
    """Yield the first result that is not bitwise equal, though all that went in is."""
    if any(d.relative for d in native.compare_tensors(START, STATE)):
        return
    for difference in [d for d in (*native.activations, *native.tensors[GRADIENT]) if d.relative][:1]:
        words = f"the {describe_key(difference.key)} is not bitwise equal: {_measure(difference)}"
        yield _make_finding("bitwise", difference, f"rows, weights and code are the same, and yet {words}")


# --- 2. layout and model


def _find_faults(pair: ReplayPair, bound: float) -> Iterator[Finding]:
    """Yield what differs by more than rounding, in the order of the step."""
    beyond = [d for d in pair.activations if d.relative > bound]
    forward = [d for d in beyond if d.key[0] == "forward"]
    for difference in forward[:1]:
        yield _name_first(pair, "forward", difference, f"forward pass of {_name(difference)}")
    if not forward:
        yield from _compare_figure(pair, "loss", bound)
    yield from _find_gradients(pair, bound)
    yield from _compare_figure(pair, "grad_norm", bound)
    yield from _find_updates(pair, bound)


def _find_gradients(pair: ReplayPair, bound: float) -> Iterator[Finding]:
    """Yield the first gradient that differs in the backward pass: of a module's output, or of a parameter."""
    modules = [name for direction, name in pair.a.samples if direction == "forward"]
    outputs = [d for d in pair.activations if d.key[0] == "backward" and d.relative > bound]
    parameters = [d for d in pair.tensors[GRADIENT] if d.relative > bound]
    events = [(2 * _find_position(d.name, modules), d) for d in outputs]
    events += [(2 * _find_position(d.name, modules) - 1, d) for d in parameters]
    for _, difference in sorted(events, key=lambda event: -event[0])[:1]:
        if difference.key[0] == "backward":
            consumer = find_consumer(difference.name, modules)
            subject = f"backward pass of {consumer}, the gradient of {_name(difference)}'s output"
            yield _name_first(pair, "backward", difference, subject, consumer)
        else:
            subject = f"reduced gradient of {_name(difference)}{_count_more(parameters)}"
            yield _name_first(pair, GRADIENT, difference, subject)


def _find_position(name: str, modules: Sequence[str]) -> int:
    """Return the place of a module, or of a parameter's module, in the forward pass; what is behind all is the head."""
    owners = [i for i, module in enumerate(modules) if name == module or name.startswith(f"{module}.")]
    return max(owners, key=lambda i: len(modules[i])) if owners else len(modules)


def find_consumer(name: str, modules: Sequence[str]) -> str:
    """Return the module that a module's output goes to, whose backward pass computes the output's gradient."""
    later = modules[modules.index(name) + 1 :]
    return next((m for m in later if not name.startswith(f"{m}.")), "head")


def _compare_figure(pair: ReplayPair, key: str, bound: float) -> Iterator[Finding]:
    """Yield a finding where a figure of the step's line differs by more than rounding."""
    x, y = pair.read_figures(key)
    relative = compare_figures(x, y)
    if relative > bound:
        name, subject = ("head", "the loss of the head") if key == "loss" else (key, "the norm of the gradients")
        text = f"in {pair.name} {subject} differs: {x:.6g} and {y:.6g}, relative {relative:.1e} (bound {bound:g})"
        yield Finding(key, name, relative, "", text)


def _find_updates(pair: ReplayPair, bound: float) -> Iterator[Finding]:
    x, y = pair.read_figures("lr")
    if compare_figures(x, y) > bound:
        text = f"the learning rates of the step differ: {x:.6g} and {y:.6g}"
        yield Finding(RATE, "lr", compare_figures(x, y), "", text)
    beyond = [d for d in pair.tensors[UPDATE] if d.relative > bound]
    for difference in beyond[:1]:
        groups = [step.groups.get(difference.name, "no parameter group") for step in (pair.a, pair.b)]
        group = groups[0] if groups[0] == groups[1] else f"{groups[0]}; in B {groups[1]}"
        subject = f"update of {_name(difference)}{_count_more(beyond)} from the same gradients, in {group}"
        yield _name_first(pair, UPDATE, difference, subject)


def _count_more(differences: Sequence[Difference]) -> str:
    return f" (as {len(differences) - 1} more do)" if len(differences) > 1 else ""


def _make_finding(kind: str, difference: Difference, text: str, name: str | None = None) -> Finding:
    return Finding(kind, name or difference.name, difference.relative, difference.where, text)


def _name_first(pair: ReplayPair, kind: str, first: Difference, subject: str, name: str | None = None) -> Finding:
    text = f"in {pair.name} the first difference is in the {subject}: {_measure(first)}"
    return _make_finding(kind, first, text, name)


def _describe_faults(decider: ReplayPair, faults: Sequence[Finding], bound: float) -> str:
    if faults:
        is_setting = faults[0].kind == RATE
        owner = "but only in the update, whose settings differ" if is_setting else "a fault of layout or model"
        return f"2. in {decider.name} both differ by more than {bound:g}, {owner}"
    largest = find_largest(decider.all)
    size = f"the largest difference is {largest.relative:.1e}, {describe_key(largest.key)}" if largest else "bitwise"
    return f"2. in {decider.name} outputs, gradients and updates agree within {bound:g}: {size}"


def find_largest(differences: Sequence[Difference]) -> Difference | None:
    """Return the largest difference; None where all are equal."""
    unequal = [d for d in differences if d.relative]
    return max(unequal, key=lambda d: d.relative) if unequal else None


# --- 3. precision


def _judge_precision(native: ReplayPair, exact: ReplayPair, spread: Spread | None) -> tuple[list[Finding], str]:
    """Return what is larger than random rounding explains, and a sentence."""
    largest = find_largest(native.activations)
    figures = _format_figures(native)
    if largest is None and not figures:
        return [], f"3. in {native.name} all that was compared is equal, bitwise"
    size = f"{largest.relative:.1e}, {describe_key(largest.key)}" if largest else "none in what hooks see"
    differ = f"3. only in {native.name} they differ: {size}{figures}"
    if spread is None:
        return [], f"{differ}; no repetitions were computed"
    excess = spread.find_excess(native.activations)
    sentence = f"{differ}; {spread.describe(native.a.record, native.b.record)}"
    if excess is None or native.is_mixed:
        size = "no more than random rounding" if excess is None else f"{excess[1]:.1f} times the spread"
        return [], f"{sentence}: {size}, so it is precision"
    difference, ratio = excess
    text = (
        f"in {native.name} the {describe_key(difference.key)} differs by {difference.relative:.1e}, {ratio:.1f} times "
        f"the spread of random rounding, and not in {exact.name}: a fault of what the precision computes"
    )
    return [_make_finding("rounding", difference, text)], sentence


def _format_figures(native: ReplayPair) -> str:
    """Return loss and gradient norm where they are not equal."""
    pairs = {key: native.read_figures(key) for key in ("loss", "grad_norm")}
    return "".join(f"; {key} {x:.6g} and {y:.6g}" for key, (x, y) in pairs.items() if x != y)


# --- 4. what was not compared


def _describe_missing(native: ReplayPair) -> list[str]:
    """Return a sentence on what was not compared; nothing where all was."""
    reasons: dict[str, list[str]] = {}
    for side, step in (("A", native.a), ("B", native.b)):
        for name, reason in step.unobserved.items():
            reasons.setdefault(name, []).append(f"{reason} in {side}")
    by_reason: dict[str, list[str]] = {}
    for name in diff.sort_layers(reasons):
        by_reason.setdefault(" and ".join(reasons[name]), []).append(sanitize_line(name))
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        parts.append(f"{', '.join(names[:NAMED])}{more} ({reason})")
    return [f"4. outputs that were not compared: {'; '.join(parts)}"] if parts else []


def _summarize(native: ReplayPair, exact: ReplayPair, bound: float) -> str:
    """Return the last line where nothing was found."""
    is_equal = not any(d.relative for d in (*exact.all, *native.activations)) and not _format_figures(native)
    missing = native.a.unobserved or native.b.unobserved
    scope = "all that was compared" if missing else "all activations, gradients and updates"
    if is_equal:
        return f"both are the same, bitwise, in {scope}"
    return f"no fault of layout or model: {scope} agree to rounding ({bound:g} in {exact.name})"


# --- words


def describe_key(key: Key) -> str:
    """Return what a difference is of, in words."""
    direction, name = key[0], sanitize_line(key[1])
    words = {
        "forward": f"output of {name}",
        "backward": f"gradient of {name}'s output",
        GRADIENT: f"reduced gradient of {name}",
        UPDATE: f"update of {name}",
    }
    return words.get(direction, f"{direction}: {name}")


def _name(difference: Difference) -> str:
    return sanitize_line(difference.name)


def _measure(difference: Difference) -> str:
    """Return the size of a difference and where it is."""
    where = f" ({sanitize_line(difference.where)})" if difference.where else ""
    return f"{difference.relative:.1e}{where}"
