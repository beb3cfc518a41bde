"""The transformer equals another implementation, and titan's laws hold for rows that are images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.flux import captions, module, sample, shapes
from experiments.flux.draw import NOISE, TIME, draw_normal
from experiments.flux.module import patchify, unpatchify
from experiments.flux.names import convert_weights
from experiments.flux.rows import Rows
from experiments.flux.schema import Flux
from experiments.flux.text import embed_caption, embed_words
from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.runs import compute_difference, read_step_records, select_weights, train_run
from tests.support.tiers import full
from titan import generate, replay
from titan.errors import ConfigError
from titan.estimate.memory import estimate_peak
from titan.estimate.plan import derive_device_speeds, resolve_hardware
from titan.estimate.traced.replay import build_rank_result
from titan.model.init_weights import Normal, materialise_model
from titan.training.trace.rank import build_rank_trace

CONF = f"hydra.searchpath=[file://{Path(__file__).resolve().parents[1] / 'conf'}]"
SHAPE: dict[str, Any] = {"dim": 48, "heads": 3, "kv_heads": 3, "ffn": 96, "axes": (4, 6, 6), "layers": 3, "double": 2}
TINY = (
    CONF, "recipe=flux_shapes", "dataset.images=64", "dataset.height=8", "dataset.width=6", "model.height=8",
    "model.width=6", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn=48", "model.axes=[4,6,6]",
    "model.layers=3", "model.double=2", "model.text_width=12", "model.pooled_width=10", "training.seq_len=152",
    "training.global_batch=1216", "training.steps=3", "precision=fp32", "metrics.plot=false", "evaluation.tokens=0",
    "dataset.validation=0.2", "cluster=cpu",
)  # fmt: skip


def compose_run(directory: Path, *overrides: str) -> Any:
    return compose_test_run([*TINY, *overrides, f"hydra.run.dir={directory}"])


# ---- the model


@pytest.mark.full
@pytest.mark.parametrize("guidance", [None, 2.5])
@pytest.mark.parametrize(
    ("height", "width", "words", "double"), [(8, 8, 5, 2), (6, 10, 1, 1), (4, 4, 9, 0), (2, 6, 3, 3)]
)
def test_outputs_are_those_of_diffusers(
    guidance: float | None, height: int, width: int, words: int, double: int
) -> None:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"height": height, "width": width, "text_tokens": words, "channels": 4}
    schema = Flux(**{**SHAPE, "double": double, "ffn": 192}, **sizes, text_width=20, pooled_width=12, guidance=guidance)
    theirs: Any = FluxTransformer2DModel(
        in_channels=schema.patch_values, num_layers=double, num_single_layers=schema.layers - double,
        attention_head_dim=schema.head_size, num_attention_heads=schema.heads, joint_attention_dim=20,
        pooled_projection_dim=12, guidance_embeds=guidance is not None, axes_dims_rope=schema.axes,
    )  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = schema.build()
    converted = convert_weights(theirs.state_dict(), schema.layers, double)
    assert converted.keys() == {name for name, _ in ours.named_parameters()}
    ours.load_state_dict(converted, strict=False)

    patches, text = torch.randn(2, schema.image_tokens, schema.patch_values), torch.randn(2, words, 20)
    caption, times = torch.randn(2, 12), torch.tensor([0.1, 0.85])
    strength = None if guidance is None else torch.full((2,), guidance)
    places = torch.zeros(height // 2, width // 2, 3)
    places[..., 1], places[..., 2] = torch.arange(height // 2)[:, None], torch.arange(width // 2)
    with torch.no_grad():
        wanted = theirs(
            hidden_states=patches, encoder_hidden_states=text, pooled_projections=caption, timestep=times,
            img_ids=places.view(-1, 3), txt_ids=torch.zeros(words, 3), guidance=strength, return_dict=False,
        )[0]  # fmt: skip
        found = ours.head.predict(*ours.compute_from_text(patches, text, caption, times, strength))
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.full
def test_the_shape_of_flux_dev_is_counted(tmp_path: Path) -> None:
    overrides = [CONF, "recipe=flux_dev", "dataset.path=latents.npy", "cluster=h100", "cluster.devices=8"]
    run = compose_test_run([*overrides, "parallelism.shard=8", "memory=full", f"hydra.run.dir={tmp_path}"], remote=True)
    assert run.model.parameters() == 11_901_408_320
    assert (run.model.layers, run.model.double, run.model.patch_values, run.model.image_tokens) == (57, 19, 64, 4096)
    matrices = sum(m.size * m.compute_token_share(1) for m in run.model.linear_layers().values())
    attention = 57 * 12 * 3072 * 4608
    assert run.model.flops_per_token(262656) == pytest.approx((6 * matrices + attention) * 4608 / 262656)


def test_patches() -> None:
    images = torch.arange(2 * 4 * 6 * 3).view(2, 4, 6, 3)
    patches = patchify(images, 2)
    assert torch.equal(unpatchify(patches, 4, 6, 2), images)
    assert patches[0, 1].tolist() == images[0, :2, 2:4].permute(2, 0, 1).flatten().tolist()


# ---- random numbers and text


def test_random_numbers_belong_to_a_row() -> None:
    """Bitwise, whatever other rows are computed with them: so no layout changes them."""
    keys = torch.arange(7) * 1_234_567_891_011
    rows = draw_normal(keys, 301, NOISE)
    assert all(torch.equal(draw_normal(keys[i : i + 1], 301, NOISE)[0], rows[i]) for i in range(7))
    assert torch.equal(draw_normal(keys[2:5], 301, NOISE), rows[2:5])
    values = draw_normal(torch.arange(64), 4096, NOISE)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01 and abs((values**4).mean() - 3) < 0.1
    assert abs(torch.corrcoef(values[:8].flatten().view(2, -1))[0, 1]) < 0.03
    assert not torch.equal(draw_normal(keys, 1, TIME), draw_normal(keys, 1, NOISE))


def test_timesteps_are_logit_normal() -> None:
    keys = torch.arange(20_000)
    for shift in (1.0, 3.0):
        times = Flux(**SHAPE, time_mean=0.5, time_std=0.7, time_shift=shift).build().draw_times(keys)
        logits = torch.logit(times / (shift - (shift - 1) * times))
        assert abs(logits.mean() - 0.5) < 0.02 and abs(logits.std() - 0.7) < 0.02


def test_text_is_a_function_of_the_caption() -> None:
    red, blue = (captions.encode_caption(f"a {colour} circle", 6) for colour in ("red", "blue"))
    assert captions.decode_caption(red) == "a red circle" and red[3:] == [0, 0, 0]
    words, both = embed_words(torch.tensor([red, blue]), 4096), embed_caption(torch.tensor([red, blue]), 768)
    assert words.shape == (2, 6, 4096) and both.shape == (2, 768)
    assert torch.equal(words[0, 0], words[1, 0]) and not torch.equal(words[0, 1], words[1, 1])
    assert torch.equal(both[:1], embed_caption(torch.tensor([red]), 768)) and not torch.equal(both[0], both[1])
    with pytest.raises(ConfigError, match="unknown word pink"):
        captions.encode_caption("a pink circle", 6)
    with pytest.raises(ConfigError, match="has 3 words; give at most 2"):
        captions.encode_caption("a red circle", 2)


# ---- images


def test_images_are_rows() -> None:
    source = shapes.Shapes(images=1030, height=8, width=12).build()
    parts = source.parts()
    documents = [document for part in parts for document in source.documents(part)]
    assert len(parts) == 2 and len(documents) == 1030
    assert {document.shape for document in documents} == {(8 + 8 * 12 * 3,)}  # type: ignore[union-attr]
    picture = shapes.draw_picture(0, 1029)
    row: Any = documents[1029]
    assert captions.decode_caption(row[:8].tolist()) == picture.caption
    image = row[8:].reshape(8, 12, 3)
    assert tuple(image[0, 0]) == captions.COLOURS[picture.background]
    assert (image == captions.COLOURS[picture.colour]).all(-1).any()


def save_rows(path: Path, count: int = 40) -> Any:
    """Leave the file that another program would: captions of 8 ids, then 8 x 6 x 3 values."""
    rows = np.random.default_rng(0).integers(0, 256, (count, 8 + 8 * 6 * 3), dtype=np.uint16)
    np.save(path, rows)
    return rows


def test_rows_of_a_file_are_documents(tmp_path: Path) -> None:
    saved = save_rows(path := tmp_path / "rows.npy", 150)
    settings = {"height": 8, "width": 6, "channels": 3, "text_tokens": 8, "levels": 256}
    source = Rows(path=str(path), **settings).build()
    found = [document for part in source.parts() for document in source.documents(part)]
    assert len(source.parts()) == 3 and np.array_equal(np.stack(found), saved)  # type: ignore[arg-type]
    before = source.digest()
    saved[149, 151] ^= 1
    np.save(path, saved)
    assert source.digest() != before
    with pytest.raises(ConfigError, match=r"has \[150, 152\] values of type uint16"):
        Rows(path=str(path), **settings | {"width": 8}).build().digest()
    path.write_text("no array")
    with pytest.raises(ConfigError, match="is no readable NumPy file"):
        source.digest()


@pytest.mark.full
def test_a_file_of_rows_trains(tmp_path: Path) -> None:
    save_rows(path := tmp_path / "rows.npy")
    run = compose_test_run([
        *(word for word in TINY if not word.startswith("dataset.images")), "dataset=image_rows", f"dataset.path={path}",
        "dataset.channels=3", "dataset.text_tokens=8", "dataset.levels=256", f"hydra.run.dir={tmp_path / 'run'}",
    ])  # fmt: skip
    train_run(run)
    assert [record["step"] for record in read_step_records(run)] == [1, 2, 3]


# ---- layouts


@pytest.fixture(scope="module")
def no_zeros() -> Iterator[None]:
    """Begin with gates and an output that are not zero, so that the first gradients of all weights are not."""
    with patch.object(module, "ZERO", Normal(0.05)):
        yield


@pytest.fixture(scope="module")
def alone(no_zeros: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    run = compose_run(tmp_path_factory.mktemp("flux") / "alone", "checkpoint=off", "optimizer=sgd", "optimizer.lr=0.1")
    return run, train_run(run)[0]


@pytest.mark.parametrize(
    "options",
    [
        full(("parallelism=fsdp",), id="fsdp"),
        full(("parallelism=tp", "parallelism.sequence_parallel=false"), id="tp"),
        full(("parallelism=ddp", "cluster.devices=3"), id="ddp"),
        full(("parallelism=fsdp", "cluster.devices=3", "parallelism.microbatches=2"), id="fsdp-accumulated"),
        full(("parallelism=fsdp_tp", "parallelism.sequence_parallel=false"), id="fsdp_tp"),
        full(("compile=block", "compile.backend=aot_eager"), id="compiled"),
        full(("memory=full",), id="recomputed"),
        full(("memory=selective", "parallelism=fsdp"), id="selective"),
    ],
)
def test_layouts_learn_the_same(options: tuple[str, ...], alone: tuple[Any, Any], tmp_path: Path) -> None:
    run = compose_run(tmp_path / "split", "checkpoint=off", "optimizer=sgd", "optimizer.lr=0.1", *options)
    found = train_run(run)[0]
    assert compute_difference(found.gradients, alone[1].gradients) < 1e-5
    assert compute_difference(select_weights(found.last), select_weights(alone[1].last)) < 1e-5
    losses = [[line["loss"] for line in read_step_records(r)] for r in (run, alone[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(set(losses[1])) == 3


def record_drawn(trainer: Any) -> list[Any]:
    """The keys, timesteps and noise of this rank's rows of each step, once it has trained."""
    drawn: list[Any] = []
    model: Any = trainer.train_step.stages[0].model

    def record(keys: Any) -> Any:
        times = type(model).draw_times(model, keys)
        drawn.extend((key.item(), time.item()) for key, time in zip(keys, times, strict=True))
        return times

    model.draw_times = record
    return drawn


