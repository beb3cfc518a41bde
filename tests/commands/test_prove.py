"""`titan.prove`: right layouts are proven, planted faults are named, and certificates count for what they were made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import layout_faults, proof_faults
from tests.support.composing import compose_test_run
from titan import api, prove
from titan.cluster.devices import detect_machine
from titan.errors import ConfigError
from titan.model import experts, layers
from titan.model.schema import Llama
from titan.numerics.checks import Check
from titan.run import certificate
from titan.run.shrink import shrink_run
from titan.training import proof
from titan.training.proof import ProofJob, work
from titan.training.replay.routing import join_experts

PLAIN = ("dataset=synthetic", "compile=off", "checkpoint=off", "precision=fp32", "cluster=cpu")
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class OtherLlama(Llama):
    """A class of one's own with the settings of a Llama."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plant_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all as it is."""


def plant_a_rank_with_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's norms have another epsilon: its activations differ."""
    forward = layers.RMSNorm.forward

    def forward_with_large_epsilon(self: Any, x: torch.Tensor) -> torch.Tensor:
        factor = 1.001 if dist.is_initialized() and dist.get_rank() == 1 else 1.0
        return forward(self, x) * factor

    monkeypatch.setattr(layers.RMSNorm, "forward", forward_with_large_epsilon)


FAULTS = [
    pytest.param(plant_nothing, "", id="none"),
    pytest.param(plant_a_rank_with_other_rows, "gradients of step 1, fp32", id="one-rank-computes-otherwise"),
]


@pytest.mark.full
@pytest.mark.parametrize(("plant", "first"), FAULTS)
def test_a_fault_is_named(
    plant: Plant, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plant(monkeypatch)
    code = prove.main([*PLAIN, "parallelism=fsdp", f"to={tmp_path / 'certificate.json'}"])
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "certificate.json").read_text())
    if not first:
        assert code == 0 and "proven: 12 checks" in shown and content["passed"], shown
        assert all(check["worst"] <= check["bound"] for check in content["checks"])
    else:
        assert code == 1 and not content["passed"]
        assert f"failed, first {first}" in shown, shown


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout", "first"),
    [
        pytest.param("loss scaled by the data degree", "fsdp2", "grad_norm", id="scale"),
        pytest.param("replicas' gradients are not reduced", "hsdp4", "gradients of step 1", id="missing-reduction"),
        pytest.param("positions of a rank begin at zero", "cp2", "gradients of step 1", id="positions"),
    ],
)
def test_a_published_fault_is_found(name: str, layout: str, first: str) -> None:
    fault = next(fault for fault in layout_faults.FAULTS if fault.name == name)
    assert proof_faults.find_failure(fault, layout).startswith(first)


SEEDS = [
    pytest.param(("model=qwen3_moe_debug",), (1e-2, 0.0), 3, id="experts-may-choose-others"),
    pytest.param(("model=qwen3_moe_debug",), (1e-2, 1.0), 1, id="bits-differ-too"),
    pytest.param(("model=qwen3_moe_debug",), (0.0, 0.0), 1, id="proven"),
    pytest.param((), (1e-2, 0.0), 1, id="dense"),
]


