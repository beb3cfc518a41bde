"""Make images from noise with a trained model, as a PNG file of a row for each caption.

    python -m experiments.flux.sample runs/flux "captions=a red circle on blue" steps=30

Euler's method integrates dx = v(x, t) dt from t = 1, noise, to t = 0 (arXiv:2209.03003); with the run's shift of
timesteps, steps are shorter towards noise. The same seed gives the same noise for each caption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.flux.captions import encode_caption
from experiments.flux.draw import NOISE, draw_normal
from experiments.flux.module import unpatchify
from experiments.flux.schema import Flux
from experiments.flux.shapes import CHANNELS, VALUES
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.optional import import_optional
from titan.config.output_files import check_output_file
from titan.config.settings import setting
from titan.dataset.loader import hash_key
from titan.errors import ConfigError
from titan.model.init_weights import allocate_model
from titan.weights.formats import open_weights
from titan.weights.load import load_weights

GAP = 2
"""Pixels between images."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.flux.sample`."""

    source: str = operand("RUN", "a run's directory, or one of its checkpoints")
    captions: tuple[str, ...] = setting(("a large red circle on blue",), "captions: [first,second]")
    count: int = setting(4, "images for each caption", at_least=1, cap=1000)
    steps: int = setting(30, "steps of Euler's method", at_least=1, cap=100_000)
    seed: int = setting(0, "seed of the noise", at_least=0, below=2**63)
    scale: int = setting(4, "pixels of the file for each pixel of an image", at_least=1, cap=64)
    to: str | None = setting(None, "the file to write; null: samples.png in the run's directory")


COMMAND = Command(
    "experiments.flux.sample",
    "Make images with a trained model.",
    {'runs/flux "captions=[a red circle on blue,a large white cross on black]"': "a row of images for each caption"},
    Settings,
    uses_torch=True,
)


def list_times(steps: int, shift: float) -> list[float]:
    """Return the timesteps of Euler's method, from 1 to 0: equal steps, shifted towards noise."""
    shares = [1 - step / steps for step in range(steps + 1)]
    return [shift * share / (1 + (shift - 1) * share) for share in shares]


def integrate(model: Any, noise: Tensor, words: Tensor, times: Sequence[float]) -> Tensor:
    """Return patches [B, N, C] from noise, for ids of words [B, L]."""
    patches = noise
    for start, end in pairwise(times):
        hidden, vector = model.compute_hidden(patches, words, torch.full((len(noise),), start, device=noise.device))
        patches = patches + (end - start) * model.head.predict(hidden, vector).float()
    return patches


@torch.no_grad()
def sample_images(model: Any, captions: Sequence[str], count: int, steps: int, seed: int) -> Tensor:
    """Return images, uint8 [captions, count, height, width, 3]."""
    c = model.config
    keys = torch.tensor([hash_key("sample", seed, number) for number in range(count)])
    noise = draw_normal(keys, c.image_tokens * c.patch_values, NOISE).view(count, c.image_tokens, c.patch_values)
    rows = []
    for caption in captions:
        words = torch.tensor(encode_caption(caption, c.text_tokens, "captions")).expand(count, -1)
        patches = integrate(model, noise, words, list_times(steps, c.time_shift))
        values = unpatchify((patches + 1) * (c.vocab - 1) / 2, c.height, c.width, c.patch)
        rows.append(values.round().clamp(0, c.vocab - 1).to(torch.uint8))
    return torch.stack(rows)


def load_model(source: str) -> Any:
    """Return the model of a run or a checkpoint, in float32 on the CPU.

    Raises:
        ConfigError: for another model, and one of other images than `write_png` writes.
    """
    weights = open_weights(source, "", verify=True)
    if not isinstance(weights.model, Flux):
        raise ConfigError(f"{source}: is no run of experiments.flux; give one.")
    if (weights.model.channels, weights.model.vocab) != (CHANNELS, VALUES):
        raise ConfigError(
            f"{source}: its images have {weights.model.channels} channels of {weights.model.vocab} values, and a PNG "
            f"file needs {CHANNELS} of {VALUES}; give a run on dataset=shapes."
        )
    with torch.device("meta"):
        model = weights.model.build()
    allocate_model(model, "cpu")
    load_weights(dict(model.named_weights()), weights, no_dist=True, setting="")
    return model


def choose_file(to: str | None, source: str) -> Path:
    """Return the file to write: samples.png in the run's directory, unless the user names one.

    Args:
        to: the user's setting.
        source: a run's directory, or one of its checkpoints.

    Raises:
        ConfigError: when it can't be written.
    """
    folder = Path(source).expanduser()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if to is None:  # `load_model` has the sentence on a run that does not exist
        return check_output_file(str(run / "samples.png"), makes_folder=True)
    return check_output_file(to, (".png",))


def write_png(images: Tensor, file: Path, scale: int) -> None:
    """Write images, uint8 [rows, columns, height, width, 3], side by side.

    Raises:
        ConfigError: when the file can't be written.
    """
    from PIL import Image

    rows, columns, height, width, _ = images.shape
    page = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for (row, column), image in _iterate_images(images):
        page.paste(Image.fromarray(image.numpy()), (column * (width + GAP), row * (height + GAP)))
    try:
        page.resize((page.width * scale, page.height * scale), Image.Resampling.NEAREST).save(file)
    except OSError as error:
        raise ConfigError(f"to={file}: can't be written ({error.strerror or error}); give another file.") from error


def _iterate_images(images: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    for row in range(images.shape[0]):
        for column in range(images.shape[1]):
            yield (row, column), images[row, column]


def _run_sampling(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    import_optional("PIL.Image", "experiments.flux.sample", "writing a PNG file", project="pillow")
    file = choose_file(settings.to, settings.source)
    model = load_model(settings.source)
    images = sample_images(model, settings.captions, settings.count, settings.steps, settings.seed)
    write_png(images, file, settings.scale)
    print(f"{file}: {len(settings.captions)} x {settings.count} images")
    return 0


main, cli = COMMAND.bind(_run_sampling)

if __name__ == "__main__":
    cli()
