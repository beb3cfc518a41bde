"""Latent attention of a part of the heads on each tensor rank: hidden states and summed gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.model.test_parity import GROUPS, LATENT, YARN, difference
from tests.support.ranks import run_ranks
from titan.model.schema_deepseek import DeepseekV3
from titan.parallelism import tensor

MODELS = {"latent-queries": DeepseekV3(**GROUPS, **YARN), "plain-queries": DeepseekV3(**LATENT)}


def trained(config: DeepseekV3, sequence: bool | None) -> Any:
    """A model with the gradients of a step; `sequence`: split over all ranks, None: whole."""
    torch.manual_seed(0)
    model = config.build()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    if sequence is not None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        tensor.apply_tensor_plan(model, mesh, sequence_parallel=sequence, loss_parallel=True)
    tokens = torch.randint(config.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    model.head(model(tokens), tokens).backward()
    if sequence is not None:
        tensor.sum_shared_gradients(model.modules(), mesh.get_group(), torch.device("cpu"))
    return model


def rank_errors(rank: int, world: int, config: DeepseekV3, sequence: bool) -> dict[str, float]:
    exact = {name: weight.grad for name, weight in trained(config, None).named_parameters()}
    found = {name: weight.grad for name, weight in trained(config, sequence).named_parameters()}
    assert all(isinstance(gradient, DTensor) for gradient in found.values())
    return {name: difference(found[name].full_tensor(), exact[name]) for name in exact}


@pytest.mark.parametrize("sequence", [pytest.param(True, id="sequence"), pytest.param(False, id="whole-sequence")])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_gradients_are_those_of_one_device(config: DeepseekV3, sequence: bool) -> None:
    for errors in run_ranks(rank_errors, 2, config, sequence):
        assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}