@pytest.mark.full
@pytest.mark.parametrize(("words", "sizes", "tries"), SEEDS)
def test_other_seeds_are_tried_only_where_a_tie_may_explain_it(
    words: tuple[str, ...], sizes: tuple[float, float], tries: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = [Check("gradients", sizes[0], 1e-5), Check("initial weights", sizes[1], 0.0)]
    seen: list[object] = []
    monkeypatch.setattr(proof._Prover, "prove", lambda self: seen.append(self) or checks)
    run = compose_test_run([*words, *PLAIN])
    found, ties = proof.prove(run, tmp_path, lambda job: None, lambda text: None)
    assert found == checks and len(seen) == tries and len(ties) == (3 if tries == 3 else 0)


def prove_experts(folder: Path, others: int) -> tuple[list[Check], list[str]]:
    """Prove experts on two ranks in bf16, where the layout gives every `others`-th token other experts; 0: none."""
    words = ("model=qwen3_moe_debug", "parallelism=ep", "parallelism.expert=2", "dataset=synthetic", "compile=off")
    run = compose_test_run([*words, "cluster=cpu", "precision=bf16", f"hydra.run.dir={folder / 'target'}"])
    choose = experts.Router.choose_experts

    def choose_others(self: Any, scores: torch.Tensor) -> torch.Tensor:
        chosen = choose(self, scores)
        chosen[:, ::others] = (chosen[:, ::others] + 1) % self.experts
        return chosen

    def run_ranks(job: ProofJob) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if others and job.run.name == "precision":
                monkeypatch.setattr(experts.Router, "choose_experts", choose_others)
            prove.fork(job, partial(work, job))

    shrunk = shrink_run(run, detect_machine("cpu"), str(folder))
    return proof.prove(shrunk.run, folder / "proof", run_ranks, lambda text: None)


OTHERS = [
    pytest.param(4, id="a-quarter-has-others"),
    pytest.param(0, marks=pytest.mark.full, id="healthy"),
]


@pytest.mark.full
@pytest.mark.parametrize("others", OTHERS)
def test_one_device_uses_the_experts_of_the_layout(
    others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "SEEDS", 1)
    found, _ = prove_experts(tmp_path, others)
    checks = {check.name: check for check in found}
    chosen, gradients = checks["experts of step 1, bf16"], checks["gradients of step 1, bf16"]
    assert gradients.passed  # with its own experts one device's gradients would be others
    assert chosen.worst == pytest.approx(1 / others, rel=0.1) if others else chosen.worst < 0.02
    assert [check.name for check in found if not check.passed] == ([chosen.name] if others else [])


JOINED = [
    pytest.param(
        [{"a": [[0, 1]], "b": [[0, 2]]}, {"a": [[1, 3]], "b": [[1, 0]]}], {"a": [1, 3], "b": [2, 0]}, id="rows"
    ),
    pytest.param(
        [{"a": [[0, 1], [1, 3]]}, {"a": []}, {"b": [[1, 0], [0, 2]]}], {"a": [1, 3], "b": [2, 0]}, id="stages"
    ),
    pytest.param([{"a": [[0, 1]], "b": [[0, 2], [1, 2]]}], {}, id="a-token-of-a-router-is-missing"),
    pytest.param([{"a": [[0, 1], [1, 2]], "b": []}], {}, id="a-router-is-compiled"),
    pytest.param([{}, {}], {}, id="dense"),
]


@pytest.mark.parametrize(("ranks", "experts_by_router"), JOINED)
def test_experts_are_given_only_where_those_of_all_tokens_were_seen(
    ranks: list[dict[str, list[list[int]]]], experts_by_router: dict[str, list[int]]
) -> None:
    tensors = [{name: torch.tensor(rows).view(-1, 2) for name, rows in rank.items()} for rank in ranks]
    joined = join_experts(tensors, tokens=2)
    assert {name: samples.values.flatten().tolist() for name, samples in joined.items()} == experts_by_router


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    yield compose_test_run([*PLAIN, "parallelism=fsdp", f"hydra.run.dir={tmp_path / 'run'}"])


SAME = [
    pytest.param(("optimizer.lr=0.1",), True, id="learning-rate"),
    pytest.param(("training.seed=3", "training.steps=7"), True, id="seed-and-steps"),
    pytest.param(("cluster.devices=4",), False, id="degrees"),
    pytest.param(("memory=full",), False, id="recomputation"),
    pytest.param(("precision=bf16",), False, id="precision"),
    pytest.param(("model.norm_eps=1e-6",), False, id="model"),
    pytest.param(("dataset.mask_documents=true",), False, id="masks"),
    pytest.param(("training.global_batch=2304",), False, id="a-remainder-of-rows"),
    pytest.param(("training.global_batch=4096",), True, id="more-rows"),
    pytest.param(("parallelism.shard=2",), True, id="the-same-degree"),
    pytest.param(("model._target_=tests.commands.test_prove.OtherLlama", "modules=[tests]"), False, id="class"),
]


@pytest.mark.full
@pytest.mark.parametrize(("overrides", "same"), SAME)
def test_a_certificate_is_for_a_layout_and_a_recipe(overrides: tuple[str, ...], same: bool, run: Any) -> None:
    other = compose_test_run([*PLAIN, "parallelism=fsdp", *overrides])
    assert (certificate.compute_key(run) == certificate.compute_key(other)) == same


@pytest.mark.full
def test_the_interface_for_notebooks_requires_it_too() -> None:
    with pytest.raises(ConfigError, match="no valid certificate"):
        api.train(compose_test_run([*PLAIN, "cluster.certificate=required"]))


@pytest.mark.full
def test_an_optimizer_without_state_is_proven() -> None:
    assert prove.main([*PLAIN, "parallelism=fsdp", "optimizer=sgd"]) == 0


@pytest.mark.full
def test_a_certificate_expires_with_the_code(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = certificate.compute_key(run)
    monkeypatch.setattr(certificate.identity, "read_git_diff", lambda: "another line")
    assert certificate.compute_key(run) != key


@pytest.mark.full
def test_a_required_certificate_must_be_there_have_passed_and_be_unchanged(run: Any) -> None:
    required = compose_test_run([*PLAIN, "parallelism=fsdp", "cluster.certificate=required"])
    key = certificate.compute_key(required)
    assert key == certificate.compute_key(run)
    for passed, sentence in ((None, "no valid certificate"), (False, "its proof failed"), (True, "")):
        file = certificate.write({"passed": passed, "made": "today"}, key) if passed is not None else None
        if sentence:
            with pytest.raises(ConfigError, match=sentence):
                certificate.check(required)
        else:
            certificate.check(required)
    assert file is not None
    file.write_text(file.read_text().replace("today", "tomorrow"))
    with pytest.raises(ConfigError, match="no valid certificate"):
        certificate.check(required)


def test_a_sweep_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["-m", *PLAIN, "optimizer.lr=1e-3,2e-3"]) == 2
