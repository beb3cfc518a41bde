"""Faults of what plugs in: schedules, loss terms, hooks, own code, objectives of sweepers, evaluation.

Their texts occur once in their files.
"""

from __future__ import annotations

from tests.support.fault import define_fault

FAULTS = (
    define_fault(
        "groups: replicas of a group do not sum their gradients",
        "titan/parallelism/mesh.py",
        'return mesh["replicate", "shard"] if sizes["replicate"] > 1 else mesh["shard"]',
        'return mesh["shard"]',
        "parallelism/test_strategy.py::test_parameters_are_sharded_as_their_group_says_and_another_sharding_resumes",
    ),
    define_fault(
        "schedule: weight decay compounds over resumed steps",
        "titan/schedule/optimizer_schedule.py",
        'group["weight_decay"] = weight_decay * factors.weight_decay',
        'group["weight_decay"] *= factors.weight_decay',
        "schedule/test_optimizer_schedule.py",
    ),
    define_fault(
        "schedule: warm-up begins at the peak",
        "titan/schedule/schema.py",
        "return step / start if step <= start else self.after_warmup(step, steps)",
        "return self.after_warmup(max(step, start + 1), steps)",
        "schedule/test_schedule.py",
    ),
    define_fault(
        "loss terms: smoothing counts the target only",
        "titan/model/loss_terms.py",
        "return tokens.target_logit - tokens.mean_logit",
        "return tokens.target_logit - tokens.logsumexp",
        "model/test_loss_terms.py::test_figures_and_gradients",
    ),
    define_fault(
        "loss terms: the vocabulary's parts begin at zero on every rank",
        "titan/model/loss_terms.py",
        "index = targets - vocabulary.rank * width",
        "index = targets - 0 * width",
        "model/test_loss_terms.py::test_parts_of_the_vocabulary_give_the_same",
    ),
    define_fault(
        "hooks: they see gradients after clipping only",
        "titan/hooks/calls.py",
        'self._optimizer_logs[step] = self._call_methods("before_optimizer", step, {}, waits_for_device=False)',
        "self._optimizer_logs[step] = {}",
        "hooks/test_hooks.py::test_every_moment_in_order",
    ),
    define_fault(
        "own code: new files do not count",
        "titan/run/own_code.py",
        "    for folder in map(Path, spec.submodule_search_locations):\n",
        "    for folder in ():\n",
        "run/test_own_code.py::test_every_file_of_the_package_is_in_the_code_id_alone",
    ),
    define_fault(
        "objective: a failed trial is the best",
        "titan/sweep/objective.py",
        'return sweep.worst if sweep.worst is not None else -math.inf if direction == "maximize" else math.inf',
        "return -math.inf",
        "sweep/test_objective.py",
    ),
    define_fault(
        "evaluation: spaces before a continuation are the context's",
        "titan/evaluation/requests.py",
        "return stripped, context[len(stripped) :] + continuation",
        "return context, continuation",
        "evaluation/test_items.py",
    ),
    define_fault(
        "evaluation: targets of padding are scored",
        "titan/training/evaluation/likelihoods.py",
        "sums[:, 0] += losses.double().where(valid, 0).sum(1)",
        "sums[:, 0] += losses.double().sum(1)",
        "commands/test_evaluate.py::test_exported_weights_score_as_the_reference",
    ),
    define_fault(
        "average: bad steps count",
        "titan/training/evaluation/averages.py",
        "share = ((~bad).float() * (1 - self.decay)).to(average.device)",
        "share = ((~bad).float() * 0 + 1 - self.decay).to(average.device)",
        "training/test_evaluation.py",
    ),
)
