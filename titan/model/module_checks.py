"""Whether titan can count a model of one's own, and whether a layout's techniques can treat its modules.

A technique recognises modules by their classes. A module of another class is rejected here, before any rank starts: it
would be skipped, and the layout would train another model.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from titan.config.kinds import get_kind
from titan.console.numbers import format_count
from titan.errors import ConfigError
from titan.model.built_counts import BuiltCounts
from titan.model.core import GUIDE, AttentionCore, KeyValueCore, RecurrentCore, find_unknown, iterate_cores
from titan.model.core_contract import find_core_error
from titan.model.decoder import Placement
from titan.model.experts import ExpertLinear, MixtureOfExperts
from titan.model.layers import Head
from titan.model.parts import find_gated_layers
from titan.model.schema import Decoder
from titan.model.token_mixing import find_token_mixing

SPLIT = {"vocab": 0, "colwise": 0, "rowwise": 1}
"""The dimension of a weight that ranks split, by its placement; others stay whole."""


def check_module(
    schema: Decoder, tensor: int = 1, context: int = 1, expert: int = 1, gate: bool = False, sequence: bool = False
) -> None:
    """Raise ConfigError for the first module or parameter that a technique can't treat, or that is not counted.

    Args:
        schema: of the model, which is built on meta.
        tensor: the degree of tensor parallelism; `context` and `expert` likewise.
        gate: whether gated products are recomputed (`memory=gate`).
        sequence: whether tensor ranks split rows too, between matmuls.
    """
    with torch.device("meta"):
        model: Any = schema.build()
    name = get_kind(type(schema))
    for errors in (
        _find_split_errors(model, name, tensor, context),
        _find_value_errors(model, name),
        _find_mixing_errors(model, schema, name, tensor, context, sequence),
        _find_expert_errors(model, schema, name, expert, gate),
        _find_count_errors(model, schema, name),
    ):
        if (error := next(errors, None)) is not None:
            raise ConfigError(error)


def _find_split_errors(model: Any, name: str, tensor: int, context: int) -> Iterator[str]:
    """Yield what is wrong with a plan for tensor parallelism, and which attention can't be split over ranks."""
    for error in _find_plan_errors(model, tensor) if tensor > 1 else ():
        yield (
            f"parallelism.tensor={tensor}: the model {name} can't be split: {error}; correct BLOCK_PLAN of "
            f"{type(model).__qualname__}, or give parallelism.tensor=1."
        )
    for number, block in model.layers.items():
        if context > 1 and (unknown := find_unknown(block, (KeyValueCore, RecurrentCore))):
            yield (
                f"parallelism.context={context}: attention {unknown} of layers.{number} of the model {name} can't be "
                f"computed by ranks that have parts of a row; derive it from titan.model.core.KeyValueCore or "
                f"RecurrentCore ({GUIDE}), or give parallelism.context=1."
            )
        if tensor > 1 and (unknown := find_unknown(block, (AttentionCore,), is_required=False)):
            yield (
                f"parallelism.tensor={tensor}: attention {unknown} of layers.{number} of the model {name} does not "
                f"state that it computes each head by itself; derive it from titan.model.core.AttentionCore ({GUIDE}), "
                "or give parallelism.tensor=1."
            )


def _find_plan_errors(model: nn.Module, degree: int) -> Iterator[str]:
    try:
        plan: Mapping[str, Placement] = model.tensor_plan()  # type: ignore[operator]
    except AttributeError:
        yield "it declares no BLOCK_PLAN"
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    placements = typing.get_args(Placement)
    for name, placement in plan.items():
        weight = parameters.get(f"{name}.weight")
        if name not in modules:
            yield f"its plan names {name}, which is no module"
        elif placement not in placements:
            yield f"its plan has {placement} for {name}, which is none of {', '.join(placements)}"
        elif placement == "region":
            continue
        elif weight is None:
            yield f"its plan has {placement} for {name}, which has no weight"
        elif not hasattr(modules[name], "get_weight"):
            yield f"{name} is a {type(modules[name]).__name__} and no layer of titan.model.layers"
        elif placement in SPLIT and weight.shape[SPLIT[placement]] % degree:
            yield f"{degree} does not divide dimension {SPLIT[placement]} of {name}.weight {tuple(weight.shape)}"
    planned_names = {f"{name}.weight" for name, placement in plan.items() if placement != "region"}
    for name in sorted(parameters.keys() - planned_names):
        yield f"its plan has no entry for the parameter {name}"


def _find_value_errors(model: Any, name: str) -> Iterator[str]:
    """Yield which tensors lose the values that `__init__` computes, since it runs on meta, and what is random."""
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield f"model={name}: {path} is a {type(module).__name__}, and titan seeds no randomness; leave it out."
        if plain_tensors := [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]:
            yield (
                f"model={name}: the tensor {plain_tensors[0]} of {path or type(model).__qualname__} is neither a "
                f"parameter nor a buffer, so that no device gets it; compute it in forward, or register a "
                f"buffer ({GUIDE})."
            )
    before = {key: (buffer, buffer._version) for key, buffer in model.named_buffers()}
    model.init_buffers("cpu")
    for key, buffer in model.named_buffers():  # it neither replaced nor wrote to it
        if key in before and buffer is before[key][0] and buffer._version == before[key][1]:
            yield (
                f"model={name}: nothing sets the values of the buffer {key}; set them in init_buffers(device) of "
                f"{type(model).__qualname__}, which calls super().init_buffers(device) ({GUIDE})."
            )


