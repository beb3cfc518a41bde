"""Faults of what plugs in: schedules, loss terms, hooks, own code, objectives of sweepers, evaluation.

Their texts occur once in their files.
"""

from __future__ import annotations

from tests.support.fault import define_fault

FAULTS = (
    define_fault(
        "groups: replicas of a group do not sum their gradients",
        "titan/parallelism/mesh.py",
        'self.data_meshes[shards] = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]',
        'self.data_meshes[shards] = mesh["shard"]',
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
        "own attention: the state of a document that ended goes on",
        "titan/parallelism/context_core.py",
        "    continues = ids[:, first] == ids[:, first - 1]\n",
        "    continues = ids[:, first] == ids[:, first]\n",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[linear-selective-cp]",
    ),
    define_fault(
        "own attention: no gradient of a state is sent back",
        "titan/parallelism/context_core.py",
        "            next_grads = chain.receive(no_grads, chunk + 1, chunk, owned)\n",
        "            next_grads = (chain.receive(no_grads, chunk + 1, chunk, owned), no_grads)[1]\n",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[linear-selective-cp]",
    ),
    define_fault(
        "own attention: a rank's queries see the keys of the rank's tokens only",
        "titan/parallelism/context_core.py",
        "    k, v = kv.unbind()\n",
        "    tokens = tokens._replace(keys=tokens.queries)\n",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[window-cp-allgather]",
    ),
    define_fault(
        "own attention: a class derived from titan's counts as titan's",
        "titan/model/core.py",
        '(isinstance(core, TitanCore) and type(core).__module__.startswith("titan."))',
        "isinstance(core, TitanCore)",
        "model/test_module_checks.py::test_what_is_rejected",
    ),
    define_fault(
        "own attention: chunks of a prompt forget what was cached",
        "titan/generation/cache.py",
        "return self.keys[:, :, visible], self.values[:, :, visible]",
        "return k, v",
        "generation/test_decode.py::test_attention_of_ones_own_continues_rows_as_whole_forward_passes_do",
    ),
    define_fault(
        "own models: parameters are those of titan's blocks",
        "titan/model/built_counts.py",
        "        if is_titan_class(owner):\n",
        "        if not is_titan_class(owner):\n",
        "model/test_module_checks.py::test_counts_are_those_of_the_module",
    ),
    define_fault(
        "own code: new files do not count",
        "titan/run/identity.py",
        "    for folder in map(Path, spec.submodule_search_locations):\n",
        "    for folder in ():\n",
        "run/test_own_code.py::test_every_file_of_the_package_is_in_the_code_id_alone",
    ),
    define_fault(
        "objective: a failed trial is the best",
        "titan/sweep/objective.py",
        'return sweep.worst if sweep.worst is not None else -math.inf if direction == "maximize" else math.inf',
        "return -math.inf",
        "sweep/test_objective.py::test_worst",
    ),
    define_fault(
        "evaluation: spaces before a continuation are the context's",
        "titan/evaluation/scores.py",
        "contexts.append(item.context.rstrip())",
        "contexts.append(item.context)",
        "evaluation/test_items.py",
    ),
    define_fault(
        "evaluation: targets of padding are scored",
        "titan/training/evaluation/evaluator.py",
        "sums[:, 0] += losses.double().where(valid, 0).sum(1)",
        "sums[:, 0] += losses.double().sum(1)",
        "commands/test_evaluate.py::test_exported_weights_score_as_the_reference",
    ),
    define_fault(
        "average: bad steps count",
        "titan/training/evaluation/averages.py",
        "share = ((~bad).float() * (1 - self.decay)).to(average.device)",
        "share = ((~bad).float() * 0 + 1 - self.decay).to(average.device)",
        "training/test_evaluation.py::test_a_step_that_was_not_finite_leaves_the_average_as_it_is",
    ),
)
