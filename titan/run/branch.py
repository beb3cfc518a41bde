"""Branches of a run that decay: from one checkpoint on, the learning rate falls to its end. Free of torch.

With the schedule wsd one long run at a constant learning rate serves many lengths: each branch begins at one of its
checkpoints and decays for a few steps (Hu et al. 2024, arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392).
"""

from __future__ import annotations

import dataclasses

from titan.checkpoint import select
from titan.config.settings import format_value
from titan.errors import ConfigError
from titan.run.schema import Recipe
from titan.schedule.schema import WSD


def apply_decay(recipe: Recipe) -> Recipe:
    """Return the recipe with the steps and the decay that `checkpoint.decay_steps` means for its checkpoint.

    Raises:
        ConfigError: when it names no checkpoint, or its schedule is not wsd.
    """
    count, resume = recipe.checkpoint.decay_steps, recipe.checkpoint.resume
    if count is None:
        return recipe
    if resume is None:
        raise ConfigError(
            f"checkpoint.decay_steps={count}: there is no checkpoint to decay from; give checkpoint.resume=RUN or "
            "checkpoint.resume=RUN/checkpoints/step-N."
        )
    if not isinstance(recipe.schedule, WSD):
        kind = type(recipe.schedule).__name__
        raise ConfigError(f"checkpoint.decay_steps={count}: the schedule {kind} has no decay; give schedule=wsd.")
    steps = select.load_named(resume).manifest.step + count
    training, schedule = recipe.training, dataclasses.replace(recipe.schedule, decay=count / steps)
    return dataclasses.replace(recipe, training=dataclasses.replace(training, steps=steps), schedule=schedule)


def build_continuation(run: Recipe, steps: int) -> list[str]:
    """Return the overrides that continue a finished run to `steps` steps.

    Those of a branch undo `checkpoint.decay_steps`, which would set the steps, and keep the share of steps that decay;
    those of a run with a budget undo it.
    """
    overrides = [f"training.{name}=null" for name in ("tokens", "hours") if getattr(run.training, name) is not None]
    overrides.append(f"training.steps={steps}")
    if run.checkpoint.decay_steps is None or not isinstance(run.schedule, WSD):
        return overrides
    return [*overrides, "checkpoint.decay_steps=null", f"schedule.decay={format_value(run.schedule.decay)}"]