def _find_mixing_errors(
    model: Any, schema: Decoder, name: str, tensor: int, context: int, sequence: bool
) -> Iterator[str]:
    """Yield which attention of one's own does not do what its class states, and what mixes tokens outside of it.

    The model has buffers; one block of each kind is computed.
    """
    for layers in schema.kinds().values():
        for core in iterate_cores(model.layers[str(layers[0])]):
            if error := find_core_error(core, schema.heads, schema.kv_heads, schema.head_size, tensor):
                yield f"model={name}: attention {type(core).__qualname__} of layers.{layers[0]} {error} ({GUIDE})."
    for setting, way_out, splits_rows, regions_have_rows in (
        (f"parallelism.context={context}", "parallelism.context=1", context > 1, False),
        ("parallelism.sequence_parallel=true", "parallelism.sequence_parallel=false", sequence, True),
    ):
        if splits_rows and (part := find_token_mixing(schema, regions_have_rows).part):
            yield (
                f"{setting}: ranks have parts of a row, and {part} of the model {name} mixes tokens outside of its "
                f"attention core; mix them in the core ({GUIDE}), or give {way_out}."
            )


def _find_expert_errors(model: Any, schema: Decoder, name: str, degree: int, gate: bool) -> Iterator[str]:
    """Yield which experts can't be divided over ranks or called with rows, and which gates can't be recomputed."""
    for layer in range(schema.layers) if degree > 1 else ():
        modules = list(model.layers[str(layer)].modules())
        mixtures = [module for module in modules if isinstance(module, MixtureOfExperts)]
        divided_ids = {id(linear) for mixture in mixtures for linear in mixture.experts.children()}
        undivided_experts = [m for m in modules if isinstance(m, ExpertLinear) and id(m) not in divided_ids]
        if undivided_experts or (schema.expert_parameters(layer) and not mixtures):
            yield (
                f"parallelism.expert={degree}: the experts of layers.{layer} of the model {name} are in no "
                "titan.model.experts.MixtureOfExperts, which sends tokens to them; derive from it, or give "
                "parallelism.expert=1."
            )

    for layer in range(schema.layers) if gate else ():
        if not find_gated_layers(block := model.layers[str(layer)]):
            yield (
                f"memory.checkpointing=gate: layers.{layer} of the model {name}, a {type(block).__name__}, has no "
                "titan.model.layers.FeedForward with its forward, whose gated product is recomputed; give another "
                "memory, such as none or full."
            )

    for module_name, module in model.named_modules():
        if not isinstance(module, MixtureOfExperts):
            continue
        try:
            inspect.signature(module.experts.forward).bind("x", "offsets", "weights", True)
        except TypeError as error:
            yield (
                f"model={name}: {module_name}.experts, a {type(module.experts).__name__}, does not take the rows of "
                f"experts, their ends, their weights and whether there is no padding ({error}); derive it from "
                "titan.model.experts.Experts."
            )


def _find_count_errors(model: Any, schema: Decoder, name: str) -> Iterator[str]:
    """Yield whether settings of the loss would be skipped, and what of the module the schema does not count."""
    if schema.predicts_tokens and not isinstance(model.head, Head):
        yield (
            f"model={name}: the head is a {type(model.head).__name__}, on which settings of logits and the loss have "
            "no effect; derive it from titan.model.layers.Head, or state predicts_tokens = False."
        )
    counts_attention = type(schema).attention_flops is not BuiltCounts.attention_flops
    for number, block in model.layers.items() if not counts_attention else ():
        if unknown := find_unknown(block, (AttentionCore,)):
            yield (
                f"model={name}: the FLOPs of attention {unknown} of layers.{number} are not known; define "
                f"attention_flops(seq_len, layer), or derive it from titan.model.core.AttentionCore ({GUIDE})."
            )
    for layer in range(schema.layers):
        modules = model.layers[str(layer)].modules()
        expert_elements = sum(module.weight.numel() for module in modules if isinstance(module, ExpertLinear))
        if expert_elements != schema.expert_parameters(layer):
            yield (
                f"model={name}: the experts of layers.{layer} have {expert_elements:,} parameters, and the model "
                f"counts {schema.expert_parameters(layer):,}; correct expert_parameters and active_expert_parameters."
            )
    built, counted = sum(parameter.numel() for parameter in model.parameters()), schema.parameters()
    if built != counted:
        yield (
            f"model={name}: the module has {format_count(built)} parameters ({built}), and the model counts {counted}; "
            "correct block_parameters, embedding_parameters and head_parameters."
        )
