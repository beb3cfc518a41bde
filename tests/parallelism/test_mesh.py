"""How ranks meet."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from launchers.place import Place
from tests.ranks import run_ranks
from tests.runs import tiny, train
from titan.parallelism import mesh
from titan.parallelism.schema import Layout


@pytest.mark.parametrize("aside", [False, True])
def test_a_group_beside_trainings_is_made_where_it_is_asked_for(aside: bool, tmp_path: Path) -> None:
    def joined(rank: int, size: int) -> bool:
        place = Place(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect(place, Layout(replicate=2), "cpu", 30, aside=aside)
        try:
            return world.aside is not None
        finally:
            world.close()

    assert run_ranks(joined, 2, joined=False) == [aside, aside]


@pytest.mark.parametrize(("mode", "aside"), [("off", False), ("sync", True)])
def test_a_run_asks_for_it_where_it_saves_or_loads(mode: str, aside: bool, tmp_path: Path) -> None:
    save, off = tiny(tmp_path / "run", layout="ddp2"), [f"checkpoint={mode}", "training.steps=4"]
    train(save)
    fork = [f"checkpoint.resume={tmp_path}/run", *off]
    for name, more, expected in (("new", off, aside), ("fork", fork, True)):
        seen = train(tiny(tmp_path / name, *more, layout="ddp2"), lambda trainer: trainer.world.aside is not None)
        assert [rank.extra for rank in seen] == [expected] * 2


@pytest.mark.parametrize(
    ("nccl", "gloo", "expected"),
    [
        pytest.param("ib0", None, "ib0", id="name"),
        pytest.param("=eth1", None, "eth1", id="whole-name"),
        pytest.param("ib", None, "ib0", id="beginning"),
        pytest.param("eth", None, None, id="beginning-of-two"),
        pytest.param("=eth", None, None, id="no-such-name"),
        pytest.param("^lo", None, None, id="not-that"),
        pytest.param("ib0,eth0", None, None, id="list"),
        pytest.param("ib0", "eth0", "eth0", id="said"),
        pytest.param(None, None, None, id="nothing-said"),
    ],
)
def test_gloo_takes_the_interface_that_nccl_is_told_to_take(
    nccl: str | None, gloo: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "eth1", "ib0"], 1)))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "restored")  # so that what the function sets is undone
    for name, value in (("NCCL_SOCKET_IFNAME", nccl), ("GLOO_SOCKET_IFNAME", gloo)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    mesh._same_network()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
