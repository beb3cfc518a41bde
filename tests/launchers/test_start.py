"""Real programs: what signals, kills, torchrun and srun do to `python -m titan.train`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import (
    is_alive,
    kill_process,
    list_descendants,
    read_command,
    run_program,
    wait_for_end,
    wait_until,
)  # fmt: skip
from tests.support.runs import LAYOUTS, TINY, compose_tiny_run, read_step_records
from tests.support.tiers import full
from titan.checkpoint import manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

TRAIN = ["-m", "titan.train", *TINY, "checkpoint.every=0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
EXPLODES = ["optimizer=sgd", "optimizer.lr=1e30", "training.clip_norm=null", "training.bad_steps=1", "training.steps=9"]


def arguments(folder: Path, layout: str, *more: str) -> list[str]:
    return [*TRAIN, *LAYOUTS[layout], f"hydra.run.dir={folder}", *more]


def lines(folder: Path) -> int:
    """Steps done so far."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def srun(stack: ExitStack, *command: str) -> list[subprocess.Popen[str]]:
    """Two processes with the variables that srun sets."""
    reserved = stack.enter_context(socket.socket())  # until the end: nobody else gets the port, and rank 0 may listen
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    envs = [{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    return [stack.enter_context(run_program(*command, env=env)) for env in envs]


def attempts_of(folder: Path) -> int:
    return (folder / "run.yaml").read_text().count("\nattempt: ")


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        full("single", signal.SIGINT, id="single-SIGINT"),
        full("fsdp2", signal.SIGTERM, id="fsdp2-SIGTERM"),
    ],
)
def test_a_signal_stops_saves_and_the_same_command_goes_on(layout: str, number: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_program(*arguments(folder, layout, "training.steps=100000", "cluster.timeout=240")) as process:
        wait_until(lambda: lines(folder) > 3 or process.poll() is not None, "steps")
        ranks = list_descendants(process.pid)
        process.send_signal(number)
        code, out, err = wait_for_end(process)
    assert (code, "Traceback" in out + err) == (130, False)
    assert not any(map(is_alive, ranks))
    stopped = result(folder)["step"]
    assert [f.name for f in manifest.list_complete(folder)] == [f"step-{stopped}"]
    assert len(read_step_records(compose_tiny_run(folder))) == stopped
    if layout != "single":
        return
    with run_program(*arguments(folder, layout, "training.steps=100000")) as process:
        wait_until(lambda: lines(folder) > stopped + 3 or process.poll() is not None, "steps after the resume")
        process.send_signal(number)
        assert wait_for_end(process)[0] == 130
    records = read_step_records(compose_tiny_run(folder))
    assert [line["step"] for line in records] == list(range(1, len(records) + 1))
    assert next(line["step"] for line in records if line["attempt"] == 2) == stopped + 1
    assert [line["rows"][0] for line in records] == list(range(0, 8 * len(records), 8))


@pytest.mark.full
def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    with run_program(*arguments(tmp_path / "run", "single", "training.steps=100000")) as process:
        wait_until(lambda: lines(tmp_path / "run") > 3 or process.poll() is not None, "steps")
        process.send_signal(signal.SIGSTOP)  # so that both are there before it can act on the first
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert wait_for_end(process)[0] == 130
    assert manifest.list_complete(tmp_path / "run") == []


@pytest.mark.full
def test_a_killed_rank_is_named_and_restarted_from_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ["cluster.restarts=1", "checkpoint.every=20", "training.steps=1000000"]
    with run_program(*arguments(folder, "ddp2", *more)) as process:
        wait_until(lambda: manifest.list_complete(folder) or process.poll() is not None, "a checkpoint")
        kill_process(next(pid for pid in list_descendants(process.pid) if "/1.pickle" in read_command(pid)))
        wait_until(lambda: attempts_of(folder) == 2 or process.poll() is not None, "the restart")
        before = lines(folder)
        wait_until(lambda: lines(folder) > before + 3 or process.poll() is not None, "steps after the restart")
        process.send_signal(signal.SIGTERM)
        code, _, err = wait_for_end(process)
    assert code == 130, err
    assert err.count("was killed by SIGKILL") == 1
    assert "titan: restart 1 of 1" in err
    logged = (folder / "log" / "launcher.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in logged[:2]] == [
        "rank 1 was killed by SIGKILL (out of memory?); see log/rank-1.log",
        "restart 1 of 1",
    ]
    attempts = list(yaml.safe_load_all((folder / "run.yaml").read_text()))[1:]
    records = read_step_records(compose_tiny_run(folder))
    assert attempts[-1]["from_step"] % 20 == 0 < attempts[-1]["from_step"]
    assert next(line["step"] for line in records if line["attempt"] == 2) == attempts[-1]["from_step"] + 1
    assert [line["rows"][0] for line in records] == list(range(0, 8 * len(records), 8))


DONE, REFUSED = "Done after step 3 of 3", "titan: model.dim=banana: expected a whole number"


@pytest.mark.parametrize(
    ("launcher", "more", "code", "said"),
    [
        full("torchrun", [], 0, DONE, id="torchrun-trains"),
        full("srun", [], 0, DONE, id="srun-trains"),
        full("torchrun", ["model.dim=banana"], 2, REFUSED, id="torchrun-refuses"),
        full("srun", ["model.dim=banana"], 2, REFUSED, id="srun-refuses"),
        full("srun", EXPLODES, 1, "titan: 1 step in a row without finite values", id="srun-fails"),
    ],
)
def test_ranks_that_others_started(launcher: str, more: list[str], code: int, said: str, tmp_path: Path) -> None:
    command = arguments(tmp_path / "run", "fsdp2", *more)
    with ExitStack() as stack:
        if launcher == "torchrun":
            started = [stack.enter_context(run_program(*TORCHRUN, *command, env={"GLOO_SOCKET_IFNAME": "lo"}))]
        else:
            started = srun(stack, *command)
        done = [wait_for_end(process) for process in started]
    output = "".join(out + err for _, out, err in done)
    assert output.count(said) == 1, output
    if launcher == "srun":
        assert [c for c, _, _ in done] == [code, code], output
    assert (done[0][0] == 0) == (code == 0), output
    own = output.partition("Traceback")[0] if launcher == "torchrun" and code else output  # torchrun ends with one
    assert "titan: rank" not in own and "Traceback" not in own
    if code == 0:
        assert result(tmp_path / "run")["finished"]
        assert len(read_step_records(compose_tiny_run(tmp_path / "run"))) == 3
    assert os.path.exists(tmp_path / "run") == (code != 2)
