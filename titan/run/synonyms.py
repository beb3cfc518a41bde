"""What to write in place of names that titan lacks: those of other software, and of unknown choices. Free of torch.

docs/slurm.md has the settings of other launchers as a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError, UnknownSettingError
from titan.run.axes import PLUGGABLE
from titan.run.schema import Recipe

_WORDS: Mapping[str, tuple[str, ...]] = {
    "training.steps": ("max_steps", "total_steps", "num_steps", "train_iters", "max_iters", "steps"),
    "training.tokens": ("max_tokens", "num_tokens", "total_tokens", "train_tokens", "token_budget"),
    "training.global_batch": (
        "batch_size", "global_batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size",
        "local_batch_size", "total_batch_size",
    ),
    "training.seq_len": ("sequence_length", "seq_length", "max_seq_len", "max_length", "context_length", "block_size"),
    "training.seed": ("random_seed", "seed"),
    "training.clip_norm": ("max_grad_norm", "grad_clip", "gradient_clip_val", "clip_grad_norm", "max_norm"),
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr", "lr"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay_style"),
    "schedule.final_lr": ("min_lr", "lr_min", "eta_min", "lr_end", "min_lr_ratio"),
    "schedule.warmup": ("warmup_steps", "num_warmup_steps", "warmup_iters", "warmup_ratio", "lr_warmup_iters"),
    "cluster.devices": ("gpus", "num_gpus", "n_gpus", "world_size", "nproc_per_node", "devices", "ngpu"),
    "cluster.nodes": ("num_nodes", "nnodes", "n_nodes", "nodes"),
    "cluster.device": ("accelerator", "device"),
    "parallelism": ("strategy", "layout", "sharding_strategy"),
    "parallelism.shard": ("data_parallel_shard_degree", "dp_shard", "fsdp_size", "zero_stage"),
    "parallelism.replicate": ("data_parallel_replicate_degree", "dp_replicate", "data_parallel_size", "dp"),
    "parallelism.tensor": ("tensor_parallel_degree", "tensor_parallel_size", "tensor_model_parallel_size", "tp"),
    "parallelism.pipeline": (
        "pipeline_parallel_degree", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp",
    ),
    "parallelism.context": ("context_parallel_degree", "context_parallel_size", "cp"),
    "parallelism.expert": ("expert_parallel_degree", "expert_parallel_size", "expert_model_parallel_size", "ep"),
    "parallelism.microbatches": ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches", "grad_acc"),
    "memory": ("activation_checkpoint", "activation_checkpointing", "gradient_checkpointing", "recompute"),
    "compile": ("torch_compile", "use_compile"),
    "precision": ("mixed_precision", "dtype", "bf16", "fp16", "float8", "amp"),
    "checkpoint.every": ("save_every", "save_steps", "save_interval", "checkpoint_interval", "save_freq"),
    "checkpoint.keep": ("save_total_limit", "keep_latest_k", "save_top_k"),
    "checkpoint.resume": ("resume_from", "resume_from_checkpoint", "load_path", "load", "initial_load_path"),
    "checkpoint.weights": ("init_from", "pretrained", "pretrained_model_name_or_path", "initial_load_in_hf"),
    "evaluation.every": ("eval_every", "eval_steps", "eval_interval", "val_check_interval", "eval_freq"),
    "dataset.path": ("data_path", "dataset_path", "data_dir", "train_file", "train_data"),
    "dataset.tokenizer": ("tokenizer", "tokenizer_path", "tokenizer_name", "hf_assets_path"),
    "dataset.epochs": ("epochs", "max_epochs", "num_epochs", "num_train_epochs"),
    "metrics": ("logger", "loggers", "log_with", "report_to", "tracker", "mlflow", "trackio"),
    "metrics.wandb": ("wandb", "use_wandb", "enable_wandb"),
    "metrics.tensorboard": ("tensorboard", "use_tensorboard", "enable_tensorboard"),
    "recipe": ("preset",),
    "name": ("run_name", "experiment_name", "job_name"),
    "hydra.run.dir": ("output_dir", "out_dir", "save_dir", "dump_folder", "default_root_dir"),
    "model.top_k": ("num_experts_per_tok", "moe_router_topk", "experts_per_token"),
    "model.dim": ("hidden_size", "d_model", "n_embd", "embed_dim"),
    "model.layers": ("num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth"),
    "model.heads": ("num_heads", "n_heads", "n_head", "num_attention_heads"),
    "model.kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "model.ffn": ("intermediate_size", "ffn_hidden_size", "hidden_dim", "d_ff"),
    "model.vocab": ("vocab_size",),
}  # fmt: skip
"""titan's settings, and the last parts of what others call them."""
SYNONYMS = {word: name for name, words in _WORDS.items() for word in words}
"""titan's name of each of these."""
VALUES = {
    "training.global_batch": "TOKENS", "training.tokens": "TOKENS", "schedule.warmup": "STEPS",
    "schedule.final_lr": "SHARE (of optimizer.lr)", "checkpoint.every": "STEPS", "evaluation.every": "STEPS",
}  # fmt: skip
"""What a setting's value is, where another unit is usual elsewhere."""
AXES = {
    "trainer": "training", "train": "training", "data": "dataset", "optim": "optimizer", "parallel": "parallelism",
    "eval": "evaluation", "ckpt": "checkpoint", "checkpointing": "checkpoint", "lr_scheduler": "schedule",
}  # fmt: skip
"""Other names of axes."""
PERIODS = ("interval", "frequency", "freq", "every_n_steps")
"""What others call the steps between evaluations, or between checkpoints."""
CHOICES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "llama3": "llama8b", "8b": "llama8b", "70b": "llama70b", "405b": "llama405b", "debugmodel": "debug",
    },
    "checkpoint": {**dict.fromkeys(("true", "disabled"), "sync"), "false": "off", "async_with_pinned_mem": "async"},
    "parallelism": {
        **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "deepspeed"), "fsdp"), "data_parallel": "ddp", "dp": "ddp",
        "tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep",
        "none": "single",
    },
    "precision": {
        **dict.fromkeys(("float16", "fp16", "half", "16-mixed", "bf16-mixed", "bfloat16", "mixed"), "bf16"),
        **dict.fromkeys(("float32", "32-true", "full"), "fp32"), "fp8": "float8",
    },
    "schedule": {
        "cosine_with_warmup": "cosine", "cosine_annealing": "cosine", "linear_with_warmup": "linear",
        "constant_with_warmup": "constant", "trapezoidal": "wsd", "warmup_stable_decay": "wsd",
    },
    "memory": {
        **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "recompute", "true"), "full"),
        "memory_budget": "budget", "false": "none",
    },
    "optimizer": {"adam": "adamw"},
}  # fmt: skip
"""titan's choice of an axis for what others call it."""
KEYS = {
    **dict.fromkeys(("checkpoint.enable", "checkpoint.enable_checkpoint", "checkpoint.async_mode"), "checkpoint"),
    **dict.fromkeys(("activation_checkpoint.mode", "activation_checkpoint", "activation_checkpointing"), "memory"),
    **dict.fromkeys(("model.name", "model.flavor"), "model"), "training.dataset": "dataset",
    "optimizer.name": "optimizer", "lr_scheduler.decay_type": "schedule",
}  # fmt: skip
"""Settings of others whose value is a choice of titan's axis."""
EXPERIMENT = ("experiment", "experiments", "exp")
"""Names of a config group that other projects have."""
DRY_RUNS = ("dry_run", "dryrun", "plan_only")
"""What others call a command that starts nothing."""
PLAN_ADVICE = "python -m titan.plan with the same settings predicts the run, and starts nothing"
FILE_ADVICE = "a file of settings is recipe=NAME, from recipe/NAME.yaml in the folder of --config-dir"
ADVICE = {
    "trainer": "devices are cluster.device=cuda or cpu, layouts parallelism=CHOICE",
    "help": "write --help",
    "resume": "write resume=VALUE",
    "config": FILE_ADVICE,
    "job.config_file": f"{FILE_ADVICE}; docs/from_torchtitan.md has torchtitan's settings",
}
"""What to write in place of other settings and words."""
EXPERTS = ("experts", "num_experts", "n_experts", "num_local_experts", "expert_ffn", "top_k")
"""Settings of models with experts."""


