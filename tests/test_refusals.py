"""What can't work is refused before work starts: one line that names the setting and the way out, exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import start
from launchers.command import run_command
from tests.support.machines import make_detector
from tests.support.runs import TINY, begin_run, write_run_checkpoint
from tests.support.tiers import full, select_cases
from titan.cluster import devices
from titan.errors import ConfigError
from titan.run.compose import compose_run
from titan.run.directory import lock_directory
from titan.run.run import Run

pytestmark = pytest.mark.usefixtures("laptop")
JOBS = "+hydra.callbacks.a._target_=hydra.experimental.callbacks.LogJobReturnCallback"
SERVER = [  # on 8 x H100 80GB
    ("model=llama8b", "parallelism=single|134 GiB|2 of 80 GiB with parallelism=fsdp|model=debug"),
    ("model=llama8b parallelism=ddp", "8 ranks (replicate 8)|79.6 GiB|parallelism=fsdp"),
    ("model=llama8b parallelism=tp parallelism.tensor=3", "parallelism.tensor=3|model.kv_heads=8"),
    ("model=llama70b parallelism=fsdp", "155 GiB|at least 32 devices|shard 32"),
    ("model=llama405b parallelism=fsdp", "862 GiB|at least 256 devices"),
    ("model=llama405b parallelism=3d", "1.2 TiB|at least 256 devices of 80 GiB|pipeline 8 x shard 4 x tensor 8"),
    ("model=llama405b parallelism.shard=16", "16 ranks (shard 16)|256 of 80 GiB with parallelism=fsdp"),
    ("parallelism.shard=16", "16 ranks|8 x NVIDIA H100|smaller degrees|cluster.device=cpu"),
    ("cluster.nodes=2 parallelism=fsdp", "cluster.nodes=2|torchrun or srun|cluster.nodes=1"),
]
PP = "parallelism=pp parallelism"
PP_SCHEDULE = f"{PP}.schedule"
MIXTURE = "dataset=mixture +dataset@dataset.sources.a=stdlib"
ONE_SOURCE = MIXTURE + " dataset.weights={a:1}"
LAPTOP = [  # on a CPU with 16 GiB
    # names
    ("modle=debug", "modle=debug|did you mean 'model'"),
    ("zebra=1", "zebra=1|no such setting|--help"),
    ("steps=3", "did you mean 'training.steps'"),
    ("model=lama8b", "did you mean 'llama8b'|Choices: debug, deepseek"),
    ("model=zzz", "no such choice|Choices: debug|; your own are files model/NAME.yaml in a folder of $TITAN_CONF."),
    ("model=", "no such choice|Choices: debug"),
    ("model=null", "model=null|name of a choice"),
    ("model=3", "model=3|name of a choice"),
    ("=3", "=3: expected|AXIS=CHOICE"),
    ("precision=float8", "requires an Ada, Hopper or newer GPU|precision.emulate=true"),
    ("precision=fp8", "no such choice|auto, bf16, bf16_pure, float8"),
    ("debug.audit=5", "debug.audit=5|parallelism.replicate=2"),
    ("checkpoint=asink", "did you mean 'async'"),
    ("checkpoint=off checkpoint.export=hf", "checkpoint.export=hf|checkpoint=async"),
    ("checkpoint=off checkpoint.path=x", "checkpoint.path=x|checkpoint=sync"),
    ("checkpoint.export=meta model=qwen3_debug", "checkpoint.export=meta|Llama only|checkpoint.export=hf"),
    ("checkpoint.export=onnx", "checkpoint.export=onnx|hf, meta"),
    ("checkpoint.keep_tokens=-1", "checkpoint.keep_tokens=-1|at least 0"),
    ("recipe=nope", "recipe=nope|no such choice"),
    ("hydra/launcher=nope", "Choices: basic, local, slurm"),
    ("hydra/launcher=submitit_slurm -m", "hydra/launcher=slurm|docs/slurm.md"),
    ("hydra.run.dirr=x", "did you mean 'hydra.run.dir'"),
    ("hydra.run.dir=null", "hydra.run.dir=null|another value"),
    ("name@x=3", "name@x=3|no such axis"),
    ("training.step=3", "did you mean 'training.steps'"),
    ("optimizer.momentum=0.9", "optimizer.momentum=0.9|no such setting"),
    ("parallelism.expert=2", "parallelism.expert=2|the model has no experts"),
    ("parallelism.experts=2", "parallelism.experts=2|no such setting; did you mean 'parallelism.expert'"),
    ("training.steps.x=3", "training.steps.x=3|did you mean 'training.steps'"),
    ("+training.step=3", "did you mean 'training.steps'"),
    ("+training.steps=3", "+training.steps=3|without the +"),
    ("+foo=3", "foo=3|no such setting"),
    ("model@elsewhere=debug", "write +model@elsewhere=debug to add it"),
    ("++foo.bar=3", "foo.bar=3|no such setting"),
    ("++training.stepz=3", "did you mean 'training.steps'"),
    ("+model=llama1b", "+model=llama1b|without the +"),
    ("++model=llama1b", "++model=llama1b|without the ++"),
    ("~training.steps", "~training.steps|training.steps=VALUE"),
    ("~model", "~model|model=VALUE"),
    # syntax and options
    ("model", "model: not understood|AXIS=CHOICE"),
    ("training.steps=[1", "not understood|AXIS.SETTING=VALUE"),
    ("training.steps==3", "not understood; write training.steps=3"),
    ("'training steps=3'", "not understood"),
    ("--frobnicate", "--frobnicate|--help"),
    ("--cfg everything", "'everything'|'job'|--help"),
    ("--cfg job -p nope", "--package nope|give an axis"),
    ("--package model", "--package model|add --cfg job"),
    ("--resolve", "--resolve|add --cfg job"),
    ("--cfg job modle=x", "did you mean 'model'"),
    ("--config-dir /nope", "--config-dir /nope|correct the path"),
    ("--config-dir /nope -m training.seed=1,2", "--config-dir /nope|correct the path"),
    ("--config-name nope", "--config-name nope|leave it out"),
    ("--config-path /nope", "--config-path /nope|correct the path"),
    ("hydra.searchpath=[file:///nope]", "hydra.searchpath=[/nope]: there is no such folder; correct the path"),
    (
        "hydra.searchpath=[file://nope]",
        "hydra.searchpath=[nope]: there is no such folder; write [file:///FOLDER]|absolute",
    ),
    ("'name=${nope}'", "name=${nope}|not found|correct"),
    ("'name=${oc.env:TITAN_NOT_SET}'", "TITAN_NOT_SET|not found|correct"),
    ("optimizer.lr=1e-3,3e-3", "optimizer.lr=1e-3,3e-3|one value|-m"),
    ("'hydra.searchpath=[nope'", "hydra.searchpath=[nope: not understood"),
    # what would change nothing
    ("model={}", "model={}|model=CHOICE|model.SETTING=VALUE"),
    ("model=[]", "model=[]: changes nothing"),
    ("recipe={}", "recipe={}: changes nothing"),
    ("dataset=text path=README.md", "path=README.md: there is no such setting; did you mean 'dataset.path'"),
    (
        "evaluation.sets.de.path=de.txt",
        "evaluation.sets has keys that you choose; write +evaluation.sets.de.path=VALUE",
    ),
    ("dataset=mixture dataset.weights.de=1", "write +dataset.weights.de=VALUE"),
    ("optimizer.lr.x=1", "did you mean 'optimizer.lr'"),
    ("dataset=[stdlib,text]", "stdlib and text are alternatives|-m dataset=stdlib,text"),
    ("cluster=[h100,h200] model=llama8b", "cluster=[h100,h200]: h100 and h200 are alternatives|-m cluster=h100,h200"),
    ("memory=[full,nope]", "memory=nope: there is no such choice"),
    ("cluster=h100,h200", "cluster=h100,h200: one value is expected; add -m to run each"),
    ("-m optimizer.lr=1,2 optimizer.lr=3", "optimizer.lr=1,2: optimizer.lr is given twice|leave one out"),
    ("optimizer.lr=1 -m optimizer.lr=2,3", "optimizer.lr=2,3: optimizer.lr is given twice"),
    ("-m hydra.mode=RUN training.seed=1,2", "hydra.mode=RUN|leave one out"),
    ("hydra.mode=MULTIRUN training.seed=1,2 training.steps=0", "training.steps=0|trial 1 of the sweep"),
    ("training.seed=1,2 -m training.steps=0", "training.steps=0|trial 1 of the sweep"),
    ("--experimental-rerun x", "--experimental-rerun x|resume=DIR"),
    ("resume=nope", "resume=nope: there is no run|runs/NAME"),
    ("resume=nope name=x", "name=x|resume=nope|leave one out"),
    ("-m resume=nope", "resume=nope|leave out -m"),
    # Hydra's own node
    ("hydra.job.chdir=true", "hydra.job.chdir=true|hydra.run.dir"),
    ("hydra/job_logging=stdout", "hydra/job_logging=stdout|log/rank-N.log"),
    ("hydra.job_logging.root.level=DEBUG", "hydra.job_logging.root.level=DEBUG|leave it out"),
    ("hydra.output_subdir=checkpoints", "hydra.output_subdir=checkpoints|null"),
    ("hydra.output_subdir=../x", "hydra.output_subdir=../x|null"),
    ("hydra.job.env_set={A:b}", "+hydra.job.env_set.NAME=VALUE"),
    ("+hydra.callbacks.a._target_=os.system", "hydra.callbacks: names os.system|take it out"),
    ("-m +hydra.callbacks.a._target_=os.system", "os.system"),
    ("+hydra.callbacks.a._target_=titan.nope", "hydra.callbacks: Error locating target 'titan.nope'"),
    (f"hydra/launcher=slurm {JOBS}", "LogJobReturnCallback.on_job_end|at_once=1"),
    (f"-m hydra.launcher.at_once=2 training.seed=1,2 {JOBS}", "LogJobReturnCallback.on_job_end|at_once=1"),
    # other launchers' keys
    ("hydra.launcher.timeout_min=60 hydra/launcher=slurm", "titan's is cluster.time=60"),
    ("-m +hydra.launcher.mem_gb=9 hydra/launcher=slurm", "titan's is cluster.node_memory_gib=9"),
    ("hydra.launcher.additional_parameters={a:b}", "titan's is cluster.sbatch={a:b}"),
    ("hydra.launcher.submitit_folder=x", "hydra.launcher.submitit_folder=x|leave it out"),
    ("+hydra.launcher.zzz=60", "hydra.launcher.zzz=60|no such setting"),
    # places
    ("hydra.run.dir=", "hydra.run.dir=: names no directory"),
    ("-m hydra.sweep.dir=", "hydra.sweep.dir=: names no directory"),
    ("-m hydra.sweep.subdir=../x", "hydra.sweep.subdir=../x|leave it out"),
    (f"name={'x' * 300}", "300 bytes|240 at most"),
    (f"hydra.run.dir={'x' * 300}", "300 bytes|240 at most"),
    (f"-m hydra.sweep.dir={'x' * 300}", "300 bytes|240 at most"),
    (f"name={'a/' * 2000}a", "2,001 levels|64 levels at most"),
    ("name=/x", "name=/x|hydra.run.dir=DIR"),
    # numbers and texts that nobody means
    ("model.layers=1000000000", "model.layers=1000000000: must be at most 10000"),
    ("model.dim=1e300", "at most 10000000"),
    ("training.steps=1e300", "at most 1000000000"),
    ("training.global_batch=1e300", "at most 10000000000"),
    ("parallelism=pp parallelism.microbatches=1e300", "parallelism.microbatches|at most 9223372036854775807"),
    ("parallelism.context=-1e300", "at least -1"),
    ("dataset=synthetic dataset.vocab=1e15", "at most 1000000"),
    ("cluster.timeout=1e300", "cluster.timeout=1e300: must be at most 2592000"),
    ("cluster.timeout=1e-9", "cluster.timeout=1e-9: must be at least 1"),
    ("cluster.signal_seconds=1e9", "at most 65535"),
    ("cluster.time=1000000000", "cluster.time=1000000000|at most 3599"),
    ("cluster.time=5000-0", "cluster.time=5000-0|3650 days"),
    ("optimizer.lr=1e300", "at most 1e30"),
    ("training.clip_norm=inf", "training.clip_norm=inf|above 0"),
    ("dataset.skip=[[0,1e30]]", "must be at most 9223372036854775807"),
    ("checkpoint.path=''", "checkpoint.path=: is empty"),
    ("checkpoint.path='\" \"'", "is empty"),
    ("dataset.cache='\"a\tb\"'", "control character"),
    # types
    ("training.steps=ten", "training.steps=ten: expected a whole number"),
    ("training.steps=null", "training.steps=null|whole number"),
    ("training.steps=", "training.steps=: expected a whole number"),
    ("training.steps=[1,2]", "training.steps=[1,2]: expected a whole number"),
    ("training.steps=???", "training.steps is missing|training.steps=VALUE"),
    ("optimizer.moments=fp8", "optimizer.moments=fp8|auto, fp32, bf16"),
    ("optimizer.moments=bf16 optimizer.betas=[0.9,0.999]", "optimizer.betas=[0.9,0.999]|0.996|optimizer.moments=fp32"),
    ("optimizer.groups={a:{match:['*rms.weight']}}", "did you mean '*norm.weight'?"),
    ("optimizer.groups={a:{match:[zebra*]}}", "optimizer.groups.a.match=[zebra*]|norm.weight|no parameter"),
    ("optimizer.groups={a:{match:[layers.6.*]}}", "matches layers.6.*"),
    ("optimizer.groups={a:{match:[head.weight]}} model.tied=true", "matches head.weight"),
    ("optimizer.groups={a:{lr:0.5}}", "optimizer.groups.a.match is missing"),
    ("optimizer.groups={a:{match:['norm*'],lr:-1}}", "optimizer.groups.a.lr=-1: must be at least 0"),
    ("optimizer.groups={a:{match:['norm*'],rate:1}}", "optimizer.groups.a.rate=1: there is no such setting"),
    ("optimizer.groups={a:{match:norm}}", "optimizer.groups.a.match=norm: expected a list"),
    ("optimizer.groups=3", "optimizer.groups=3: expected"),
    ("schedule.warmup=soon", "a number or auto"),
    ("optimizer.betas=0.9", "optimizer.betas=[a,b]"),
    ("optimizer.betas=[0.9]", "a list of 2 values"),
    ("dataset.tokenizer=[a]", "expected text"),
    ("modules=mine", "modules=[mine]"),
    # ranges
    ("training.steps=0", "training.steps=0: must be at least 1"),
    ("optimizer.lr=0", "optimizer.lr=0: must be above 0"),
    ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9,1]: must be at least 0 and below 1"),
    ("schedule=cosin", "did you mean 'cosine'?|Choices: constant, cosine, inverse_sqrt, linear, wsd"),
    ("schedule=constant schedule.final_lr=0.1", "schedule.final_lr=0.1|no effect|choose schedule=wsd"),
    ("schedule.final_weight_decay=0.5", "schedule.final_weight_decay=0.5|no effect|schedule.weight_decay_shape=linear"),
    # what users of other software write
    ("--batch-size 32", "--batch-size: there is no such option|training.global_batch=TOKENS"),
    ("--training.steps 100", "--training.steps: there is no such option|training.steps=100;"),
    ("--model.name llama3", "--model.name: there is no such option|model=llama8b;"),
    ("--parallelism.tensor_parallel_degree=2", "no such option|parallelism.tensor=2;"),
    ("--job.config_file x.toml", "no such option|recipe=NAME|docs/from_torchtitan.md"),
    ("parallelism=tp+fsdp", "did you mean 'fsdp_tp'"),
    ("optimizer.lr= 1e-3", "1e-3: not understood; write optimizer.lr=1e-3, without spaces"),
    ("'optimizer.lr = 1e-3'", "write optimizer.lr=1e-3, without spaces"),
    ("optimizer.lr = 1e-3", "write optimizer.lr=1e-3, without spaces"),
    ("\u2013training.steps=3", "\u2013 is a character of printed text; write the plain one"),
    ("--model llama8b", "--model: there is no such option|model=llama8b;"),
    ("--resume runs/x", "--resume: there is no such option|resume=runs/x;"),
    ("TRAINING.STEPS=5", "TRAINING.STEPS=5: there is no such setting; write training.steps=VALUE"),
    ("training.steps:5", "training.steps:5: not understood; write training.steps=5"),
    ("training.steps", "training.steps: not understood; write training.steps=VALUE"),
    ("training.steps=1,000", "training.steps=1,000: write 1000."),
    ("optimizer.lr=0,001", "optimizer.lr=0,001: write 0.001."),
    ("metrics=wandb,tensorboard", "write [wandb,tensorboard] for a list, or add -m"),
    ("\"training.steps='5'\"", "training.steps=5: expected a whole number; it is text, write it without quotes"),
    ("help", "help: not understood; write --help"),
    ("--help model", "model: not understood|--cfg job -p model shows its settings"),
    ("resume=last", "resume=last: there is no run; give|runs/NAME"),
    ("-m optimizer.lr=1e-3,3e-3 --cfg job", "--cfg: shows one run|leave out -m"),
    ("evaluation.tasks=[hellaswag]", "such as +evaluation.tasks.NAME={path:VALUE,format:VALUE} or null"),
    ("training.tokens=100e9 training.seq_len=32768", "training.global_batch=2048: must be a multiple|nearest is 32768"),
    ("--dry-run", "--dry-run: there is no such option|python -m titan.plan"),
    ("--config mine.yaml", "--config: there is no such option|recipe=NAME"),
    ("mine.yaml", "mine.yaml: not understood|recipe=NAME"),
    ("hydra.run.dir=~/x", "hydra.run.dir=~/x: not understood|write $HOME in place of ~"),
    ("CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=0|before the command"),
    ("model=meta-llama/Llama-3.1-8B", "model=meta-llama/Llama-3.1-8B|checkpoint.weights=meta-llama/Llama-3.1-8B"),
    ("dataset=/data/book.txt", "dataset=/data/book.txt|dataset=text dataset.path=/data/book.txt"),
    ("dataset=a/b.jsonl.gz", "dataset=jsonl dataset.path=a/b.jsonl.gz"),
    ("parallelism=zero3", "did you mean 'fsdp'"),
    ("precision=float16", "did you mean 'bf16'"),
    ("precision=BF16", "did you mean 'bf16'"),
    ("recipe=conf/recipe/train_8b.yaml", "did you mean 'train_8b'"),
    ("compile=true", "compile=true|choose one of auto, block, model, off"),
    ("cluster.device=gpu", "did you mean 'cuda'"),
    ("training.seq_len=4k", "training.seq_len=4k|write 4Ki (4,096) or 4000"),
    ("checkpoint.every=1h", "checkpoint.every=1h|write checkpoint.minutes=60 for time"),
    ("schedule.warmup=5%", "schedule.warmup=5%|it is no share|auto: a tenth"),
    ("schedule.warmup=0.1", "schedule.warmup=0.1|steps"),
    ("hooks=[os.system]", "+hooks.system={_target_:os.system}"),
    ("+hooks.x=mine.Hook", "hooks.x=mine.Hook|hooks.x={_target_:MODULE.CLASS}"),
    ("modules=[os]", "modules=[os]|os is a module of Python"),
    ("-m optimizer.lr=[1e-3,3e-3]", "the values of a sweep (-m) have no brackets"),
    ("-m optimizer.lr=range(1e-4,5e-4)", "is one value|range(START,STOP,STEP)"),
    ("-m 'optimizer.lr=interval(1e-4,5e-4)'", "hydra/sweeper=optuna|1e-3,3e-3"),
    ("-m hydra.sweeper._target_=os.system training.seed=1,2", "hydra.sweeper: names os.system"),
    ("-m hydra.launcher._target_=mine.X training.seed=1,2", "hydra.launcher: names mine.X|hydra/launcher=CHOICE"),
    ("-m hydra/sweeper=optuna hydra.sweeper.trials=3", "did you mean 'hydra.sweeper.n_trials'"),
    ("-m training.seed=1,2 checkpoint.resume=none", "checkpoint.resume=none|no such file or folder|trial 1"),
    ("dataset=mixture dataset.weights={a:1}", "give it as +dataset@dataset.sources.NAME=CHOICE"),
    # several settings together
    ("training.global_batch=100", "training.global_batch=100|training.seq_len=256|nearest is 256"),
    ("training.seq_len=4096", "training.seq_len=4096|nearest is 4096"),
    ("training.steps=50 schedule.warmup=50", "schedule.warmup=50|below training.steps=50|schedule.warmup=5,"),
    ("model.kv_heads=3", "model.heads=4|model.kv_heads=3"),
    ("model.dim=250", "model.dim=250|model.heads=4|model.head_dim"),
    ("model.head_dim=3", "must be even|model.head_dim=4"),
    ("dataset=text", "dataset.path is missing|dataset.path=VALUE"),
    ("compile=block debug.detect_anomaly=true", "compile=off"),
    ("checkpoint=off cluster.restarts=1", "cluster.restarts=1|checkpoint=sync"),
    ("name=", "name=:|give a value"),
    ("name=../x", "name=../x|another, or hydra.run.dir=DIR"),
    # data
    ("dataset.skip=3", "dataset.skip=[a,b]"),
    ("dataset.skip=[[5,3]]", "[[5,3]]|first <= last"),
    ("dataset.stream=true", "dataset.stream=true|set dataset.window"),
    ("training.grow=[[1000,4100]]", "training.grow: a batch=4100|nearest is 4096"),
    ("training.grow=[[1000,2048]]", "training.grow=[[1000,2048]]|must increase"),
    ("training.grow=[[9000,4096],[8000,8192]]", "must increase from one pair to the next"),
    (
        "parallelism=pp parallelism.schedule=Interleaved1F1B parallelism.microbatches=4 training.global_batch=1024"
        " training.grow=[[4096,1280]] model.layers=4",
        "training.grow: 1280 tokens make 5 micro-batches of 1 row,|parallelism.microbatches=5",
    ),
    ("dataset=prepared dataset.path=x dataset.stream=true dataset.window=5", "dataset.stream=true|remove it"),
    ("dataset=prepared dataset.path=x dataset.tokenizer=y", "dataset.tokenizer=y|is fixed by|remove it"),
    ("dataset=prepared dataset.path=x dataset.on_error=skip", "dataset.on_error=skip|remove it"),
    ("dataset=mixture +dataset@dataset.sources.a=stdlib", "dataset.weights is missing"),
    (MIXTURE + " dataset.weights={a:x}", "dataset.weights.a=x: expected a number"),
    (MIXTURE + " dataset.weights=3", "dataset.weights=3: expected names and values"),
    (
        "dataset=mixture dataset.sources={} dataset.weights={a:1}",
        "the mixture is empty|+dataset@dataset.sources.NAME=CHOICE",
    ),
    (
        "dataset=mixture +dataset@dataset.sources.a=stdlib +dataset@dataset.sources.b=synthetic "
        "dataset.weights={a:3,b:1} +dataset.weights={a:1}",
        "dataset.weights={a:1}: is merged with the weights of the other sources ({b:1})|dataset.weights={a:1,b:0}",
    ),
    ("dataset=mixture +dataset@dataset.sources.a=stdlib dataset.weights={b:1}", "dataset.weights|no source 'b'"),
    (ONE_SOURCE + " dataset.stages={-5:{a:1}}", "begins at -5|above 0"),
    (ONE_SOURCE + " dataset.stages={5:{c:1}}", "dataset.stages at 5|no source 'c'"),
    (
        "dataset=mixture +dataset@dataset.sources.a=text dataset.weights={a:1}",
        "dataset.sources.a.path is missing|dataset.sources.a.path=VALUE",
    ),
    (
        "dataset=mixture +dataset@dataset.sources.a=stdlib dataset.weights={a:1} dataset.sources.a.validation=0.5",
        "dataset.sources.a.validation=0.5: applies to all sources|give it as dataset.validation",
    ),
    (ONE_SOURCE + " dataset.epochs=2", "dataset.epochs=2|dataset.sources.NAME.epochs"),
    (ONE_SOURCE + " dataset.stream=true", "dataset.sources.a.window"),
    (ONE_SOURCE + " dataset.stages={x:{a:1}}", "dataset.stages=x: expected a whole number"),
    # layouts
    ("parallelism=[fsdp,tp]", "fsdp and tp are alternatives|-m parallelism=fsdp,tp"),
    ("parallelism.shard=0", "parallelism.shard=0|1 or more"),
    ("parallelism=tp parallelism.tensor=4", "parallelism.tensor=4|model.kv_heads=2|such as 2"),
    ("parallelism=tp model.kv_heads=4 model.heads=4 model.ffn=641", "parallelism.tensor=2|model.ffn=641"),
    ("parallelism=tp model.vocab=4097", "parallelism.tensor=2|model.vocab=4097"),
    (
        "parallelism=tp training.seq_len=257 training.global_batch=2056",
        "training.seq_len=257|multiple of 2|over tensor 2",
    ),
    ("parallelism=tp parallelism.async_tensor=true compile=off", "async_tensor=true|compile=block and a CUDA device"),
    ("parallelism.async_tensor=true", "async_tensor=true|parallelism.tensor above 1"),
    (
        "parallelism=tp parallelism.regather=true parallelism.sequence_parallel=false",
        "regather=true|sequence_parallel=false|give auto",
    ),
    ("parallelism=tp parallelism.regather=yes", "regather|true, false or auto"),
    (
        "parallelism=pp parallelism.pipeline=4 cluster.devices=4 parallelism.microbatches=2",
        "parallelism.microbatches=2|at least as many as stages|give 4 or more",
    ),
    ("parallelism=cp training.seq_len=254 training.global_batch=2032", "training.seq_len=254|multiple of 4|head and"),
    ("parallelism=cp parallelism.context=8 parallelism.context_method=ulysses", "ulysses|context 8|4 heads|ring"),
    ("parallelism=cp parallelism.context_method=rings", "context_method=rings"),
    ("parallelism=pp parallelism.pipeline=8 parallelism.microbatches=8", "parallelism.pipeline=8|8 stages|6 layers"),
    ("parallelism=pp parallelism.schedule=ZBVZeroBubble parallelism.stages=2", "stages=2|2 stages on each rank|give 4"),
    ("parallelism=pp parallelism.stages=3", "parallelism.stages=3|1F1B|give 2"),
    ("parallelism=fsdp parallelism.schedule=Gpipe", "schedule=Gpipe|'GPipe'"),
    ("parallelism=pp parallelism.schedule=mine.csv", "schedule=mine.csv|by its name, one of auto, GPipe, 1F1B"),
    ("parallelism=pp parallelism.pipeline=512 cluster.devices=512", "512 stages|6 layers|smaller parallelism.pipeline"),
    ("cluster.price=inf", "cluster.price=inf: must be above 0 and finite"),
    ("parallelism=pp parallelism.microbatches=1", "parallelism.microbatches=1|at least as many as stages|give 2"),
    (PP_SCHEDULE + "=1F1B training.global_batch=256", "schedule=1F1B|1 row |training.global_batch"),
    (PP + ".starts=[3,2] parallelism.schedule=LoopedBFS parallelism.stages=3", "stages=3|multiple"),
    ("parallelism=pp parallelism.starts=[7]", "parallelism.starts=[7]|from 1 to 5"),
    ("parallelism=pp parallelism.starts=[1,2]", "parallelism.starts=[1,2]|2 given|2 stages need 1"),
    ("parallelism.starts=[3]", "parallelism.starts=[3]|parallelism=pp"),
    ("parallelism.stages=2", "parallelism.stages=2|parallelism=pp"),
    (
        "parallelism=fsdp_pp parallelism.schedule=ZBVZeroBubble parallelism.reshard=always",
        "parallelism.reshard=always|ZBVZeroBubble|auto or never",
    ),
    (
        "parallelism=fsdp_pp parallelism.schedule=ZBVZeroBubble parallelism.accumulate=sharded",
        "parallelism.accumulate=sharded|ZBVZeroBubble|auto or whole",
    ),
    ("parallelism=ddp parallelism.accumulate=whole", "parallelism.accumulate=whole|parallelism=fsdp"),
    ("parallelism=fsdp parallelism.reshard=3", "parallelism.reshard=3|2 ranks|divisor"),
    (PP_SCHEDULE + "=ZBVZeroBubble memory=selective", "memory=selective|ZBVZeroBubble|memory=full"),
    ("memory=budget compile=off", "memory=budget|compile=block"),
    ("memory=budget debug.detect_anomaly=true", "memory=budget|debug.detect_anomaly=false|memory=selective"),
    ("parallelism=tp debug.detect_anomaly=true", "debug.detect_anomaly=true|parallelism.tensor"),
    ("parallelism.prefetch=3", "parallelism.prefetch=3|parallelism=fsdp"),
    ("parallelism=ddp '+parallelism.groups.a={match:[head]}'", "parallelism.groups=a|parallelism=fsdp"),
    (
        "parallelism=fsdp '+parallelism.groups.a={match:[heads]}'",
        "parallelism.groups.a.match=[heads]|did you mean 'head'",
    ),
    ("parallelism=fsdp '+parallelism.groups.a={match:[head],shard:4}'", "groups.a.shard=4|2 ranks"),
    ("parallelism=ddp parallelism.reshard=always", "parallelism.reshard=always|parallelism=fsdp"),
    ("memory=every_n memory.every=9", "memory.every=9|6 layers"),
    ("parallelism.shard=128 training.global_batch=32768", "128 ranks|at most 35 ranks"),
    ("memory=budget compile=block compile.backend=eager", "compile.backend=eager|memory=budget"),
    ("parallelism=fsdp parallelism.reshard=2", "parallelism.reshard=2|2 ranks|smaller"),
    ("memory.offload=true", "memory.offload=true|parallelism=fsdp"),
    ("parallelism=ddp memory.offload=true", "memory.offload=true|parallelism=fsdp"),
    ("parallelism.microbatches=100", "parallelism.microbatches=100|at most 8"),
    ("cluster.devices=2", "1 rank, but there are 2 devices|parallelism=ddp|cluster.devices=1"),
    ("cluster.devices=3 parallelism.shard=2", "2 ranks, but there are 3 devices|cluster.devices=2"),
    ("cluster.nodes=2", "cluster.nodes=2|torchrun or srun"),
    ("cluster.device=cuda", "cluster.device=cuda|cluster.device=cpu"),
    ("cluster.device=tpu", "choose one of auto, cpu, cuda"),
    # memory
    ("model=llama8b", "131 GiB|16.0 GiB|2 of 80 GiB with parallelism=fsdp|model=debug"),
    ("model=llama8b parallelism=3d", "8 ranks|at least 2 devices of 80 GiB|cluster.memory_gib"),
    ("model=llama70b parallelism=fsdp", "model=llama70b parallelism=fsdp|2 ranks (shard 2)|at least 32 devices"),
    ("model=llama405b", "6.4 TiB|of 80 GiB with parallelism=fsdp memory=full"),
    ("model=llama405b parallelism=3d", "at least 256 devices of 80 GiB|pipeline 16 x shard 2 x tensor 8"),
    ("cluster.memory_gib=0.01", "model=debug|a smaller training.seq_len|cluster.memory_gib"),
    # classes
    ("model._target_=os.system", "model._target_=os.system|os is a module of Python|docs/extending.md"),
    ("model._target_=titan.run.run.Run", "dataclass with a method build|another class"),
    ("model._target_=titan.model.schema.Lama", "no such class|correct the name"),
    ("model._target_=mine.Model modules=[mine]", "no such class|No module named 'mine'"),
    ("model._target_=subprocess.Popen modules=[subprocess]", "modules=[subprocess]|is a module of Python"),
    ("+training._target_=titan.model.schema.Llama", "training._target_|no such setting"),
    # sweeps
    ("-m training.steps=1,0", "training.steps=0|trial 2 of the sweep|nothing was started"),
    ("-m training.steps=1,x name=grid", "training.steps=x|trial 2 of the sweep|nothing was started"),
    ("-m parallelism=ddp,tp model.kv_heads=1", "parallelism.tensor=2|trial 2 of the sweep"),
    ("-m model=debug,nope", "model=nope|Choices: debug"),
    ("-m training.step=1,2", "did you mean 'training.steps'"),
    ("-m 'training.steps=glob(*)'", "-m|no trials|optimizer.lr=1e-3,3e-3"),
    ("-m optimizer.lr=1e-3,[", "not understood"),
    ("-m training.seed=1,1", "trial 2 of the sweep|the same as another"),
    ("-m training.seed=1,2 hydra.sweeper.max_batch_size=1", "max_batch_size=1|hydra.launcher.at_once"),
    ("-m training.seed=1,2 hydra.launcher.at_once=0", "hydra.launcher.at_once=0|at least 1"),
    ("-m training.seed=1,2 +hydra.launcher.wait=true", "hydra.launcher.wait=true|no such setting"),
    ("-m name=a,b training.seed=1,2", "name=a,b|one name"),
    ("-m name=../a training.seed=1,2", "name=../a|a folder under runs/"),
    ("-m name=a hydra.sweep.dir=b training.seed=1,2", "hydra.sweep.dir=b|leave one out"),
    ("-m sweep=nope", "sweep=nope|Choices: batch_size|sweep/NAME.yaml in a folder of $TITAN_CONF"),
    ("sweep=memory", "sweep=memory|add -m"),
    ("-m sweep=memory sweep.margin=0", "sweep.margin=0|above 0"),
    ("hydra/launcher=slrum", "did you mean 'slurm'"),
    ("hydra/launcher=slurm hydra.launcher.poll_seconds=0", "hydra.launcher.poll_seconds=0|above 0"),
    ("hydra/launcher=slurm hydra.launcher.dry_run=true cluster.chain=1000", "cluster.chain=1000|at most 100"),
    ("cluster.time=1:99:00", "cluster.time=1:99:00|at 59"),
    ("cluster.environment={1BAD:x}", "1BAD|not a valid name"),
]
CASES = [("cpu", *case) for case in LAPTOP] + [("gpu", *case) for case in SERVER]
QUICK = (
    "cpu:+training.steps=3", "cpu:model", "cpu:--package_model", "cpu:name=/x", "cpu:training.steps=ten",
    f"cpu:name={'x' * 75}", "cpu:optimizer.betas=[0.9]", "cpu:training.grow=[[1000,4100]]",
    "cpu:parallelism=pp_parallelism.pipeline=8_parallelism.microbatches=8", "cpu:parallelism.microbatches=100",
    "cpu:cluster.memory_gib=0.01", "cpu:parallelism=tp+fsdp", "cpu:optimizer.lr_=_1e-3",
    "gpu:model=llama405b_parallelism=fsdp",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    select_cases([pytest.param(*case, id=f"{case[0]}:{case[1].replace(' ', '_')[:80]}") for case in CASES], QUICK),
)
def test_refused_before_anything_is_written(
    kind: str, line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector(kind))
    called: list[Run] = []
    code = run_command(shlex.split(line), lambda run: called.append(run) or 0)  # type: ignore[func-returns-value]
    error = capfd.readouterr().err
    assert (code, called) == (2, [])
    sentence(error, expected)
    assert list(Path.cwd().iterdir()) == []


def sentence(error: str, expected: str) -> None:
    """`error` is one plain line that contains each of the expected texts."""
    lines = [line for line in error.splitlines() if line.strip()]
    assert len(lines) == 1, error
    assert lines[0].startswith("titan: ")
    assert lines[0].endswith((".", "?", ")"))
    assert ".." not in lines[0].replace("../", "").replace("...", "")
    for mark in ("Traceback", "full_key", "object_type", "Error merging", "NoneType"):
        assert mark not in error
    for text in expected.split("|"):
        assert text in error


def test_there_are_many_cases() -> None:
    assert len({case[:2] for case in CASES}) == len(CASES) >= 75


def tiny(*overrides: str, name: str = "x") -> Run:
    return compose_run([*TINY, f"name={name}", *overrides])


def refused(run: Run, expected: str) -> None:
    """`launchers.start.run_local` refuses the run in one sentence, and leaves all but the lock as it was."""
    before, lock = sorted(Path().rglob("*")), Path(run.directory, ".lock").relative_to(Path.cwd())
    with pytest.raises(ConfigError) as refusal:
        start.run_local(run)
    sentence(f"titan: {refusal.value}", expected)
    assert [file for file in sorted(Path().rglob("*")) if file != lock] == [file for file in before if file != lock]


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        full(["dataset.path=none.jsonl"], "dataset.path=none.jsonl|correct the path", id="no-file"),
        full(["dataset.path=empty.jsonl"], "dataset.path=empty.jsonl|empty", id="empty-file"),
        full(["dataset.path=bad.jsonl"], "bad.jsonl|not JSON|correct it", id="no-json"),
        full(["dataset.path=good.jsonl", "dataset.field=body"], "'body'|dataset.field", id="no-such-key"),
        pytest.param(
            ["dataset.path=good.jsonl", "model.vocab=100"], "model.vocab=100|give model.vocab=4096", id="vocabulary"
        ),
        pytest.param(
            ["dataset.path=good.jsonl", "model.vocab=4096", "training.seq_len=4096", "training.global_batch=4096"],
            "training.seq_len=4096|only|smaller training.seq_len or more data",
            id="less-than-a-row",
        ),
        pytest.param(
            ["dataset.path=good.jsonl", "dataset.tokenizer=nope.json"], "dataset.tokenizer=nope.json", id="tokenizer"
        ),
    ],
)
def test_data_that_does_not_fit(overrides: list[str], expected: str) -> None:
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text("{x\n")
    Path("good.jsonl").write_text("\n".join(json.dumps({"text": f"number {i} of a few"}) for i in range(20)))
    data = [o for o in TINY if not o.startswith("dataset")]
    refused(compose_run([*data, "dataset=jsonl", "name=x", *overrides]), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        pytest.param("runs/x/thesis.txt", "hydra.run.dir=|thesis.txt|another name or an empty directory", id="foreign"),
        pytest.param("runs", "hydra.run.dir=|can't be written to|choose another place", id="file"),
    ],
)
def test_directory_that_can_not_be_a_runs(file: str, expected: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("mine")
    refused(tiny(), expected)
    assert Path(file).read_text() == "mine"


def test_directory_in_use() -> None:
    run = tiny()
    with lock_directory(Path(run.directory)):
        refused(run, f"hydra.run.dir=|process {os.getpid()}|wait for it")


def begun(*overrides: str) -> Run:
    """A run whose first attempt has begun, as far as its directory knows."""
    run = tiny(*overrides)
    Path(run.directory).mkdir(parents=True)
    begin_run(run)
    return run


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(
            ["optimizer.lr=0.5"],
            "runs/x: holds another experiment|optimizer.lr was 0.001, now 0.5|another name|checkpoint.resume=runs/x",
            id="lr",
        ),
        pytest.param(["training.seed=1"], "training.seed was 0, now 1", id="seed"),
        full(["schedule=cosine"], "schedule was titan.schedule.WSD, now titan.schedule.Cosine", id="schedule"),
        full(["optimizer=sgd"], "optimizer was titan.optimizer.AdamW, now titan.optimizer.SGD", id="optimizer"),
        full(["dataset.tokens=30000"], "dataset.tokens was 20000, now 30000|data was", id="data"),
        pytest.param(["training.steps=2"], "training.steps=2|has 3|give 3 or more", id="fewer-steps"),
    ],
)
def test_another_experiment_in_the_directory(overrides: list[str], expected: str) -> None:
    run = begun()
    before = (Path(run.directory) / "run.yaml").read_text()
    refused(tiny(*overrides), expected)
    assert (Path(run.directory) / "run.yaml").read_text() == before


@pytest.mark.full
@pytest.mark.parametrize("overrides", [["checkpoint.resume=nope"], ["checkpoint.weights=./nope"]], ids=str)
def test_what_a_run_starts_from_is_looked_for_before_its_data_are_prepared(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "prepare_data", lambda *_: pytest.fail("the data were prepared"))
    refused(tiny(*overrides), f"{overrides[0]}|no such directory|correct the path")


def test_weights_of_another_shape_are_rejected_before_the_data_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "prepare_data", lambda *_: pytest.fail("the data were prepared"))
    weights = SimpleNamespace(model=dataclasses.replace(begun().model, ffn=96))
    monkeypatch.setattr("titan.weights.formats.open_weights", lambda path: weights)
    refused(tiny("checkpoint.weights=x", name="y"), "checkpoint.weights=x: the weights are of|give model.ffn=96")


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "weights", "expected"),
    [
        pytest.param([], b"w", "checkpoint.resume=runs/x|no complete checkpoint|give a run's or a", id="damaged"),
        pytest.param(["dataset.tokens=30000"], None, "the same dataset, tokenizer", id="other-data"),
        pytest.param(["training.steps=2"], None, "training.steps=2|2 steps already|more", id="too-few-steps"),
    ],
)
def test_fork_that_can_not_work(overrides: list[str], weights: bytes | None, expected: str) -> None:
    folder = write_run_checkpoint(begun(), 2)
    if weights:
        (folder / "weights").write_bytes(weights)
    refused(tiny("checkpoint.resume=runs/x", *overrides, name="y"), expected)
