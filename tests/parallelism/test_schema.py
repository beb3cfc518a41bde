"""Layouts: degrees become numbers that multiply to the devices, or are rejected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.parallelism.schema import DIMENSIONS, Layout, Parallelism, resolve_layout

DEGREES = st.integers(1, 6)
DEVICES = st.integers(1, 2048)
LIMITS = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(1, 16))


@given(st.tuples(*[DEGREES] * 5))
def test_ranks_are_the_product(degrees: tuple[int, ...]) -> None:
    layout = Layout(**dict(zip(DIMENSIONS, degrees, strict=True)))
    assert layout.devices == math.prod(degrees)
    assert layout.data_ranks * layout.pipeline * layout.context * layout.tensor == layout.devices
    assert tuple(layout.degrees()) == DIMENSIONS
    assert tuple(layout.degrees().values()) == degrees


@given(st.sampled_from(DIMENSIONS), DEVICES, LIMITS)
def test_one_open_degree_takes_all(name: str, devices: int, limits: dict[str, int]) -> None:
    assert resolve_layout(Parallelism(**{name: -1}), devices, limits) == Layout(**{name: devices})


@given(st.fixed_dictionaries({name: st.one_of(DEGREES, st.just("auto")) for name in DIMENSIONS}), DEVICES, LIMITS)
def test_layout_has_the_devices_and_the_degrees_given(
    degrees: dict[str, int | str], devices: int, limits: dict[str, int]
) -> None:
    parallelism = Parallelism(**{**degrees, "shard": -1})
    fixed = math.prod(d for d in {**degrees, "shard": 1}.values() if isinstance(d, int))
    try:
        layout = resolve_layout(parallelism, devices, limits)
    except ConfigError:
        assert devices % fixed, "rejected although the degrees divide the devices"
        return
    assert layout.devices == devices
    for name in set(DIMENSIONS) - {"shard"}:
        degree = degrees[name]
        found = layout.degrees()[name]
        assert found == degree if degree != "auto" else limits.get(name, 2) % found == 0


@given(st.fixed_dictionaries({name: st.one_of(DEGREES, st.sampled_from([-1, "auto"])) for name in DIMENSIONS}))
def test_without_a_number_of_devices_open_degrees_are_two(degrees: dict[str, int | str]) -> None:
    layout = resolve_layout(Parallelism(**degrees), None, {})
    assert layout.degrees() == {name: 2 if d in (-1, "auto") else d for name, d in degrees.items()}


@given(st.fixed_dictionaries(dict.fromkeys(DIMENSIONS, DEGREES)), st.integers(1, 4096))
def test_closed_degrees_are_refused_unless_they_fit(degrees: dict[str, int], devices: int) -> None:
    product = math.prod(degrees.values())
    if product == devices:
        assert resolve_layout(Parallelism(**degrees), devices, {}).devices == devices
        return
    with pytest.raises(ConfigError, match=rf"makes {product:,} rank.*cluster.devices={product}\."):
        resolve_layout(Parallelism(**degrees), devices, {})


@pytest.mark.parametrize(
    ("degrees", "devices", "limits", "expected"),
    [
        pytest.param({"replicate": "auto", "shard": -1}, 16, {"replicate": 2}, {"replicate": 2, "shard": 8}, id="hsdp"),
        pytest.param({"shard": -1, "tensor": "auto"}, 64, {"tensor": 8}, {"shard": 8, "tensor": 8}, id="fsdp_tp"),
        pytest.param({"shard": -1, "tensor": "auto"}, 12, {"tensor": 8}, {"shard": 3, "tensor": 4}, id="uneven"),
        pytest.param(
            {"shard": -1, "tensor": "auto", "pipeline": "auto"},
            32, {"tensor": 8, "pipeline": 2}, {"pipeline": 2, "shard": 2, "tensor": 8}, id="3d",
        ),
        pytest.param({"shard": "auto"}, 2, {}, {"shard": 2}, id="auto-alone"),
        pytest.param({"shard": -1, "tensor": "auto"}, 1, {"tensor": 8}, {}, id="one-device"),
    ],
)  # fmt: skip
def test_rules(degrees: dict[str, int | str], devices: int, limits: dict[str, int], expected: dict[str, int]) -> None:
    assert resolve_layout(Parallelism(**degrees), devices, limits) == Layout(**expected)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_no_degree_is_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallelism.{name}=0: must be 1 or more"):
        Parallelism(**{name: 0}).check()


@given(st.sets(st.sampled_from(DIMENSIONS)))
def test_only_one_degree_takes_the_rest(names: set[str]) -> None:
    parallelism = Parallelism(**dict.fromkeys(names, -1))
    if len(names) <= 1:
        parallelism.check()
        return
    with pytest.raises(ConfigError, match="only one can take the rest"):
        parallelism.check()


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        pytest.param(Layout(), "one device", id="one"),
        pytest.param(Layout(shard=8), "shard 8", id="fsdp"),
        pytest.param(
            Layout(pipeline=2, replicate=3, tensor=4), "pipeline 2 x replicate 3 x tensor 4", id="outermost-first"
        ),
    ],
)
def test_is_said_in_words(layout: Layout, text: str) -> None:
    assert str(layout) == text


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        pytest.param(Layout(), {}, id="one-device"),
        pytest.param(Layout(replicate=2), {"replicate": 2}, id="ddp"),
        pytest.param(Layout(replicate=2, tensor=2), {"replicate": 2, "shard": 1, "tensor": 2}, id="ddp-tp"),
        pytest.param(Layout(pipeline=2, replicate=2), {"pipeline": 2, "replicate": 2, "shard": 1}, id="ddp-pp"),
        pytest.param(Layout(replicate=2, context=3), {"replicate": 2, "shard": 3}, id="ddp-cp"),
        pytest.param(Layout(shard=2, context=3, tensor=2), {"shard": 6, "tensor": 2}, id="fsdp-cp-tp"),
    ],
)
def test_the_mesh_of_weights(layout: Layout, mesh: dict[str, int]) -> None:
    assert list(layout.mesh_degrees().items()) == list(mesh.items())