def build_error(typed: str, key: str, known_keys: frozenset[str]) -> UnknownSettingError | None:
    """Return the error that answers a name of other software; None where nothing is known."""
    if advice := _find_advice(key, typed.partition("=")[2], known_keys):
        return UnknownSettingError(f"{typed}: there is no such setting; {advice}.", typed, key, f"; {advice}.")
    return None


def suggest_setting(word: str) -> str | None:
    """Return titan's setting for a name of other software, as it is typed; None for other words."""
    if name := SYNONYMS.get(word.replace("-", "_").lower()):
        return f"{name}={VALUES.get(name, 'CHOICE' if '.' not in name and name != 'name' else 'VALUE')}"
    return None


def advise_on_option(option: str, value: str) -> str:
    """Return what to write in place of an option that there is not, which may be a setting with dashes before it."""
    name = option.lstrip("-").replace("-", "_")
    axis, _, last = name.rpartition(".")
    advice = None if axis in Recipe.axes() and name not in KEYS else _find_advice(name, value, frozenset())
    if advice and not advice.startswith("write "):
        return advice
    is_whole = axis or name in (*Recipe.axes(), "resume", "recipe", "sweep", "name", "modules", "hooks")
    advice = advice or suggest_setting(last) or (f"{name}=VALUE" if is_whole else "AXIS.SETTING=...")
    return f"settings have no dashes: {advice.removeprefix('write ')}".replace("=VALUE", f"={value or 'VALUE'}")


