"""Faults of models with experts: routing, balancing, counting, grouped products, expert parallelism.

Their texts occur once in their files.
"""

from __future__ import annotations

from tests.support.fault import define_fault

MODEL, LOAD, LAYOUTS = "model/test_experts.py", "training/test_expert_load.py", "parallelism/test_experts.py"
GRADIENTS = f"{LAYOUTS}::test_gradients_of_each_expert_are_those_of_one_device"
EXPERTS, BALANCE = "titan/model/experts.py", "titan/model/balance.py"
NEIGHBOURS = "test_experts_are_divided_over_neighbours_within_a_replica_of_a_stage"
EXCHANGE, COUNTS = "titan/parallelism/expert.py", "titan/training/expert_load.py"

FAULTS = (
    define_fault(
        "experts: ties go to any expert",
        EXPERTS,
        "order = scores.sort(dim=-1, descending=True, stable=True).indices",
        "order = scores.shape[-1] - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices",
        f"{MODEL}::test_of_equal_scores_the_first_experts_are_chosen",
    ),
    define_fault(
        "experts: the router's gradient does not flow through weights",
        EXPERTS,
        "weights = scores.gather(-1, experts)",
        "weights = scores.detach().gather(-1, experts)",
        "model/test_parity.py::test_equals_hugging_face[qwen3-moe]",
    ),
    define_fault(
        "experts: weights are of all scores where they should be of the chosen",
        EXPERTS,
        "weights = weights / (weights.sum(-1, keepdim=True) + TINY)",
        "weights = weights / (scores.sum(-1, keepdim=True) + TINY)",
        "model/test_parity.py::test_equals_hugging_face[qwen3-moe]",
    ),
    define_fault(
        "experts: the bias weighs outputs",
        EXPERTS,
        "scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)",
        "scores = (logits.sigmoid() if self.sigmoid else logits.softmax(-1)) + (0 if self.bias is None else self.bias)",
        f"{MODEL}::test_a_bias_chooses_and_does_not_weigh",
    ),
    define_fault(
        "experts: groups are scored by their best expert",
        EXPERTS,
        ".values[..., :2].sum(-1)",
        ".values[..., :1].sum(-1)",
        f"{MODEL}::test_tokens_go_to_experts_of_their_groups",
    ),
    define_fault(
        "experts: results go back in the order of experts",
        EXPERTS,
        "compute_offsets(experts.flatten(), count)), invert_permutation(order)",
        "compute_offsets(experts.flatten(), count)), order",
        f"{MODEL}::test_a_token_does_not_depend_on_the_others",
    ),
    define_fault(
        "experts: a token's rows are another token's",
        EXPERTS,
        "return x[order[:rows] // ctx.copies]",
        "return x[order[:rows] % x.shape[0]]",
        f"{MODEL}::test_a_token_does_not_depend_on_the_others",
    ),
    define_fault(
        "experts: padding rows keep what was in memory",
        "titan/model/grouped.py",
        "return out.masked_fill_((rows >= offsets[-1])[:, None], 0)",
        "return out.masked_fill_((rows >= offsets[-1])[:, None], 1)",
        f"{MODEL}::test_products_and_gradients[padded-bf16]",
    ),
    define_fault(
        "experts: the gradient of a weight is another expert's",
        "titan/model/grouped.py",
        "torch.mm(grad[start:end].t(), x[start:end], out=out[expert])",
        "torch.mm(grad[start:end].t(), x[start:end], out=out[expert - 1])",
        f"{MODEL}::test_products_and_gradients[skewed-fp32]",
    ),
    define_fault(
        "balancing: sigmoid scores are not divided by their sum",
        BALANCE,
        "return scores / scores.sum(-1, keepdim=True)",
        "return scores",
        f"{MODEL}::test_losses_are_as_defined[sigmoid]",
    ),
    define_fault(
        "balancing: a row's load counts masked tokens",
        BALANCE,
        "ones = valid[..., None].expand_as(experts).flatten(1).long()",
        "ones = torch.ones_like(choices)",
        f"{MODEL}::test_losses_are_as_defined[softmax]",
    ),
    define_fault(
        "balancing: a row's load is that of the rank's part of it",
        BALANCE,
        "counts = self.rows.sum_counts(counts.scatter_add(1, choices, ones))",
        "counts = counts.scatter_add(1, choices, ones)",
        f"{GRADIENTS}[capacity-ep_cp]",
    ),
    define_fault(
        "balancing: first choices have no precedence",
        BALANCE,
        "_number_choices(rows.transpose(1, 2).flatten(1), self.experts).view(rows.transpose(1, 2).shape)",
        "_number_choices(rows.flatten(1), self.experts).view(rows.shape).transpose(1, 2)",
        f"{MODEL}::test_a_capacity_drops_later_tokens_and_choices",
    ),
    define_fault(
        "balancing: the limit is of the rank's part of a row",
        BALANCE,
        "rows = self.rows.gather_rows(experts)",
        "rows = self.rows.select_part(self.rows.gather_rows(experts)).repeat(1, 2, 1)",
        f"{GRADIENTS}[capacity-ep_cp]",
    ),
    define_fault(
        "balancing: rows are put together in the order of ranks",
        "titan/parallelism/row_parts.py",
        "return context_chunks.join_rows(rows, TOKEN_DIM - x.dim(), self.balance and self.context > 1)",
        "return context_chunks.join_rows(rows, TOKEN_DIM - x.dim(), False)",
        f"{GRADIENTS}[capacity-ep_cp]",
    ),
    define_fault(
        "balancing: the bias moves towards the load",
        COUNTS,
        "(mean - expert_counts).sign()",
        "(expert_counts - mean).sign()",
        f"{LOAD}::test_a_bias_moves_against_the_load",
    ),
    define_fault(
        "balancing: a bad step moves the bias",
        COUNTS,
        "keeps_load = skipped | (total == 0)",
        "keeps_load = total == 0",
        f"{LOAD}::test_a_bias_moves_against_the_load",
    ),
    define_fault(
        "balancing: the load is never updated",
        COUNTS,
        "torch.where(keeps_load, torch.stack(loads), expert_counts / total)",
        "torch.stack(loads)",
        f"{LOAD}::test_a_bias_moves_against_the_load",
    ),
    define_fault(
        "balancing: ranks update the load from their own counts",
        "titan/training/trainer.py",
        "load.update(metrics[-load.num_counts :], skipped)",
        "load.update(loss.double()[-load.num_counts :], skipped)",
        f"{GRADIENTS}[muon-ep_hsdp]",
    ),
    define_fault(
        "balancing: the state is not in checkpoints",
        "titan/checkpoint/state.py",
        '    tensors |= {f"{STATE}{name}": value for name, value in state.named_state()}\n',
        "",
        f"{LAYOUTS}::test_any_layout_resumes_with_experts_load_and_bias",
    ),
    define_fault(
        "balancing: the bias is not in checkpoints",
        "titan/training/train_step.py",
        "yield from ((name, weight) for name, weight in stage.model.named_weights() if name not in parameters)",
        "yield from ()",
        f"{LAYOUTS}::test_any_layout_resumes_with_experts_load_and_bias",
    ),
    define_fault(
        "counting: masked tokens count",
        BALANCE,
        "experts.where(valid[..., None], count).flatten()",
        "experts.flatten()",
        f"{LOAD}::test_tokens_are_counted_once_and_only_those_that_count",
    ),
    define_fault(
        "counting: every tensor rank counts the first one's tokens",
        "titan/training/train_step.py",
        "targets.chunk(self.sequence_parallel_size, 1)[self.tensor_rank % self.sequence_parallel_size]",
        "targets.chunk(self.sequence_parallel_size, 1)[0]",
        f"{GRADIENTS}[documents-ep_tp]",
    ),
    define_fault(
        "counting: only the first tensor rank counts",
        "titan/training/build.py",
        "num_block_sums=_count_block_sums(stages) if _has_split_rows(run) else 0",
        "num_block_sums=0",
        f"{GRADIENTS}[qwen3_moe-ep_in_tp-full-1]",
    ),
    define_fault(
        "counting: stages of a pipeline lose their counts",
        "titan/parallelism/pipeline/runtime.py",
        "            total[-self.block_figure_count :] += torch.stack(self.block_figures).sum(0)\n",
        "            pass\n",
        f"{GRADIENTS}[qwen3_moe-ep_zbv-none-2]",
    ),
    define_fault(
        "counting: dropped choices are no share",
        "titan/training/expert_load.py",
        '"expert_dropped": float(table[:, -1].sum() / table[:, :-1].sum()),',
        '"expert_dropped": float(table[:, -1].sum()),',
        f"{LOAD}::test_figures_of_the_load",
    ),
    define_fault(
        "expert parallelism: gradients go back unchanged by the exchange",
        "titan/parallelism/collectives.py",
        "all_to_all_single(grads[0].contiguous(), send_counts, receive_counts, group)",
        "all_to_all_single(2 * grads[0].contiguous(), send_counts, receive_counts, group)",
        f"{LAYOUTS}::test_the_exchange_computes_what_one_rank_does[even-fp32]",
    ),
    define_fault(
        "expert parallelism: received rows are sorted by rank",
        EXCHANGE,
        "return torch.searchsorted(ends, row_indices, right=True) % received_per_expert.shape[1]",
        "return torch.searchsorted(ends, row_indices, right=True) // received_per_expert.shape[1]",
        f"{LAYOUTS}::test_the_exchange_computes_what_one_rank_does[even-fp32]",
    ),
    define_fault(
        "expert parallelism: dropped choices are sent",
        EXCHANGE,
        "sent_per_expert = count_experts(experts, count).view(self.group.size(), -1)",
        "sent_per_expert = count_experts(experts.clamp(max=count - 1), count).view(self.group.size(), -1)",
        f"{LAYOUTS}::test_the_exchange_computes_what_one_rank_does[dropped-fp32]",
    ),
    define_fault(
        "expert parallelism: replicas of experts do not sum their gradients",
        EXCHANGE,
        'return world.experts["replicate", "shard"] if world.layout.replicate > 1 else world.experts["shard"]',
        'return world.experts["shard"]',
        f"{GRADIENTS}[muon-ep_hsdp]",
    ),
    define_fault(
        "expert parallelism: ranks share experts across stages",
        "titan/parallelism/mesh.py",
        'return _rebuild_mesh(world, {**sizes, "expert": layout.expert}, ("shard", "expert"))',
        'return _rebuild_mesh(world, {"expert": layout.expert, **sizes}, ("shard", "expert"))',
        f"parallelism/test_groups.py::{NEIGHBOURS}",
    ),
    define_fault(
        "expert parallelism: tensor ranks sum gradients of experts once more",
        "titan/parallelism/tensor.py",
        'if not isinstance(getattr(module, "weight", None), DTensor):',
        "if True:",
        f"{GRADIENTS}[qwen3_moe-ep_in_tp-full-1]",
    ),
    define_fault(
        "chunks: the first token of a chunk sees the one before",
        "titan/model/masks.py",
        "return positions[:1] // chunk",
        "return (positions[:1] - 1) // chunk",
        "model/test_parity.py::test_equals_hugging_face[llama4]",
    ),
    define_fault(
        "latent attention: heads have other positions than their keys",
        "titan/model/latent_attention.py",
        "rotated = rotate_neighbours(rotated[..., None, :], cos, sin)",
        "rotated = rotate_neighbours(rotated[..., None, :], cos.flip(1), sin.flip(1))",
        "model/test_parity.py::test_equals_hugging_face[deepseek-v3]",
    ),
    define_fault(
        "latent attention: each tensor rank keeps its part of the latents' gradients",
        "titan/model/deepseek_v3.py",
        '"attention.wkv_a": "heads",',
        '"attention.wkv_a": "sequence",',
        "parallelism/test_latent_attention.py",
    ),
    define_fault(
        "muon: experts share one matrix",
        "titan/optimizer/muon.py",
        "x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)",
        "x = x / torch.linalg.vector_norm(x).clamp(min=EPS)",
        f"{GRADIENTS}[muon-ep_hsdp]",
    ),
)
