"""The cases whose speed `titan.bench` measures: overrides only, composed one at a time. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRECISIONS, COMPILES = ("fp32", "bf16"), ("off", "block", "model")
FLOAT8 = ("float8", "float8_rowwise")
EXPERTS = ("model=qwen3_30b_a3b", "model.layers=8", "model.experts=32")
"""2.0B parameters, of which 1.1B compute a token."""
UNBALANCED = ("model.aux_loss=0",)
"""The bare loop has no loss that balances experts."""


@dataclass(frozen=True)
class SpeedCase:
    """One row of the table of speeds.

    Attributes:
        title: names the choices.
        overrides: titan's overrides.
        autocast: whether the bare loop uses torch.autocast.
        bare: the bare loop's scope of compilation; empty: titan's.
    """

    title: str
    overrides: tuple[str, ...]
    autocast: bool = False
    bare: Literal["", "off", "block", "model"] = ""


def list_cpu_cases() -> list[SpeedCase]:
    """Return each precision with each scope of compilation.

    Compiled blocks are also compared with a bare loop that is compiled as a whole, and bf16 with one under autocast.
    """
    cases = [_build_case(f"precision={p}", f"compile={c}") for p in PRECISIONS for c in COMPILES]
    block_cases = [case for case in cases if "compile=block" in case.overrides]
    bf16_cases = [
        case for case in cases if "precision=bf16" in case.overrides and "compile=model" not in case.overrides
    ]
    whole_cases = [SpeedCase(f"{case.title}, bare: model", case.overrides, bare="model") for case in block_cases]
    autocast_cases = [SpeedCase(f"{case.title}, bare: autocast", case.overrides, autocast=True) for case in bf16_cases]
    return [*cases, *whole_cases, *autocast_cases]


def list_gpu_cases() -> list[SpeedCase]:
    """Return the 1B model in each precision and scope, one with experts, and the 8B model as it fits in 141 GB.

    With weights and gradients in fp32 the 8B model fits only with activation checkpointing.
    """
    small = [
        *(("precision=bf16", f"compile={scope}") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "training.loss_chunk=2048"),
        *((f"precision={p}", "compile=block") for p in FLOAT8),
    ]
    frugal = ("optimizer.moments=bf16", "training.loss_chunk=2048")
    large = [
        *(("precision=bf16", f"compile={scope}", "memory=full") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "memory=selective"),
        *((f"precision={p}", "compile=block", f"memory={m}") for m in ("selective", "full") for p in FLOAT8),
        ("precision=bf16_pure", "compile=block", "memory=none"),
    ]
    cases = [_build_case("model=llama1b", *choices) for choices in small]
    cases += [
        _build_case(*EXPERTS, "precision=bf16", f"compile={scope}", hidden=UNBALANCED) for scope in ("off", "block")
    ]
    return [*cases, *(_build_case("model=llama8b", *choices, hidden=frugal) for choices in large)]


def _build_case(*overrides: str, hidden: tuple[str, ...] = ()) -> SpeedCase:
    """Return a case whose title names the choices except `hidden` ones."""
    return SpeedCase(", ".join(map(_shorten_override, overrides)), (*overrides, *hidden))


def _shorten_override(override: str) -> str:
    """Return a choice for a title: the value alone for models and precisions."""
    name, _, value = override.partition("=")
    return value if name in ("model", "precision") else f"{name.rpartition('.')[2]} {value}"