def _find_advice(key: str, value: str, known_keys: frozenset[str]) -> str | None:
    """Return what to write in place of a setting that there is not; None where nothing is known."""
    axis, _, rest = key.partition(".")
    word = key.rpartition(".")[2]
    if key in KEYS:
        return f"write {KEYS[key]}={CHOICES.get(KEYS[key], {}).get(value.lower(), value or 'CHOICE')}"
    if key in ADVICE:
        return ADVICE[key]
    if key in EXPERIMENT:
        return advise_on_experiment(value)
    if key.replace("-", "_") in DRY_RUNS:
        return PLAN_ADVICE
    if key.isupper() and "." not in key:
        return f"variables of the environment stand before the command: {key}={value} python -m titan.train"
    if axis == "model" and word in EXPERTS:
        return "this model has no experts; choose one that has, such as model=qwen3_moe_debug"
    if name := next((n for n in (f"{AXES.get(axis)}.{rest}", f"metrics.{axis}_{rest}") if n in known_keys), ""):
        return f"write {name}"
    if word in PERIODS and (name := f"{AXES.get(axis, axis)}.every") in known_keys:
        return f"write {name}=STEPS"
    if (advice := _advise_on_kinds(axis, rest, known_keys)) or key in AXES:
        return advice or f"write {AXES[key]}"
    setting = suggest_setting(word)
    if setting is None or ("." not in key and setting.partition("=")[0].endswith(f".{word}")):
        return None  # the nearest setting is suggested
    return f"write {setting}"


def _advise_on_kinds(axis: str, rest: str, known_keys: frozenset[str]) -> str | None:
    """Return which choices of an axis have a setting, or a mapping with a key, that is not there; None: none has."""
    name = rest.partition(".")[0]
    kinds = {} if axis == "model" else PLUGGABLE.get(axis, {})
    chosen = ".".join([axis, *rest.split(".")[:2]])
    is_new = name != rest and not any(f"{known}.".startswith(f"{chosen}.") for known in known_keys)
    if is_new and f"{axis}.{name}" in known_keys:
        classes = kinds.values() or [get_type_hints(Recipe).get(axis)]
        settings = [field for cls in classes if is_dataclass(cls) for field in fields(cls)]
        is_mapping = any(field.name == name and str(field.type).startswith("Mapping[str") for field in settings)
        return (
            f"{axis}.{name} has keys that you choose; write +{axis}.{rest}=VALUE for a new one" if is_mapping else None
        )
    owners = " or ".join(
        kind for kind, cls in kinds.items() if kind != "base" and name in {f.name for f in fields(cls)}
    )
    return owners and f"choose {axis}={owners} for it"


