"""The cases that `titan.bench` measures speed in: overrides only, composed when their turn comes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRECISIONS, COMPILES = ("fp32", "bf16"), ("off", "block", "model")
SMALL = ("float8", "float8_rowwise")


@dataclass(frozen=True)
class Case:
    """One row of the table of speeds.

    Attributes:
        title: says what is measured.
        overrides: titan's.
        autocast: the bare loop computes through torch.autocast.
        bare: what the bare loop compiles, a scope of `titan.compile.schema`; empty: the same as titan.
    """

    title: str
    overrides: tuple[str, ...]
    autocast: bool = False
    bare: Literal["", "off", "block", "model"] = ""


def cpu_cases() -> list[Case]:
    """Each precision with each scope, blocks also against a bare loop that is compiled as a whole.

    In bf16 the bare loop has another form, too.
    """
    cases = [_case(f"precision={p}", f"compile={c}") for p in PRECISIONS for c in COMPILES]
    blocks = [case for case in cases if "compile=block" in case.overrides]
    forms = [case for case in cases if "precision=bf16" in case.overrides and "compile=model" not in case.overrides]
    whole = [Case(f"{case.title}, bare: model", case.overrides, bare="model") for case in blocks]
    cast = [Case(f"{case.title}, bare: autocast", case.overrides, autocast=True) for case in forms]
    return [*cases, *whole, *cast]


def gpu_cases() -> list[Case]:
    """The 1B in each precision and scope, and the whole 8B in those modes that fit one device of 141 GB.

    With weights and gradients in fp32 the 8B fits only where blocks keep less than all.
    """
    small = [
        *(("precision=bf16", f"compile={scope}") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "training.loss_chunk=2048"),
        *((f"precision={p}", "compile=block") for p in SMALL),
    ]
    frugal = ("optimizer.moments=bf16", "training.loss_chunk=2048")
    large = [
        *(("precision=bf16", f"compile={scope}", "memory=full") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "memory=selective"),
        *((f"precision={p}", "compile=block", f"memory={m}") for m in ("selective", "full") for p in SMALL),
        ("precision=bf16_pure", "compile=block", "memory=none"),
    ]
    cases = [_case("model=llama1b", *choices) for choices in small]
    return [*cases, *(_case("model=llama8b", *choices, hidden=frugal) for choices in large)]


def _case(*overrides: str, hidden: tuple[str, ...] = ()) -> Case:
    """A case whose title says the choices, but not `hidden` ones."""
    return Case(", ".join(map(_words, overrides)), (*overrides, *hidden))


def _words(override: str) -> str:
    """A choice as a title says it: the value alone where that says enough."""
    name, _, value = override.partition("=")
    return value if name in ("model", "precision") else f"{name.rpartition('.')[2]} {value}"
