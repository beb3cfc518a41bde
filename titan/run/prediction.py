"""What an attempt is predicted to take: made at its start, kept in its document of run.yaml. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.errors import ConfigError
from titan.estimate.constants import load_constants
from titan.estimate.plan import PredictedValue, build_plan, list_memory_parts
from titan.files import untrusted

if TYPE_CHECKING:
    from titan.run.run import Run

KEY = "predicted"
"""Of a document in run.yaml."""
NOT_MEASURED = ("context", "allocator")
"""Memory of a GPU that metrics.jsonl does not count: it lies outside of the allocator, or is reserved and not used."""
FIGURES = ("step_seconds", "memory_gib", "rank0_memory_gib")
"""Figures with an interval."""
_KINDS: dict[str, Any] = {
    **dict.fromkeys(FIGURES, dict[str, float]), "parts": dict[str, dict[str, float]], "constants": str,
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """The figures of a plan that a run can test."""

    step_seconds: PredictedValue  # of a step
    memory_gib: PredictedValue  # of the fullest rank
    rank0_memory_gib: PredictedValue  # of rank 0 as metrics.jsonl measures it: on GPUs without `NOT_MEASURED`
    step_parts: Mapping[str, float]  # seconds of a step by cause
    memory_parts: Mapping[str, float]  # memory of the fullest rank by category
    constants: str  # version of the cost model's constants


def predict(run: Run) -> tuple[Prediction | None, str]:
    """Return the prediction of a run, None where its hardware is not described; and why an error prevented it.

    No error of the planner may stop a run.
    """
    try:
        planned = build_plan(run, run.layout, run.microbatches, run.machine)
        memory_parts = list_memory_parts(planned)
        uncounted = NOT_MEASURED if run.machine.device == "cuda" else ()
        measured = sum(size for name, size in planned.memory[0].parts.items() if name not in uncounted)
        prediction = Prediction(
            step_seconds=planned.step_seconds,
            memory_gib=planned.memory_gib_needed,
            rank0_memory_gib=planned.memory_gib_needed.scale(measured / planned.fullest.bytes),
            step_parts=dict(planned.step.parts),
            memory_parts=memory_parts,
            constants=load_constants().version,
        )
        return prediction, ""
    except ConfigError:
        return None, ""
    except Exception as error:
        return None, f"step time and memory are not predicted: {type(error).__name__}: {error}"


def to_document(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain data, under the names that titan.plan writes."""
    return {
        **{name: getattr(prediction, name)._asdict() for name in FIGURES},
        "parts": {"step_seconds": dict(prediction.step_parts), "memory_gib": dict(prediction.memory_parts)},
        "constants": prediction.constants,
    }


def parse_document(document: Mapping[str, Any]) -> Prediction | None:
    """Return the prediction in a document of run.yaml; None where it has none, or a corrupt one."""
    content: Any = document.get(KEY)
    try:
        for name, kind in _KINDS.items():
            untrusted.check_type(content[name], kind, name)
        step, memory, rank0 = (PredictedValue(**content[name]) for name in FIGURES)
        parts = content["parts"]
        return Prediction(step, memory, rank0, parts["step_seconds"], parts["memory_gib"], content["constants"])
    except (ValueError, KeyError, TypeError):
        return None