FOLDER = Path(__file__).resolve().parents[2] / "experiments"
"""Where they are in a checkout; a wheel has none."""
SHOWN_GROUPS = ("recipe", "optimizer", "hooks")
"""Config groups whose choices stand for the experiment."""


def describe_experiment_choice(group: str, choice: str) -> str | None:
    """Return which experiment has a choice of a config group, and how to find it; None where none has it."""
    files = sorted(FOLDER.glob(f"*/conf/{group}/{choice}.yaml")) if re.fullmatch(r"[\w-]+", choice) else ()
    names = (file.relative_to(FOLDER).parts[0] for file in files)
    return next((f"experiments/{name} has it: add {_format_search_path(name)}" for name in names), None)


def advise_on_experiment(name: str) -> str:
    """Return what to write in place of `experiment=NAME`: an experiment's choices where it is one, else a recipe."""
    folder = FOLDER / name / "conf"
    if not re.fullmatch(r"\w+", name) or not folder.is_dir():
        return "named settings are a recipe: write recipe=NAME, and see docs/grids.md"
    files = [file for group in SHOWN_GROUPS for file in sorted((folder / group).glob("*.yaml"))]
    words = [f"{f.parent.name}={f'[{f.stem}]' if f.parent.name == 'hooks' else f.stem}" for f in files]
    return f"write {_format_search_path(name)} {' or '.join(words)} (experiments/{name}/README.md)"


def _format_search_path(name: str) -> str:
    return f'"hydra.searchpath=[file://{FOLDER / name / "conf"}]"'


FILE_KINDS = ("jsonl", "parquet")
"""Datasets that are named after the ending of their files."""
OPTIONAL_GROUPS = ("recipe", "sweep")
"""Config groups that need no choice."""


def check_optional(list_choices: Callable[[str], Sequence[str]], cfg: DictConfig) -> None:
    """Raise ConfigError for an unknown recipe or sweep, which Hydra ignores since these groups are optional."""
    for group in OPTIONAL_GROUPS:
        choice = cfg.hydra.runtime.choices.get(group)
        if choice not in (None, "null") and choice not in (choices := list_choices(group)):
            raise ConfigError(describe_unknown_choice(group, str(choice), choices))


def describe_unknown_choice(axis: str, choice: str, options: Sequence[str]) -> str:
    """Return the error message for an unknown choice, with the known ones and where others are looked for."""
    if experiment := describe_experiment_choice(axis, choice):
        return f"{axis}={choice}: there is no such choice; {experiment}."
    own = f"your own are files {axis}/NAME.yaml in a folder of $TITAN_CONF"
    choices = f" Choices: {', '.join(options)}; {own}." if options else f" There are none here; {own}."
    return f"{axis}={choice}: there is no such choice{_suggest_choice(axis, choice, options)}{choices}"


def _suggest_choice(axis: str, choice: str, options: Sequence[str]) -> str:
    """Return the end of a sentence, with what the user may have meant by an unknown choice."""
    path = PurePath(choice)
    if axis == "dataset" and (path.suffix or "/" in choice):
        kind = next((kind for kind in FILE_KINDS if f".{kind}" in path.suffixes), "text")
        return f"; files are dataset={kind} dataset.path={choice}."
    if axis == "model" and "/" in choice:
        return f"; weights of a folder or the hub are checkpoint.weights={choice}, with the model that they are of."
    word = path.name.removesuffix(".yaml").removesuffix(".yml").lower()
    parts = [set(re.split(r"[\W_]+", text)) for text in (word, *options)]  # tp+fsdp is fsdp_tp
    same = options[parts.index(parts[0], 1) - 1] if parts[0] in parts[1:] else None
    meant = word if word in options else CHOICES.get(axis, {}).get(word, same)
    return f"; did you mean {meant!r}?" if meant in options else suggest_nearest(choice, options)


