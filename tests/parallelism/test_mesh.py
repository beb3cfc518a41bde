"""How ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import tiny, train
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.parallelism import mesh
from titan.parallelism.schema import Layout


@pytest.mark.parametrize("exchange", [False, True])
def test_a_group_beside_trainings_is_made_where_it_is_asked_for(exchange: bool, tmp_path: Path) -> None:
    def joined(rank: int, size: int) -> bool:
        place = RankInfo(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect(place, Layout(replicate=2), "cpu", 30, exchange=exchange)
        try:
            return world.exchange is not None
        finally:
            world.close()

    assert run_ranks(joined, 2, joined=False) == [exchange, exchange]


@pytest.mark.parametrize(("mode", "exchange"), [full("off", False), ("sync", True)])
def test_a_run_asks_for_it_where_it_saves_or_loads(mode: str, exchange: bool, tmp_path: Path) -> None:
    save, off = tiny(tmp_path / "run", layout="ddp2"), [f"checkpoint={mode}", "training.steps=4"]
    train(save)
    fork = [f"checkpoint.resume={tmp_path}/run", *off]
    for name, more, expected in (("new", off, exchange), ("fork", fork, True)):
        seen = train(tiny(tmp_path / name, *more, layout="ddp2"), lambda trainer: trainer.world.exchange is not None)
        assert [rank.extra for rank in seen] == [expected] * 2