@pytest.mark.parametrize(
    ("first", "then"),
    [
        full(("parallelism=ddp", "cluster.devices=3"), ("parallelism=fsdp",), id="ddp3-fsdp2"),
        full(("parallelism=single",), ("parallelism=tp", "parallelism.sequence_parallel=false"), id="single-tp"),
    ],
)
def test_a_resumed_run_continues_with_the_same_rows_and_noise(
    first: tuple[str, ...], then: tuple[str, ...], tmp_path: Path
) -> None:
    """In the midst of an epoch, of 50 rows in steps of 8, and over its end, on other ranks."""
    whole = compose_run(tmp_path / "whole", "training.steps=8", "schedule=constant", "checkpoint=off")
    wanted = train_run(whole, record_drawn)
    split = compose_run(tmp_path / "split", "training.steps=3", "schedule=constant", "checkpoint=sync", *first)
    before = train_run(split, record_drawn)
    again = compose_run(tmp_path / "split", "training.steps=8", "schedule=constant", "checkpoint=sync", *then)
    after = train_run(again, record_drawn)
    rows = [[line[key] for key in ("rows", "batch_hash")] for line in read_step_records(again)]
    assert rows == [[line[key] for key in ("rows", "batch_hash")] for line in read_step_records(whole)]
    drawn = {pair for rank in (*before, *after) for pair in rank.extra}
    assert set(wanted[0].extra) <= drawn and len(set(wanted[0].extra)) == 64
    losses = [[line["loss"] for line in read_step_records(run)] for run in (again, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.full
def test_losses_at_timesteps(tmp_path: Path) -> None:
    """They are the same on another layout, and the validation loss is their mean."""
    options = ("checkpoint=off", "evaluation.tokens=1216", "training.steps=1", "model.timesteps=4")
    runs = [compose_run(tmp_path / name, *options, f"parallelism={name}") for name in ("single", "fsdp")]
    found = []
    for run in runs:
        train_run(run)
        found.append(json.loads((Path(run.directory) / "result.json").read_text()))
    names = [f"evaluation/t{time:g}/loss" for time in (0.125, 0.375, 0.625, 0.875)]
    losses = [found[0][name] for name in names]
    assert found[0]["validation_loss"] == pytest.approx(sum(losses) / 4) and len(set(losses)) == 4
    assert [found[1][name] for name in names] == pytest.approx(losses, rel=1e-5)
    assert "bits_per_byte" not in found[0]


@pytest.mark.full
def test_in_bf16_layouts_learn_the_same(alone: tuple[Any, Any], tmp_path: Path) -> None:
    options = ("checkpoint=off", "precision=bf16", "optimizer=sgd", "optimizer.lr=0.1")
    runs = [compose_run(tmp_path / name, *options, f"parallelism={name}") for name in ("single", "fsdp")]
    outcomes = [train_run(run)[0] for run in runs]
    assert compute_difference(outcomes[1].gradients, outcomes[0].gradients) < 0.02
    assert compute_difference(outcomes[0].gradients, alone[1].gradients) > 1e-4  # they are computed in bf16
    losses = [[line["loss"] for line in read_step_records(run)] for run in (*runs, alone[0])]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[0] == pytest.approx(losses[2], rel=1e-2)


# ---- what it is not


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        pytest.param(
            "parallelism=pp",
            "parallelism.pipeline=2: the model .* can't be split into stages; give",
            id="parallelism=pp",
        ),
        full(
            "parallelism=cp",
            "parallelism.context=2: the model .* can't be computed from parts of a row; give",
            id="parallelism=cp",
        ),
        full(
            "parallelism=tp",
            "parallelism.sequence_parallel=true: .* has whole rows between matmuls; give",
            id="parallelism=tp",
        ),
        pytest.param(
            "parallelism.tensor=4",
            "parallelism.tensor=4: does not divide model.heads=2; give a divisor of it",
            id="parallelism.tensor=4",
        ),
        full("model.height=7", "model.height=7: must be a multiple of model.patch=2; give 8.", id="model.height=7"),
        full(
            "model.height=10",
            r"a row has 8 words and images of 10 x 6 x 3 values of 256 levels, 188 ids; give training.seq_len=188",
            id="model.height=10",
        ),
        full(
            "dataset.height=6,dataset.width=8",
            "its rows are 8 words and images of 6 x 8 x 3 values of 256 levels, and the model",
            id="dataset.height=6,dataset.width=8",
        ),
        pytest.param(
            "model.vocab=65536", "values of 256 levels, and the model .* of 65536 levels", id="model.vocab=65536"
        ),
        full("model.tied=true", "model.tied=true: Flux has no use for it", id="model.tied=true"),
        full(
            "training.loss_chunk=8",
            "training.loss_chunk=8: the model .* predicts no tokens; give null",
            id="training.loss_chunk=8",
        ),
        full(
            "dataset.mask_documents=true",
            "dataset.mask_documents=true: .* predicts no tokens; give false",
            id="dataset.mask_documents=true",
        ),
        full(
            "precision=float8,precision.emulate=true",
            "precision.matmuls=float8: .* is not computed in 8 bits; give",
            id="precision=float8,precision.emulate=true",
        ),
        full(
            "model.axes=[4,4,4]",
            r"model.axes=\[4,4,4\]: must be three even numbers whose sum is .* 16",
            id="model.axes=[4,4,4]",
        ),
    ],
)
def test_what_it_does_not_support_is_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    words = override.split(",") if "[" not in override else [override]
    extra = ["parallelism.sequence_parallel=false"] if "tensor=4" in override else []
    with pytest.raises(ConfigError, match=sentence):
        compose_run(tmp_path, *words, *extra)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["recipe=flux_shapes", "dataset=synthetic"], "its rows are tokens, and the model"),
        (["recipe=flux_shapes", "model=debug"], "reads tokens; give one that fits"),
    ],
    ids=["data", "model"],
)
def test_rows_that_the_model_does_not_read_are_rejected(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose_test_run([CONF, *overrides, "cluster=cpu", f"hydra.run.dir={tmp_path}"])


def test_rows_of_weight_zero_count_nothing() -> None:
    schema = Flux(**SHAPE)
    model: Any = schema.build()
    materialise_model(model, {name: Normal(0.05) for name in model.initial()}, 0, "cpu")
    ids = torch.randint(0, 18, (3, schema.row_ids))
    targets = ids.clone()
    targets[1] = -100
    keys = torch.tensor([1, 2, 3])
    loss = model.head(model(ids, keys=keys), targets)
    each = [model.head(model(ids[i : i + 1], keys=keys[i : i + 1]), ids[i : i + 1]) for i in (0, 2)]
    assert loss.item() == pytest.approx((each[0] + each[1]).item(), rel=1e-5)


# ---- images from noise


def test_images_from_a_velocity_that_is_known(tmp_path: Path) -> None:
    """Where the velocity is that of straight lines to an image, Euler's method ends there from any noise."""
    schema = Flux(**SHAPE, height=4, width=6, text_tokens=6, time_shift=2.0)
    model, target = schema.build(), torch.linspace(-1, 1, schema.image_tokens * schema.patch_values)
    target = target.view(1, schema.image_tokens, schema.patch_values)

    def predict(hidden: Any, vector: Any) -> Any:
        return (hidden - target) / vector[:, :1, None]

    def compute_hidden(patches: Any, words: Any, times: Any) -> Any:
        return patches, times[:, None]

    model.head.predict, model.compute_hidden = predict, compute_hidden  # type: ignore[assignment, method-assign]
    images = sample.sample_images(model, ["a red circle", "a blue cross"], 2, 5, 0)
    wanted = ((unpatchify(target, 4, 6, 2) + 1) * 127.5).round().to(torch.uint8)
    assert images.shape == (2, 2, 4, 6, 3)
    assert (images.int() - wanted.int()).abs().max() <= 1
    sample.write_png(images, tmp_path / "x.png", 2)
    with Image.open(tmp_path / "x.png") as page:
        assert page.size == (2 * (2 * 6 + sample.GAP), 2 * (2 * 4 + sample.GAP))


def test_without_pillow_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert sample.main(["runs/nowhere"]) == 2
    sentence = "experiments.flux.sample: writing a PNG file needs the package pillow: pip install pillow"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "to", "file"),
    [
        pytest.param("run", None, "run/samples.png", id="run"),
        pytest.param("run/checkpoints/step-3", None, "run/samples.png", id="checkpoint"),
        pytest.param("run/checkpoints/step-3/", None, "run/samples.png", id="slash"),
        pytest.param("copied", None, "copied/samples.png", id="copied-checkpoint"),
        pytest.param("run", "mine.png", "mine.png", id="given"),
    ],
)
def test_images_are_written_into_the_run(
    source: str, to: str | None, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run/checkpoints/step-3", "copied"):
        Path(folder).mkdir(parents=True)
    assert sample.choose_file(to, source) == Path(file)


@pytest.mark.full
def test_a_run_is_sampled_and_generates_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compose_run(tmp_path / "run", "training.steps=1", "checkpoint=sync")
    train_run(run)
    file = tmp_path / "page.png"
    words = [run.directory, f"to={file}", "steps=2", "count=1"]
    assert sample.main(words) == 0 and file.is_file()
    assert sample.main([*words, "captions=[a pink circle]"]) == 2
    assert sample.main([run.directory, *words[2:]]) == 0 and (Path(run.directory) / "samples.png").is_file()
    assert f"{run.directory}/samples.png: 1 x 1 images" in capsys.readouterr().out
    assert generate.main([run.directory, "tokens=[1,2]"]) == 2
    assert "needs a model that predicts tokens" in capsys.readouterr().err
    assert replay.main([run.directory, "step=1", CONF]) == 2
    assert "titan.replay: needs a model that predicts tokens" in capsys.readouterr().err


def trace_live_bytes(_: int, __: int, run: Any, speeds: Any) -> float:
    return float(build_rank_result(run, run.layout, speeds, build_rank_trace(run, 0), "cuda").live.bytes)


@pytest.mark.full
def test_the_memory_estimate_is_near_a_trace(tmp_path: Path) -> None:
    """Live bytes at the peak, of one rank."""
    for options in (["memory=none"], ["memory=full"], ["memory=selective"]):
        overrides = [CONF, "recipe=flux_dev", "dataset.path=latents.npy", "cluster=h100", "cluster.devices=8"]
        overrides += ["parallelism.shard=8", "model.layers=6", "model.double=2", "training.global_batch=2101248"]
        run = compose_test_run([*overrides, "compile=off", *options, f"hydra.run.dir={tmp_path}"], remote=True)
        speeds = derive_device_speeds(run, resolve_hardware(run.cluster, run.machine), run.machine, run.layout)
        (traced,) = run_ranks(trace_live_bytes, 1, run, speeds, joined=False, timeout=300)
        assert estimate_peak(run, run.layout, run.microbatches).bytes == pytest.approx(traced, rel=0.1)
