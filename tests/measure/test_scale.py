"""What grows with the number of ranks is measured on simulated ranks, which do what real ones do."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.measure import command, scale
from tests.measure.simulated_save import SimulatedSave, compute_parameter_sizes
from tests.support.process_groups import simulate_rank
from titan.checkpoint import reader
from titan.checkpoint.save_planner import create_write_items, describe_items
from titan.errors import RunError

SMALL = ("model=llama1b", "model.layers=4", "cluster=h100", "parallelism=fsdp", "parallelism.tensor=2", "name=scale")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SETTINGS", (*SMALL, "dataset=synthetic", "training.global_batch=65536"))
    monkeypatch.setattr(scale, "PIPELINE", "parallelism.pipeline=2")
    monkeypatch.setattr(scale, "LARGE", 16)


@pytest.mark.full
def test_a_measurement_is_of_cpu_time_and_of_memory_that_grows() -> None:
    def work(ranks: int, meter: scale.CostMeter) -> None:
        with meter:
            mmap.mmap(-1, ranks * 2**22).write(bytes(2**22) * ranks)

    seconds, mebibytes = scale._measure_cost(work, 16)
    assert 0 < seconds < 5 and 120 < mebibytes < 140


def test_a_measurement_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="a simulated rank of 16 ended with exit code 1"):
        scale._measure_cost(lambda ranks, meter: [][ranks], 16)
    assert "IndexError" in capfd.readouterr().err


@pytest.mark.full
def test_the_tensors_of_a_simulated_rank_are_its_items() -> None:
    run = scale.compose_scale_run(16)
    save, last = SimulatedSave(run, compute_parameter_sizes(run)), run.layout.sharded * run.layout.tensor - 1
    with simulate_rank(last, 16):
        items = create_write_items(save.make_tensors())
    names = [(item.index.fqn, item.tensor_data and item.tensor_data.size) for item in items]
    assert names == [(item.index.fqn, item.tensor_data and item.tensor_data.size) for item in save.templates[-1][0]]
    of_last = save.make_holdings(run.layout.devices - 1)
    assert run.layout.compute_coordinates(run.layout.devices - 1)["shard"] == run.layout.shard - 1
    assert describe_items(items).boxes == of_last.boxes


@pytest.mark.full
def test_the_simulated_ranks_save_whole_tensors(tmp_path: Path) -> None:
    run = scale.compose_scale_run(16)
    sizes = compute_parameter_sizes(run)
    save = SimulatedSave(run, sizes)
    contents = []
    for first in (True, False):
        save.send_holdings(first)
        save.make_global_plan(first)
        save.send_positions(first)
        save.finish_save(first, tmp_path)
        contents.append((tmp_path / reader.METADATA).read_bytes())
    assert run.layout.pipeline == run.layout.tensor == 2 and run.layout.shard == 4
    metadata = reader.parse_metadata(contents[0])
    assert metadata.state_dict_metadata.keys() == {
        key
        for name in sizes
        for key in (f"model.{name}", *(f"optimizer.{name}.{state}" for state in ("exp_avg", "exp_avg_sq", "step")))
    }
    for tensor in metadata.state_dict_metadata.values():
        assert isinstance(tensor, TensorStorageMetadata)
        assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size)
    assert {place.relative_path for place in metadata.storage_data.values()} == {f"__{r}_0.distcp" for r in range(16)}
    again = reader.parse_metadata(contents[1])
    assert (again.state_dict_metadata, again.storage_data) == (metadata.state_dict_metadata, metadata.storage_data)


@pytest.mark.parametrize(
    ("seconds", "growth"),
    [((1, 1, 8), 1.0), ((5, 2, 2), 0.0), ((1, 3, 192), 2.0), ((0, 1), None), ((1, 0), None), ((1,), None)],
)
def test_growth_is_the_exponent_of_the_time_of_the_largest(seconds: tuple[float, ...], growth: float | None) -> None:
    row = scale.CostRow([scale.RankCost("0", "work", 8**i, value, 1) for i, value in enumerate(seconds)])
    assert row.compute_growth() == (growth if growth is None else pytest.approx(growth))
    assert "work" in row.row() and ("-" if growth is None else f"{growth:.1f}") in row.row()


@pytest.mark.full
def test_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "RANKS", (8, 16))
    out = tmp_path / "figures.json"
    assert command.main(["suite=scale", f"to={out}"]) == 0
    rows = json.loads(out.read_text())
    assert [(row["costs"][0]["rank"], row["costs"][0]["what"]) for row in rows] == list(scale.WORK)
    assert all([cost["ranks"] for cost in row["costs"]] == [8, 16] for row in rows)
    costs = [cost for row in rows for cost in row["costs"] if not cost["what"].startswith("training")]
    assert all(cost["seconds"] > 0 for cost in costs)
    assert "first save's plan" in capsys.readouterr().out
