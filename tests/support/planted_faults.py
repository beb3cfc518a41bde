"""The faults of `tests.support.planted`: where, what instead of what, and the tests that must find it.

Each is of a kind that a test was written for. Their texts are parts of lines, which occur once in their files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: what is wrong.
        file: a pattern of files below the repository's root.
        old, new: the text, and what stands in its place.
        tests: those that must find it, as pytest takes them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tuple(f"tests/{test}" for test in tests))


MODEL = (
    _fault(
        "initial weights: parts of a block drawn from its beginning",
        "titan/model/init_weights.py",
        "drawn = values[start - block * rows : stop - block * rows]",
        "drawn = values[: stop - start]",
        "model/test_init_weights.py::test_whole_is_the_union_of_any_boxes",
    ),
    _fault(
        "initial weights: the same columns on every rank",
        "titan/model/init_weights.py",
        "columns = tuple(slice(o, o + n) for",
        "columns = tuple(slice(0, n) for",
        "model/test_init_weights.py::test_whole_is_the_union_of_any_boxes",
    ),
    _fault(
        "initial weights: cut ones begin at the first row on every rank",
        "titan/model/init_weights.py",
        "    return tuple(offset)\n",
        "    return (0,) * len(offset)\n",
        "test_laws.py::test_law_1_a_seed_gives_the_same_start[fsdp2]",
    ),
    _fault(
        "initial weights: the seed does not matter",
        "titan/model/init_weights.py",
        'f"{seed}\\0{name}\\0{block}"',
        'f"{name}\\0{block}"',
        "model/test_init_weights.py::test_other_names_and_seeds_give_other_values",
    ),
    _fault(
        "loss: chunks overwrite the weight's gradient",
        "titan/model/loss.py",
        "into_weight += logits.T @ hidden",
        "into_weight.copy_(logits.T @ hidden)",
        "model/test_loss.py::test_bf16_differs_by_rounding_only",
    ),
    _fault(
        "loss: ignored targets have a gradient",
        "titan/model/loss.py",
        "logits.mul_((valid / sums)[:, None])",
        "logits.mul_((1 / sums)[:, None])",
        "model/test_loss.py::test_any_chunk_gives_the_loss_and_gradients_of_all_logits",
    ),
    _fault(
        "sampling: one token too few reaches top_p",
        "titan/model/sampling.py",
        "kept = before < top_p",
        "kept = before + shares < top_p",
        "model/test_sampling.py::test_top_p_keeps_the_smallest_set_that_reaches_it",
    ),
    _fault(
        "sampling: tokens without a text are drawn",
        "titan/model/sampling.py",
        "logits = logits[:, :vocab].double()",
        "logits = logits.double()",
        "model/test_sampling.py::test_ids_above_the_vocabulary_are_never_drawn",
    ),
)
DATA = (
    _fault(
        "data order: all epochs alike",
        "titan/dataset/permutation.py",
        "return _keyed(seed, epoch)",
        "return _keyed(seed, epoch * np.uint64(0))",
        "dataset/test_permutation.py::test_epochs_and_seeds_differ",
    ),
    _fault(
        "data order: other rounds, so another order than before",
        "titan/dataset/permutation.py",
        "ROUNDS = 8",
        "ROUNDS = 7",
        "dataset/test_permutation.py::test_the_order_is_the_one_of_this_version",
    ),
    _fault(
        "data order: ranks skip a row",
        "titan/parallelism/data_shard.py",
        "(self.rank + 1) * slots))",
        "(self.rank + 1) * slots - 1))",
        "dataset/test_loader.py::test_every_row_once_in_order_under_any_layout",
    ),
    _fault(
        "data order: a resume begins a row late",
        "titan/dataset/loader.py",
        "dtype=np.int64) + self._training.rows_before(step)",
        "dtype=np.int64) + self._training.rows_before(step) + (self._step > 1)",
        "test_laws.py::test_law_2_holds_across_a_resume_with_another_number_of_ranks",
    ),
    _fault(
        "data: the target is the token itself",
        "titan/dataset/loader.py",
        "into[TOKENS], into[TARGETS] = stored[:-1], stored[1:]",
        "into[TOKENS], into[TARGETS] = stored[:-1], stored[:-1]",
        "test_laws.py::test_the_gradients_are_those_of_the_mean_loss_of_a_token",
    ),
    _fault(
        "data: rows that fill a rank up are trained",
        "titan/dataset/loader.py",
        "        fields[TARGETS] = IGNORED\n",
        "",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[fsdp4-a-rank-without-rows]",
    ),
    _fault(
        "data: the hash of a step does not depend on the order",
        "titan/dataset/loader.py",
        'blake2b(number.to_bytes(8, "little"), digest_size=8)',
        "blake2b(digest_size=8)",
        "dataset/test_loader.py::test_the_hash_depends_on_place_and_content",
    ),
    _fault(
        "mixture: rows after a skipped range move by one less",
        "titan/dataset/mixture.py",
        "+= last - first + 1",
        "+= last - first",
        "dataset/test_mixture.py::test_skipped_rows_are_left_out_and_all_others_read",
    ),
    _fault(
        "mixture: all sources are read as the first",
        "titan/dataset/mixture.py",
        "rows[mine] = self.sources[k].at(index[mine], wait)",
        "rows[mine] = self.sources[0].at(index[mine], wait)",
        "dataset/test_mixture.py::test_each_source_is_read_in_its_order_without_a_gap",
    ),
    _fault(
        "preparation: what a killed one left is taken for done",
        "titan/dataset/preprocess/prepare.py",
        "if not complete and read_receipt(self.folder, unit) is None:",
        "if not complete:",
        "dataset/test_prepare.py::test_what_is_damaged_is_made_again",
    ),
)
TRAINING = (
    _fault(
        "loss scaling: the mean of ranks, not of tokens",
        "titan/training/trainer.py",
        "self.train_step.backward(self._rows(batch), 1 / tokens)",
        "self.train_step.backward(self._rows(batch), self.world.rank_info.world_size / tokens)",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[ddp2]",
    ),
    _fault(
        "loss scaling: targets that do not count are counted",
        "titan/training/trainer.py",
        "grad_norm.scale(gradients, (tokens / figures[VALID].clamp(min=1)).float())",
        "pass",
        "training/test_reading.py::test_documents_are_trained_as_if_each_were_alone",
    ),
    _fault(
        "learning rate: one step ahead",
        "titan/training/trainer.py",
        "lr_factor(self.run.training, self.step)",
        "lr_factor(self.run.training, self.step + 1)",
        "test_laws.py::test_an_update_uses_the_rate_of_its_own_step",
    ),
    _fault(
        "learning rate: groups have that of the optimizer",
        "titan/training/trainer.py",
        'lr * group.get("factor", 1.0)',
        "lr",
        "optimizer/test_optimizer_layouts.py::test_groups_have_their_own_rate_and_metrics_the_optimizers",
    ),
    _fault(
        "bad steps: a gradient that is not finite is applied",
        "titan/training/trainer.py",
        "~torch.isfinite(figures[LOSS] + size)",
        "~torch.isfinite(figures[LOSS])",
        "training/test_trainer.py::test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fault(
        "bad steps: they need not be in a row",
        "titan/training/trainer.py",
        "            self.bad = 0\n            return\n",
        "            return\n",
        "training/test_trainer.py::test_bad_steps_in_a_row_end_the_run",
    ),
    _fault(
        "accumulation: each micro-batch alone",
        "titan/training/train_step.py",
        "(loss * scale).backward()",
        "(loss * scale / count).backward()",
        "training/test_build.py::test_microbatches_add_up",
    ),
    _fault(
        "accumulation: replicas sum after each micro-batch",
        "titan/parallelism/data.py",
        "isinstance(module, DistributedDataParallel) and not last",
        "isinstance(module, DistributedDataParallel) and last",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[ddp2-microbatches2]",
    ),
    _fault(
        "resume: the optimizer's state is not loaded",
        "titan/checkpoint/restore.py",
        "lambda: load(state, storage_reader",
        'lambda: load({n: t for n, t in state.items() if n.startswith("model.")}, storage_reader',
        "checkpoint/test_manager.py::test_a_resumed_run_equals_an_uninterrupted_one",
    ),
    _fault(
        "stop: a signal of one rank is not heard by the others",
        "titan/training/trainer.py",
        "self.stopping = self.stopping or figures[STOP] > 0",
        "self.stopping = self.stopping or self.stop.asked",
        "launchers/test_start.py::test_a_signal_stops_saves_and_the_same_command_goes_on",
        "training/test_trainer.py::test_a_first_stop_ends_the_life_and_the_next_one_finishes",
    ),
    _fault(
        "metrics: the loss is the sum",
        "titan/training/trainer.py",
        "loss = figures[LOSS] / max(1, figures[VALID])",
        "loss = figures[LOSS]",
        "test_laws.py::test_the_gradients_are_those_of_the_mean_loss_of_a_token",
    ),
    _fault(
        "metrics: a rate of all devices as that of one",
        "titan/metrics/recorder.py",
        '"tokens_per_second_per_device": rate / self.devices',
        '"tokens_per_second_per_device": rate',
        "metrics/test_recorder.py::test_speed_is_what_a_step_did_over_its_time",
    ),
    _fault(
        "metrics: lines that could not be written are lost",
        "titan/metrics/recorder.py",
        "self.kept = self.kept[out.write(self.kept) :]",
        'self.kept, _ = b"", out.write(self.kept[:1])',
        "checkpoint/test_saving.py::TestFailedSaves::test_metrics_that_can_not_be_written_are_written_later",
        "metrics/test_recorder.py::test_every_line_has_every_key[single]",
    ),
    _fault(
        "schedule: the decay ends a step late",
        "titan/training/lr_schedule.py",
        "(step - 1 - start) / (training.steps - start)",
        "(step - 1 - start) / (training.steps + 1 - start)",
        "training/test_training_schema.py",
    ),
    _fault(
        "optimizer: moments are not rounded once but kept",
        "titan/optimizer/mixed_precision.py",
        "torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])",
        "pass",
        "optimizer/test_optimizer.py::test_what_is_not_fp32_is_rounded_once",
    ),
    _fault(
        "optimizer: a skipped step counts",
        "titan/optimizer/mixed_precision.py",
        "torch._foreach_sub_(steps, [self._bad] * len(steps))",
        "pass",
        "optimizer/test_optimizer.py::test_a_bad_step_changes_nothing_and_needs_no_host",
    ),
    _fault(
        "optimizer: muon's momentum takes a bad step",
        "titan/optimizer/muon.py",
        "held.copy_(momentum if self._bad is None else torch.where(self._bad > 0, held.float(), momentum))",
        "held.copy_(momentum)",
        "optimizer/test_optimizer_layouts.py::test_a_bad_step_leaves_all_as_it_was",
        "optimizer/test_optimizer.py::test_a_bad_step_changes_nothing_and_needs_no_host",
    ),
)
PARALLELISM = (
    _fault(
        "gradient norm: squares of parts are not summed over ranks",
        "titan/parallelism/grad_norm.py",
        "dist.all_reduce(square, group=cut[0].get_group(dimension))",
        "pass",
        "parallelism/test_grad_norm.py::test_cut_tensors_have_the_norm_of_the_whole",
    ),
    _fault(
        "gradient norm: that of other stages is left out",
        "titan/parallelism/grad_norm.py",
        "dist.all_reduce(total, group=pipeline)",
        "pass",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[fsdp-tp-pp]",
    ),
    _fault(
        "gradient norm: small ones are scaled up",
        "titan/parallelism/grad_norm.py",
        "torch.clamp(largest / (norm + 1e-6), max=1.0)",
        "largest / (norm + 1e-6)",
        "parallelism/test_grad_norm.py::test_plain_tensors_as_torch",
    ),
    _fault(
        "fsdp: gradients are averaged",
        "titan/parallelism/data.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[fsdp2]",
    ),
    _fault(
        "hsdp: replicas are not summed",
        "titan/parallelism/data.py",
        "module.set_requires_all_reduce(last)\n        module.set_is_last_backward",
        "module.set_requires_all_reduce(False)\n        module.set_is_last_backward",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[hsdp4]",
    ),
    _fault(
        "ddp: gradients are not summed",
        "titan/parallelism/data.py",
        "    module.register_comm_hook(mesh.get_group(), _sum)\n",
        "",
        "test_laws.py::test_law_3_one_device_and_many_learn_the_same[ddp2]",
    ),
    _fault(
        "tp: a row-wise product is not summed",
        "titan/parallelism/tensor.py",
        "return collectives.total(out, self.group)",
        "return out",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[tp-whole-sequence]",
    ),
    _fault(
        "tp: gradients of shared weights are not summed",
        "titan/parallelism/tensor.py",
        "return weight.to_local(grad_placements=[Partial()]).to(dtype)",
        "return weight.to_local().to(dtype)",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[tp]",
    ),
    _fault(
        "tp: tokens of another rank's vocabulary look up its first row",
        "titan/parallelism/tensor.py",
        ".masked_fill(elsewhere[..., None], 0)",
        "",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[tp]",
    ),
    _fault(
        "cp: chunks are dealt in order though they should be balanced",
        "titan/parallelism/context.py",
        "(rank, 2 * size - 1 - rank) if balance",
        "(2 * rank, 2 * rank + 1) if balance",
        "parallelism/test_context.py::test_places_in_local_order",
    ),
    _fault(
        "cp: the gradient of earlier keys is lost",
        "titan/parallelism/context.py",
        "dq.float() + past[0], *past[1:]",
        "dq.float(), *past[1:]",
        "parallelism/test_context.py::test_as_on_one_rank",
    ),
    _fault(
        "cp: key heads are repeated in turn",
        "titan/parallelism/context.py",
        "k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)",
        "k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)",
        "parallelism/test_context.py::test_as_on_one_rank",
    ),
    _fault(
        "pp: stages scale the gradient by the number of micro-batches",
        "titan/parallelism/pipeline/runtime.py",
        '"scale_grads": False',
        '"scale_grads": True',
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[pp-tied]",
    ),
    _fault(
        "pp: a tied weight's two gradients are not summed",
        "titan/parallelism/pipeline/runtime.py",
        "mine.add_(self._exchange(mine.to(self.device)).to(mine.device))",
        "self._exchange(mine.to(self.device))",
        "parallelism/test_matrix.py::test_a_layout_learns_what_one_device_learns[pp-tied]",
    ),
    _fault(
        "pp: two ranks meet twice in a round",
        "titan/parallelism/pipeline/runtime.py",
        "if not {low, high} & {rank for pair in one for rank in pair}",
        "if (low, high) not in one",
        "parallelism/test_groups.py::test_neighbours_meet_in_few_rounds",
    ),
    _fault(
        "precision: a norm is summed in the gradients' type",
        "titan/parallelism/grad_norm.py",
        "torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32)",
        "torch.linalg.vector_norm(part, dim=-1)",
        "parallelism/test_grad_norm.py::test_gradients_in_bf16_are_summed_in_fp32",
    ),
    _fault(
        "precision: ranks sum gradients in the compute type",
        "titan/parallelism/data.py",
        "MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32,",
        "MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute,",
        "test_laws.py::test_bitwise_the_same[fsdp2-is-ddp2-in-bf16]",
        "test_laws.py::test_bitwise_the_same[two-ranks-are-two-microbatches-in-bf16]",
    ),
)
CHECKPOINTS = (
    _fault(
        "manifest: sizes are not compared",
        "titan/checkpoint/manifest.py",
        "if size != file.bytes:",
        "if False:",
        "checkpoint/test_manifest.py::test_a_damaged_checkpoint_is_named_and_does_not_count",
    ),
    _fault(
        "manifest: of another step it counts",
        "titan/checkpoint/manifest.py",
        'and folder.name != f"step-{manifest.step}":',
        "and False:",
        "checkpoint/test_manifest.py::test_a_damaged_checkpoint_is_named_and_does_not_count",
    ),
    _fault(
        "manifest: it may name files outside of its folder",
        "titan/files/untrusted.py",
        'if any(c in "/\\\\" or ord(c) < 32 for c in name)',
        "if any(ord(c) < 32 for c in name)",
        "checkpoint/test_corruption.py::test_a_damage_is_named_and_costs_no_more_than_it_must",
    ),
    _fault(
        "checksums: not compared",
        "titan/checkpoint/manifest.py",
        "if found != file:",
        "if found.bytes != file.bytes:",
        "checkpoint/test_manifest.py::test_a_flipped_bit_is_found_by_the_checksum_alone",
    ),
    _fault(
        "checksums: those of one rank's files only",
        "titan/checkpoint/restore.py",
        "manifest.verify(folder, mine)",
        "manifest.verify(folder, mine if coordinator.rank else {})",
        "checkpoint/test_saving.py::TestDamage::test_a_flipped_bit_is_named_and_the_checkpoint_before_it_is_used",
    ),
    _fault(
        "retention: the first of a stretch is not kept",
        "titan/checkpoint/retention.py",
        "if tokens // keep_tokens > last:",
        "if False:",
        "checkpoint/test_manifest.py::TestRetention::test_the_last_ones_stay_and_the_first_of_each_stretch",
    ),
    _fault(
        "retention: no grace",
        "titan/checkpoint/retention.py",
        ".st_mtime >= grace:",
        ".st_mtime >= 0:",
        "checkpoint/test_manifest.py::TestRetention"
        "::test_what_goes_ceases_to_count_first_and_its_files_go_after_the_grace",
    ),
    _fault(
        "retention: one more stays",
        "titan/checkpoint/retention.py",
        "in checkpoints[-keep:]}",
        "in checkpoints[-keep - 1 :]}",
        "checkpoint/test_manager.py::test_when_checkpoints_are_saved_and_which_are_kept",
    ),
    _fault(
        "unpickler: any name may be named",
        "titan/checkpoint/safe_pickle.py",
        "known: Container[Name]) -> Any:",
        "known: Container[Name], _: object = None) -> Any:\n    return pickle.loads(content)",
        "checkpoint/test_safe_pickle.py",
        "checkpoint/test_corruption.py::test_a_damage_is_named_and_costs_no_more_than_it_must"
        "[metadata-run-a-shell-unverified]",
    ),
    _fault(
        "remote copies: another run's are overwritten",
        "titan/checkpoint/remote.py",
        'if index.get("run_id") not in (None, about.run_id):',
        "if False:",
        "checkpoint/test_later_attempts.py",
    ),
    _fault(
        "remote copies: they do not count",
        "titan/checkpoint/remote.py",
        "| {about.step: about.tokens}",
        "",
        "checkpoint/test_remote.py::test_what_is_copied_counts_and_comes_back[file]",
    ),
    _fault(
        "resume: of another run's checkpoint in the directory",
        "titan/checkpoint/select.py",
        "if about and run_id and about.run_id != run_id:",
        "if False:",
        "checkpoint/test_corruption.py::test_a_damage_is_named_and_costs_no_more_than_it_must[checkpoint-of-another-run]",
    ),
    _fault(
        "resume: from the first checkpoint",
        "titan/checkpoint/select.py",
        "last = Candidate(str(folder), about) if about else last",
        "last = last or (Candidate(str(folder), about) if about else None)",
        "run/test_attempts.py::test_resume_from_the_last_checkpoint",
    ),
    _fault(
        "resume: a fork with another optimizer",
        "titan/checkpoint/restore.py",
        "        raise ConfigError(words)\n",
        "        pass\n",
        "checkpoint/test_manager.py::test_a_fork_with_another_optimizer_is_refused",
    ),
    _fault(
        "saves: one that failed is not tried again",
        "titan/training/checkpointing.py",
        "self.begun_step, self.retry_at = self.saved_step, time.monotonic() + self.delay",
        "pass",
        "checkpoint/test_saving.py::TestFailedSaves::test_the_run_goes_on_and_saves_when_it_can_again",
    ),
    _fault(
        "saves: the last one may fail",
        "titan/training/checkpointing.py",
        "        if self.saved_step != step:\n            raise RunError(",
        "        if False:\n            raise RunError(",
        "checkpoint/test_saving.py::TestFailedSaves::test_the_last_save_has_to_succeed",
    ),
)
RUNS = (
    _fault(
        "ids: the seed is in the group's",
        "titan/run/identity.py",
        'if k != "training.seed"}',
        "}",
        "run/test_identity.py::test_group_is_the_same_for_all_seeds",
    ),
    _fault(
        "ids: defaults count",
        "titan/run/identity.py",
        "== science and setting != field.default:",
        "== science:",
        "run/test_identity.py::test_a_new_field_with_its_old_meaning_changes_no_id",
    ),
    _fault(
        "ids: secrets are in them",
        "titan/run/identity.py",
        "= redacted(plain(setting))",
        "= plain(setting)",
        "console/test_text.py::test_another_password_goes_on_with_the_same_run",
    ),
    _fault(
        "ids: another format of the digest",
        "titan/run/identity.py",
        'separators=(",", ":")',
        'separators=(", ", ":")',
        "run/test_identity.py::test_digest_has_not_changed_its_meaning",
        "config/test_kinds.py::test_ids_are_what_they_were",
    ),
    _fault(
        "config: more micro-batches than rows",
        "titan/run/checks.py",
        "if run.microbatches > run.rank_rows:",
        "if False:",
        "test_refusals.py",
    ),
    _fault(
        "config: a job that needs more memory than there is",
        "titan/run/checks.py",
        "    fit.check(run, run.layout, run.machine, run.microbatches)\n",
        "",
        "test_refusals.py",
        "estimate/test_fit.py",
    ),
    _fault(
        "secrets: passwords in URLs",
        "titan/console/text.py",
        'url = _ODD_PASSWORD.sub(rf"\\g<1>{MARK}@", _USER.sub(rf"\\g<1>{MARK}@", url))',
        "pass",
        "console/test_text.py::test_secrets_are_redacted",
    ),
    _fault(
        "secrets: control characters reach the terminal",
        "titan/console/text.py",
        "    return escape(redact(text))\n",
        "    return redact(text)\n",
        "console/test_text.py",
    ),
    _fault(
        "locks: two jobs in one directory",
        "titan/files/locks.py",
        "fcntl.LOCK_EX | (0",
        "fcntl.LOCK_SH | (0",
        "test_refusals.py::test_directory_in_use",
    ),
    _fault(
        "locks: a link is followed",
        "titan/files/locks.py",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW",
        "os.O_RDWR | os.O_CREAT",
        "run/test_attempts.py::test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays",
    ),
)
ESTIMATES = (
    _fault(
        "estimate: the optimizer's state is not cut",
        "titan/estimate/memory.py",
        ") / self.parts  # fmt: skip",
        ")  # fmt: skip",
        "estimate/test_fit.py::test_state_is_12_bytes_a_parameter_and_is_cut_by_sharding",
    ),
    _fault(
        "estimate: gathered weights are forgotten",
        "titan/estimate/memory.py",
        "return blocks * self.gathered + ends",
        "return ends",
        "estimate/test_memory.py::test_the_estimate_is_the_traced_peak",
    ),
    _fault(
        "estimate: micro-batches in flight are one",
        "titan/estimate/memory.py",
        "(count * self.kept(self.stages[number]) for number, count in state.flight)",
        "(self.kept(self.stages[number]) for number, _ in state.flight)",
        "estimate/test_memory.py::test_the_estimate_is_the_traced_peak",
    ),
    _fault(
        "estimate: what is computed again takes no time",
        "titan/estimate/roofline.py",
        "(6 + again) * product.inputs",
        "6 * product.inputs",
        "estimate/test_roofline.py",
    ),
    _fault(
        "compare: the standard deviation of all, not of a sample",
        "titan/report/statistics.py",
        "values.std(ddof=1)",
        "values.std()",
        "report/test_statistics.py::test_a_paired_interval_and_its_p_are_those_of_students_test",
    ),
    _fault(
        "compare: Holm's correction is Bonferroni's of the last",
        "titan/report/statistics.py",
        "min(1.0, (len(order) - rank) * p)",
        "min(1.0, p)",
        "report/test_statistics.py::test_holm_is_what_its_definition_says",
    ),
    _fault(
        "compare: equivalence by a two-sided test",
        "titan/report/statistics.py",
        "room = margin - abs(self.estimate)",
        "room = margin + abs(self.estimate)",
        "report/test_statistics.py::test_equivalence_is_the_larger_of_two_one_sided_tests_and_the_90_percent_interval",
    ),
    _fault(
        "compare: runs that did not reach the target leave the median",
        "titan/report/statistics.py",
        "staying *= 1 - events / left",
        "staying *= 1 - events / max(1, sum(reached))",
        "report/test_statistics.py::test_a_median_time_is_kaplan_and_meiers",
    ),
    _fault(
        "compare: diverged seeds do not count",
        "titan/report/ranking.py",
        "return share(arm), found",
        "return 0.0, found",
        "report/test_outcomes.py",
    ),
)
LAUNCHERS = (
    _fault(
        "launcher: a signal does not reach the ranks",
        "launchers/supervisor.py",
        "        ranks.send(signal.SIGTERM)\n",
        "",
        "launchers/test_supervisor.py::test_a_signal_is_handed_on_to_all_ranks",
    ),
    _fault(
        "launcher: a second signal does not kill",
        "launchers/supervisor.py",
        "and ranks.signals < 2:",
        "and ranks.signals < 9:",
        "launchers/test_supervisor.py::test_a_second_signal_kills_ranks_that_stay",
    ),
    _fault(
        "launcher: the last error is reported as the cause",
        "launchers/supervisor.py",
        "    error = errors[0]\n",
        "    error = errors[-1]\n",
        "launchers/test_supervisor.py::test_the_cause_is_said_once",
    ),
    _fault(
        "launcher: a failed rank leaves the others running",
        "launchers/supervisor.py",
        "while ranks.alive() and not ranks.failed() and",
        "while ranks.alive() and",
        "launchers/test_supervisor.py::test_the_cause_is_said_once",
    ),
    _fault(
        "slurm: a job told to end is not requeued",
        "launchers/slurm/script.py",
        "scontrol requeue",
        "scontrol show job",
        "launchers/test_slurm_script.py",
    ),
    _fault(
        "slurm: the limit of requeues does not hold",
        "launchers/slurm/script.py",
        '[ "${SLURM_RESTART_COUNT:-0}" -ge $((requeues + restarted)) ]',
        "false",
        "launchers/test_slurm_script.py::test_how_a_job_s_end_is_judged",
    ),
    _fault(
        "slurm: a job that fails without getting on is restarted for ever",
        "launchers/slurm/script.py",
        'if [ "$restarted" -ge "$restarts" ]; then',
        "if false; then",
        "launchers/test_slurm_script.py",
    ),
    _fault(
        "sweep: a killed rank's error comes after those that followed from it",
        "titan/sweep/job_exit.py",
        'key=lambda e: (bool(e.get("lost")), not e.get("killed"), float(e["time"]))',
        'key=lambda e: float(e["time"])',
        "sweep/test_ledger.py",
    ),
    _fault(
        "generation: a query sees the token after its own",
        "titan/generation/cache.py",
        "<= positions[..., None])[:, None]",
        "<= positions[..., None] + 1)[:, None]",
        "generation/test_decode.py::test_logits_at_each_position_are_those_without_a_cache",
    ),
    _fault(
        "generation: rows that ended stay in the cache",
        "titan/generation/decode.py",
        "                    cache.select(going)\n",
        "                    pass\n",
        "generation/test_decode.py",
    ),
    _fault(
        "generation: a text begins to be shown that may be a stop text",
        "titan/generation/text.py",
        "return text[:-size], text[-size:]",
        'return text, ""',
        "generation/test_text.py::test_a_text_ends_before_the_first_stop_text",
    ),
    _fault(
        "generation: half a character is shown",
        "titan/generation/text.py",
        "or (text.endswith(_UNFINISHED) and not last)",
        "",
        "generation/test_text.py::test_a_character_comes_when_it_is_complete",
    ),
    _fault(
        "weights: a file of an index outside of its folder is read",
        "titan/weights/hf.py",
        "if Path(name).name != name or not",
        "if not",
        "weights/test_hf.py",
        "weights/test_loading.py",
    ),
)
FAULTS = (*MODEL, *DATA, *TRAINING, *PARALLELISM, *CHECKPOINTS, *RUNS, *ESTIMATES, *LAUNCHERS)
