"""Names of schema classes that don't depend on where a class lives. Free of torch.

Ids, run.yaml and checkpoints name a class by its kind, and `_target_` may name it so. The kind of a class of titan is
frozen: it is the first path of the class. The kind of a user's class is its dotted path.
"""

from __future__ import annotations

import sys

from titan.console.requirements import REQUIREMENTS

PATHS: dict[str, str] = {
    "titan.dataset.schema.Chat": "titan.dataset.schema.Chat",
    "titan.dataset.schema.Hub": "titan.dataset.schema.Hub",
    "titan.dataset.schema.Jsonl": "titan.dataset.schema.Jsonl",
    "titan.dataset.schema.Mixture": "titan.dataset.schema.Mixture",
    "titan.dataset.schema.Parquet": "titan.dataset.schema.Parquet",
    "titan.dataset.schema.Prepared": "titan.dataset.schema.Prepared",
    "titan.dataset.schema.Stdlib": "titan.dataset.schema.Stdlib",
    "titan.dataset.schema.Synthetic": "titan.dataset.schema.Synthetic",
    "titan.dataset.schema.Text": "titan.dataset.schema.Text",
    "titan.metrics.schema.MLflow": "titan.metrics.schema.MLflow",
    "titan.metrics.schema.Trackio": "titan.metrics.schema.Trackio",
    "titan.model.schema.Llama": "titan.model.schema.Llama",
    "titan.model.schema.Qwen3": "titan.model.schema.Qwen3",
    "titan.model.schema_llama4.Llama4": "titan.model.schema_llama4.Llama4",
    "titan.model.schema_deepseek.DeepseekV3": "titan.model.schema_deepseek.DeepseekV3",
    "titan.model.schema_moe.Qwen3Moe": "titan.model.schema_moe.Qwen3Moe",
    "titan.optimizer.AdamW": "titan.optimizer.schema.AdamW",
    "titan.optimizer.External": "titan.optimizer.external.schema.External",
    "titan.optimizer.Muon": "titan.optimizer.schema.Muon",
    "titan.optimizer.SGD": "titan.optimizer.schema.SGD",
    "titan.parallelism.strategy.ModelSharding": "titan.parallelism.schema.ModelSharding",
    "titan.parallelism.strategy.Strategy": "titan.parallelism.schema.Strategy",
    "titan.schedule.Constant": "titan.schedule.schema.Constant",
    "titan.schedule.Cosine": "titan.schedule.schema.Cosine",
    "titan.schedule.InverseSqrt": "titan.schedule.schema.InverseSqrt",
    "titan.schedule.Linear": "titan.schedule.schema.Linear",
    "titan.schedule.WSD": "titan.schedule.schema.WSD",
}
"""The present dotted path of each kind. Moving a class changes the right side of its line, never the left."""


def get_kind(cls: type) -> str:
    """Return the name of a class in ids and files."""
    path = f"{cls.__module__}.{cls.__qualname__}"
    return next((kind for kind, class_path in PATHS.items() if class_path == path), path)


def describe_library(package: str) -> str | None:
    """Return what a package is that can't have a user's own classes; None for all others."""
    if package in sys.stdlib_module_names:
        return f"{package} is a module of Python"
    return f"{package} is a library that titan uses" if package in REQUIREMENTS else None