def describe_unknown_hook(name: str) -> str:
    """Return the error message for a hook without a file."""
    if experiment := describe_experiment_choice("hooks", name):
        return f"hooks=[{name}]: there is no such choice; {experiment}."
    return (
        f"hooks=[{name}]: there is no such choice; put a file hooks/{name}.yaml into a folder of $TITAN_CONF, or write "
        f"+hooks.{name.rpartition('.')[2]}={{_target_:{name if '.' in name else 'MODULE.CLASS'}}}."
    )


def describe_value_error(
    error: ValueError, overrides: Sequence[str], list_choices: Callable[[str], Sequence[str]] = lambda group: ()
) -> str:
    """Return the error message for a `ValueError` of Hydra: mostly for an axis whose choice is a number or null."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in ("", *Recipe.axes()) and not isinstance(override.value(), (str, list)):
            choices = ", ".join(list_choices(key)) if key else ""
            way_out = f"choose one of {choices}" if choices else "see --help"
            return f"{override.input_line}: expected the name of a choice, AXIS=CHOICE; {way_out}."
    return f"{' '.join(str(error).split()).rstrip('.')}."


LAUNCHERS = {"submitit_slurm": "slurm", **dict.fromkeys(("submitit_local", "joblib", "ray", "rq"), "local")}
"""Other launchers by name, and titan's launcher that replaces them."""
SUBMITIT = {
    "timeout_min": "cluster.time=VALUE (minutes)",
    "nodes": "cluster.nodes=VALUE",
    "gpus_per_node": "cluster.devices_per_node=VALUE",
    "gpus_per_task": "cluster.devices_per_node=VALUE (a task is a rank, with a GPU of its own)",
    "tasks_per_node": "cluster.devices_per_node=VALUE (a task is a rank)",
    "cpus_per_task": "cluster.cpus_per_rank=VALUE",
    "cpus_per_gpu": "cluster.cpus_per_rank=VALUE",
    "mem_gb": "cluster.node_memory_gib=VALUE (of a node)",
    "mem_per_gpu": "cluster.sbatch={mem-per-gpu:VALUE}",
    "mem_per_cpu": "cluster.sbatch={mem-per-cpu:VALUE}",
    "array_parallelism": "hydra.launcher.at_once=VALUE",
    **{
        name: f"cluster.{name}=VALUE"
        for name in ("partition", "account", "qos", "constraint", "exclude", "gres", "exclusive", "setup")
    },
    "signal_delay_s": "cluster.signal_seconds=VALUE",
    "max_num_timeout": "cluster.requeues=VALUE",
    "additional_parameters": "cluster.sbatch=VALUE",
    "srun_args": "cluster.srun=VALUE",
    "name": "name=VALUE",
    **dict.fromkeys(("submitit_folder", "stderr_to_stdout", "comment", "use_srun"), ""),
    "n_jobs": "hydra.launcher.at_once=VALUE (hydra/launcher=local)",
}
"""Keys of hydra-submitit-launcher, and joblib's, with the setting of titan's; empty where titan handles it itself."""


def describe_launcher_setting(key: str, typed: str) -> str | None:
    """Return the error message for a setting of another launcher; None for other settings."""
    name = key.removeprefix("hydra.launcher.")
    if name == key or name not in SUBMITIT:
        return None
    if not SUBMITIT[name]:
        return f"{typed}: is another launcher's, and titan sees to it itself; leave it out."
    value = typed.partition("=")[2] or "VALUE"
    return f"{typed}: is another launcher's; titan's is {SUBMITIT[name].replace('VALUE', value)}."


def describe_launcher(choice: str) -> str | None:
    """Return the error message for another launcher; None for an unknown name."""
    sentence = f"hydra/launcher={choice}: titan launches runs itself; give hydra/launcher={LAUNCHERS.get(choice)} "
    return f"{sentence}(docs/slurm.md has the names of its settings)." if choice in LAUNCHERS else None
