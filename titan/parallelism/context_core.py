"""Context parallelism of attention of one's own, by what its class states (`titan.model.core`).

A `KeyValueCore` gets the keys and values of whole rows, gathered from all ranks. A `RecurrentCore` computes a rank's
chunks of a row one after another, in the order of the row: it gets the state of earlier tokens from the rank that has
the chunk before, and sends its own to the rank that has the next one. The gradients of states take the way back.

Shapes: B rows, H query and K key heads of width d, t tokens here, T = t * size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.model.core import KeyValueCore, RecurrentCore, State, iterate_cores
from titan.model.masks import CoreInputs, DocumentTokens
from titan.parallelism import context_chunks
from titan.parallelism.collectives import all_gather, all_gather_autograd


@dataclass(frozen=True)
class Chain:
    """The order in which ranks compute the chunks of a row.

    Attributes:
        group: the ranks that have a row's parts.
        balance: see `titan.parallelism.context_chunks`.
    """

    group: dist.ProcessGroup
    balance: bool

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks, in the order of the row."""
        return context_chunks.list_chunks(self.group.size(), self.group.rank(), self.balance)

    def find_owner(self, chunk: int) -> int | None:
        """Return the rank that has a chunk, None where the row has no such chunk."""
        size = self.group.size()
        if not 0 <= chunk < (2 * size if self.balance else size):
            return None
        return chunk if chunk < size else 2 * size - 1 - chunk

    def send(self, state: Sequence[Tensor], chunk: int, owned: dict[int, State]) -> None:
        """Send a state, or its gradient, to the rank that has a chunk; keep it in `owned` if that is this one."""
        owner = self.find_owner(chunk)
        if owner == self.group.rank():
            owned[chunk] = tuple(state)
        elif owner is not None:
            for part in state:
                dist.send(part.contiguous(), group=self.group, group_dst=owner)

    def receive(self, like: State, sender: int, chunk: int, owned: dict[int, State]) -> State:
        """Return what the rank that has the chunk `sender` sent for `chunk`; where there is none, `like`."""
        owner = self.find_owner(sender)
        if owner is None:
            return like
        if owner == self.group.rank():
            return owned.pop(chunk)
        state = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in like)
        for part in state:
            dist.recv(part, group=self.group, group_src=owner)
        return state


def gather_keys(chain: Chain, core: KeyValueCore, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
    """Return the attention of this rank's queries to the keys of whole rows."""
    kv = context_chunks.join_rows(all_gather_autograd(torch.stack((k, v))[None], 0, chain.group), -2, chain.balance)
    k, v = kv.unbind()
    out: Tensor = core.attend(q, k, v, tokens)
    return out


def gather_tokens(chain: Chain, queries: DocumentTokens) -> DocumentTokens:
    """Return the tokens of whole rows, from those of this rank's."""
    return DocumentTokens(
        *(context_chunks.join_rows(all_gather(x[None], 0, chain.group), -1, chain.balance) for x in queries)
    )


class _HandOn(torch.autograd.Function):
    """Computes this rank's chunks with the states that arrive; the backward pass computes them again."""

    @staticmethod
    def forward(ctx: Any, core: RecurrentCore, chain: Chain, tokens: CoreInputs, *inputs: Tensor) -> Tensor:
        q, k, v = inputs[:3]
        owned: dict[int, State] = {}
        outputs: list[Tensor] = []
        states: list[Tensor] = []
        for index, chunk in enumerate(chain.chunks):
            queries, keys, values = (x.chunk(len(chain.chunks), 2)[index] for x in (q, k, v))
            state = chain.receive(core.init_state(queries, keys, values), chunk - 1, chunk, owned)
            state = _drop_ended(state, tokens, chunk, chain)
            chunk_tokens = _select_tokens(tokens, index, len(chain.chunks))
            out, next_state = core.attend(queries, keys, values, chunk_tokens, state)
            chain.send(next_state, chunk + 1, owned)
            outputs.append(out)
            states.extend(state)
        ctx.core, ctx.chain, ctx.tokens = core, chain, tokens
        ctx.save_for_backward(q, k, v, *states)
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        core, chain, tokens = ctx.core, ctx.chain, ctx.tokens
        q, k, v, *states = ctx.saved_tensors
        count, width = len(chain.chunks), len(states) // len(chain.chunks)
        parameters = [p for p in core.parameters() if p.requires_grad]
        owned: dict[int, State] = {}
        head_grads: list[Sequence[Tensor]] = []
        sums = [torch.zeros_like(p) for p in parameters]
        for index, chunk in reversed(list(enumerate(chain.chunks))):
            heads = [x.chunk(count, 2)[index] for x in (q, k, v)]
            state = states[index * width : (index + 1) * width]
            heads, state = ([x.detach().requires_grad_() for x in part] for part in (heads, state))
            with torch.enable_grad():
                out, next_state = core.attend(*heads, _select_tokens(tokens, index, count), tuple(state))
            no_grads = tuple(torch.zeros_like(x) for x in next_state)
            next_grads = chain.receive(no_grads, chunk + 1, chunk, owned)
            results = torch.autograd.grad(
                (out, *next_state), (*heads, *state, *parameters), (grads[0].chunk(count, 2)[index], *next_grads),
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
            state_grads = _drop_ended(results[3 : 3 + width], tokens, chunk, chain)
            chain.send(state_grads, chunk - 1, owned)
            head_grads.insert(0, results[:3])
            sums = [total + grad for total, grad in zip(sums, results[3 + width :], strict=True)]
        joined = [torch.cat(parts, 2) for parts in zip(*head_grads, strict=True)]
        return None, None, None, *joined, *sums


def _select_tokens(tokens: CoreInputs, index: int, count: int) -> CoreInputs:
    """Return the tokens of one of this rank's chunks, of queries and keys alike."""
    chunk = DocumentTokens(*(x.chunk(count, -1)[index] for x in tokens.queries))
    return CoreInputs(None, chunk, chunk)


def _drop_ended(state: Sequence[Tensor], tokens: CoreInputs, chunk: int, chain: Chain) -> State:
    """Set the state of rows to zero whose document ended with the chunk before."""
    ids = tokens.keys.document_ids
    first = chunk * (ids.shape[-1] // (chain.group.size() * len(chain.chunks)))
    if first == 0:
        return tuple(state)
    continues = ids[:, first] == ids[:, first - 1]
    return tuple(torch.where(continues.view(-1, *[1] * (part.dim() - 1)), part, 0) for part in state)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def hand_on_state(chain: Chain, core: RecurrentCore, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
    """Return the attention of this rank's tokens to them and all earlier ones of their rows."""
    parameters = [p for p in core.parameters() if p.requires_grad]
    out: Tensor = _HandOn.apply(core, chain, tokens, q, k, v, *parameters)  # type: ignore[no-untyped-call]
    return out


def split_cores(model: Any, block: nn.Module, group: dist.ProcessGroup, balance: bool) -> int:
    """Let a block's own cores attend to whole rows of which each rank has a part; return how many there are.

    Raises:
        ValueError: when a core needs whole rows.
    """
    chain = Chain(group, balance)
    cores = list(iterate_cores(block))
    for core in cores:
        if isinstance(core, KeyValueCore):
            core.compute = partial(gather_keys, chain)
        elif isinstance(core, RecurrentCore):
            core.compute = partial(hand_on_state, chain)
        else:
            raise ValueError(f"{type(core).__name__} needs whole rows, and a rank has a part of them")
    if cores:
        model.find_keys = partial(gather_tokens, chain)
    return len(cores)
