"""Faults of what shows a run from inside: hangs, values that are not finite, spikes, replays, layers, profiles.

Their texts occur once in their files.
"""

from __future__ import annotations

from tests.support.fault import fault

FAULTS = (
    fault(
        "hangs: ranks that are ahead are the late ones",
        "titan/debug/diagnosis.py",
        "other.entered.get(op.group, 0) < op.number",
        "other.entered.get(op.group, 0) > op.number",
        "debug/test_diagnosis.py",
    ),
    fault(
        "hangs: a stopped rank counts as alive",
        "titan/debug/diagnosis.py",
        "if gone := world.silent | set(range(world.size)) - world.states.keys():",
        "if gone := set(range(world.size)) - world.states.keys():",
        "debug/test_diagnosis.py",
    ),
    fault(
        "hangs: the timeout of the collective comes first",
        "titan/debug/judge.py",
        "return 1 if age >= limit - self.clock.lead(limit) or",
        "return 1 if age >= limit + 60 or",
        "debug/test_judge.py",
    ),
    fault(
        "hangs: a rank that makes progress hangs",
        "titan/debug/judge.py",
        "return bool(late) and max(late) < 0.5",
        "return bool(late) and max(late) < 0",
        "debug/test_judge.py",
    ),
    fault(
        "hangs: batches and tensors are no progress",
        "titan/debug/activity.py",
        "max(self.since, self._advanced, self",
        "max(self.since, self",
        "debug/test_judge.py",
    ),
    fault(
        "hangs: NCCL's collectives are looked for among gloo's",
        "titan/debug/flight.py",
        "for name in (names if _uses_nccl() else names[::-1])",
        "for name in names[::-1]",
        "debug/test_flight.py",
    ),
    fault(
        "hangs: NCCL's collectives wait from the beginning",
        "titan/debug/flight.py",
        'entry["state"] == "started" if timed else None',
        'entry["state"] == "started"',
        "debug/test_flight.py",
    ),
    fault(
        "hangs: every node reads the states of all nodes",
        "titan/debug/states.py",
        "return self.writes() and self._is_first and not any",
        "return self.writes() and not any",
        "debug/test_states.py::test_the_file_system_is_asked_little_in_every_phase",
    ),
    fault(
        "hangs: each rank writes into the run's directory",
        "titan/debug/states.py",
        "if not self.writes():\n            return",
        "if False:\n            return",
        "debug/test_states.py::test_a_node_writes_one_file",
    ),
    fault(
        "bad nodes: a setting that is wrong is the node's fault",
        "titan/sweep/job_exit.py",
        "return None if first.code == 2 else first.node or None",
        "return first.node or None",
        "launchers/test_bad_nodes.py",
    ),
    fault(
        "not finite: rows are counted from the micro-batch",
        "titan/training/not_finite.py",
        "number_of(origin.microbatch * per_call + row)",
        "number_of(row)",
        "training/test_not_finite.py::test_the_origin_of_a_planted_value_is_named[single-forward]",
    ),
    fault(
        "not finite: backward passes come first",
        "titan/training/not_finite.py",
        "return backward, origin.microbatch, stage, origin.order, origin.rank",
        "return not backward, origin.microbatch, stage, origin.order, origin.rank",
        "training/test_not_finite.py::test_the_origin_of_a_planted_value_is_named[single-forward]",
    ),
    fault(
        "not finite: the step behind it changes the weights, and is repeated",
        "titan/training/trainer.py",
        "skipped = bad | self.bad | (metrics[VOID] > 0)",
        "skipped = bad | (metrics[VOID] > 0)",
        "training/test_not_finite.py::test_steps_after_it_are_those_of_a_run_that_skips_it",
    ),
    fault(
        "not finite: the operation is the last one",
        "titan/training/operations.py",
        "known = self._first is not None or not _writes(func, name)",
        "known = not _writes(func, name)",
        "training/test_not_finite.py::test_the_first_operation_with_a_value_that_is_not_finite",
    ),
    fault(
        "spikes: the window's largest loss is its middle",
        "titan/metrics/spikes.py",
        "usual = median(self.losses)",
        "usual = max(self.losses)",
        "metrics/test_spikes.py",
    ),
    fault(
        "replay: a checkpoint behind the step",
        "titan/training/replay/request.py",
        "before = [step for step in found if step < settings.step]",
        "before = [step for step in found if step <= settings.step]",
        "commands/test_replay.py::test_what_can_not_be_replayed_is_refused",
    ),
    fault(
        "replay: the text is that of the rows before",
        "titan/replay.py",
        "first = side.run.training.rows_before(settings.step)",
        "first = side.run.training.rows_before(settings.step - 1)",
        "commands/test_replay.py::test_the_largest_losses_are_those_of_the_step",
    ),
    fault(
        "layers: replicas count twice",
        "titan/training/layer_norms.py",
        "square = squares(part).sum() / holders(parameter, world)",
        "square = squares(part).sum()",
        "training/test_layer_metrics.py::test_the_numbers_are_those_of_one_device[ddp tied]",
    ),
    fault(
        "slow ranks: every rank reads the times of all",
        "titan/training/rank_times.py",
        "if measured is None or self.rank != 0:",
        "if measured is None:",
        "training/test_rank_times.py::test_the_slow_rank_is_named[ddp]",
    ),
    fault(
        "slow ranks: waiting for others is a rank's own time",
        "titan/training/rank_times.py",
        'own = figures["step_seconds"] - figures["wait_seconds"]',
        'own = figures["step_seconds"]',
        "training/test_rank_times.py::test_the_slow_rank_is_named[ddp]",
    ),
    fault(
        "profile: hidden communication is exposed",
        "titan/profile/breakdown.py",
        "parts[kind], left = _take(left, inside)",
        "parts[kind] = total(inside) / 1e6",
        "profile/test_breakdown.py::test_a_step_on_a_cpu",
    ),
    fault(
        "profile: recomputation counts as matmuls",
        "titan/profile/breakdown.py",
        "yield kinds.RECOMPUTATION if again else kind, one.start, one.end",
        "yield kind, one.start, one.end",
        "profile/test_breakdown.py::test_a_step_on_a_gpu",
    ),
    fault(
        "profile: what a forward pass releases is kept",
        "titan/profile/memory.py",
        "return ACTIVATIONS if block.end > one.end else TEMPORARY",
        "return ACTIVATIONS if block.end < one.end else TEMPORARY",
        "profile/test_memory.py",
    ),
)
