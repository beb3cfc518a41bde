"""Names that users bring from other software are answered with titan's."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from titan.errors import ConfigError
from titan.run import synonyms
from titan.run.compose import compose_run, register_configs
from titan.run.hydra_session import compose_config, open_hydra
from titan.run.schema import Recipe


@pytest.mark.full
def test_every_name_of_titan_exists_and_no_synonym_is_one() -> None:
    register_configs()
    with open_hydra():
        content: Any = OmegaConf.to_container(compose_config([]), resolve=False)
    for name in {*synonyms.SYNONYMS.values(), *synonyms.AXES.values()} - {"recipe", "model.top_k", "dataset.path"}:
        node = content
        for part in name.split("."):
            assert part in node, name
            node = node[part]
    assert not {word for word in synonyms.SYNONYMS if word in Recipe.axes()}
    assert len(synonyms.SYNONYMS) == sum(map(len, synonyms._WORDS.values()))


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("training.max_steps=5", "write training.steps=VALUE"),
        ("batch_size=8", "write training.global_batch=TOKENS"),
        ("training.learning_rate=1e-3", "write optimizer.lr=VALUE"),
        ("gpus=8", "write cluster.devices=VALUE"),
        ("logger=wandb", "write metrics=CHOICE"),
        ("experiment=a", "named settings are a recipe: write recipe=NAME"),
        ("dataset.path=x.txt", "choose dataset=text or jsonl or parquet or chat or prepared for it"),
        ("wandb.project=x", "write metrics.wandb_project"),
        ("checkpoint.interval=5", "write checkpoint.every=STEPS"),
        ("trainer.steps=5", "write training.steps"),
        ("trainer.max_epochs=5", "write dataset.epochs=VALUE"),
        ("model.experts=8", "this model has no experts; choose one that has, such as model=qwen3_moe_debug"),
        ("parallelism.tensor_parallel_degree=2", "write parallelism.tensor=VALUE"),
        ("optimizer.beta3=1", "did you mean"),
        ("checkpoint.enable=true", "write checkpoint=sync."),
        ("checkpoint.enable=false", "write checkpoint=off."),
        ("activation_checkpoint.mode=full", "write memory=full."),
        ("model.flavor=8B", "write model=llama8b."),
        ("optimizer.name=AdamW", "write optimizer=AdamW."),
        ("trainer=gpu", "devices are cluster.device=cuda or cpu, layouts parallelism=CHOICE."),
    ],
)
def test_a_name_of_others_is_answered(typed: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([typed])
    assert str(caught.value).startswith(f"{typed}: there is no such setting; {advice}")


@pytest.mark.full
@pytest.mark.parametrize("typed", ["+experiment=lion", "experiments=lion"])
def test_an_experiment_is_answered_with_its_choice(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([typed])
    assert '/experiments/lion/conf]" optimizer=lion (experiments/lion/README.md).' in str(caught.value)
    path = str(caught.value).partition('"')[2].partition('"')[0]
    assert compose_run([path, "optimizer=lion"]).choices["optimizer"] == "lion"
    with pytest.raises(ConfigError, match=r"experiments/lion has it: add \"hydra.searchpath=\[file://"):
        compose_run(["optimizer=lion"])


@pytest.mark.full
def test_an_added_setting_of_others_is_answered_like_a_plain_one() -> None:
    for typed in ("+trainer.max_steps=5", "++training.max_steps=5"):
        with pytest.raises(ConfigError, match=r"max_steps=5: there is no such setting; write training.steps=VALUE"):
            compose_run([typed])
