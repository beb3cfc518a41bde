"""Counts of the transformer: matmuls, parameters, FLOPs and activation memory. Free of torch.

Linear layers compute different shares of a row's tokens: those of a stream the text's or the image's, modulations one
vector of the row. Activation memory is a sum over the tensors that autograd saves, as in `titan.model.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from titan.model.activations import NO_CONTEXT, BlockActivations, ContextBytes, HeadActivations, RankBatch
from titan.model.built_counts import BuiltCounts
from titan.model.counts import DecoderCounts, Matmul

FREQUENCIES = 256
"""Width of an embedded timestep or guidance."""
NORM_BYTES = 8
"""Bytes per token that autograd saves of a layer normalisation beside its input: mean and deviation."""


@dataclass(frozen=True)
class Shares:
    """Shares of a row's tokens: of the text, of the image, and of one vector of the row."""

    text: float
    image: float
    row: float


class PartMatmul(Matmul):
    """A matmul of some of a row's tokens.

    Attributes:
        share: of the tokens.
        is_whole: whether each tensor rank has all of its weight.
    """

    share: float = 1.0
    is_whole: bool = False

    @classmethod
    def build(cls, inputs: int, outputs: int, share: float, rowwise: bool = False, is_whole: bool = False) -> Matmul:
        """Return a matmul of a share of the tokens."""
        matmul = cls(inputs, outputs, rowwise)
        matmul.share, matmul.is_whole = share, is_whole
        return matmul

    def split(self, tensor: int) -> Matmul:
        """Return the matmul of one of `tensor` ranks."""
        return self if self.is_whole else super().split(tensor)

    def compute_token_share(self, sequence: int) -> float:
        """Return the share of a row's tokens that it computes."""
        return self.share


class Widths(NamedTuple):
    """Elements per token that a block saves, by what they are as wide as: D, queries, F."""

    dim: float
    queries: float
    ffn: float


SAVED = {
    (True, False): Widths(8, 5, 2), (True, True): Widths(6, 5, 2),
    (False, False): Widths(4, 4, 2), (False, True): Widths(3, 4, 2),
}  # fmt: skip
"""What blocks save without checkpointing, beside norms of queries and keys: with two streams or one, compiled or not.

D: the input, and of each stream the normalised and the modulated input of attention and of the feed-forward layer, the
stream between them, and both layers' outputs, which the gates' gradients need; a compiler computes normalised inputs
again. Queries: queries, keys, values and the output, which two streams copy their parts of. F: the input of GELU and
its output.
"""


class FluxCounts(DecoderCounts):
    """What is counted of the transformer from its shape, in place of titan's decoder."""

    is_causal = False
    double: int
    text_tokens: int
    text_width: int
    pooled_width: int
    guidance: float | None

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        raise NotImplementedError

    @property
    def image_tokens(self) -> int:
        """Patches of an image."""
        raise NotImplementedError

    @property
    def row_ids(self) -> int:
        """Ids of a row: words and values."""
        raise NotImplementedError

    @property
    def shares(self) -> Shares:
        """The shares of a row's tokens."""
        tokens = self.count_row_tokens(0)
        return Shares(self.text_tokens / tokens, self.image_tokens / tokens, 1 / tokens)

    def count_row_tokens(self, seq_len: int) -> int:
        """Return the tokens of a row: words and patches."""
        return self.text_tokens + self.image_tokens

    # ---- matmuls and parameters ----

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of a block with the tokens that they compute."""
        return {
            name: PartMatmul.build(
                *matmul[:2], self._find_share(name), matmul.rowwise, is_whole="modulation" in name
            )
            for name, matmul in BuiltCounts.block_matmuls(self, layer).items()
        }  # fmt: skip

    def _find_share(self, name: str) -> float:
        """Return the share of a row's tokens that a linear layer of a block computes."""
        if "modulation" in name:
            return self.shares.row
        return {"text": self.shares.text, "image": self.shares.image}.get(name.split(".")[0], 1.0)

    def embedding_matmuls(self) -> dict[str, Matmul]:
        """Return the linear layers of the embedding."""
        inputs = {"time": FREQUENCIES, "guidance": FREQUENCIES, "caption": self.pooled_width}
        matmuls = {
            "image.linear": PartMatmul.build(self.patch_values, self.dim, self.shares.image, is_whole=True),
            "words.linear": PartMatmul.build(self.text_width, self.dim, self.shares.text, is_whole=True),
        }
        for name in (name for name in inputs if name != "guidance" or self.guidance is not None):
            for part, width in (("first", inputs[name]), ("second", self.dim)):
                matmuls[f"{name}.{part}.linear"] = PartMatmul.build(width, self.dim, self.shares.row, is_whole=True)
        return {f"tok_embeddings.{name}": matmul for name, matmul in matmuls.items()}

    def head_matmuls(self) -> dict[str, Matmul]:
        """Return the linear layers of the head."""
        return {
            "head.modulation.projection.linear": PartMatmul.build(
                self.dim, 2 * self.dim, self.shares.row, is_whole=True
            ),
            "head.projection.linear": PartMatmul.build(self.dim, self.patch_values, self.shares.image, is_whole=True),
        }  # fmt: skip

    def embedding_parameters(self) -> int:
        """Return the exact number of parameters of the embedding: matrices and biases."""
        return sum(matmul.size + matmul.outputs for matmul in self.embedding_matmuls().values())

    def head_parameters(self) -> int:
        """Return the exact number of parameters of the head."""
        return sum(matmul.size + matmul.outputs for matmul in self.head_matmuls().values())

    def split_embedding_parameters(self, tensor: int) -> float:
        """Return the parameters of the embedding, which each tensor rank has."""
        return self.embedding_parameters()

    def split_head_parameters(self, tensor: int) -> float:
        """Return the parameters of the head, which each tensor rank has."""
        return self.head_parameters()

    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of all parameters."""
        from titan.model.built_counts import describe_blocks

        embedding, head = (
            tuple(f"{name.removesuffix('.linear')}.{part}.weight" for name in names for part in ("linear", "bias"))
            for names in (self.embedding_matmuls(), self.head_matmuls())
        )
        blocks = (f"layers.{i}.{name}" for i, block in enumerate(describe_blocks(self)) for name in block.parameters)
        return (*embedding, *blocks, *head)

    # ---- FLOPs ----

    def block_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of words and patches of one block, forward and backward."""
        return 6 * _sum_computed(self.block_matmuls(layer)) + self.attention_flops(self.count_row_tokens(0), layer)

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of attention scores and values in rows of `seq_len` tokens, forward and backward."""
        return float(12 * self.heads * self.head_size * seq_len)

    def head_flops(self) -> float:
        """Return FLOPs per token of embedding and head, forward and backward."""
        return 6 * _sum_computed(self.embedding_matmuls() | self.head_matmuls())

    def flops_per_token(self, seq_len: float) -> float:
        """Return FLOPs per id of a row, forward and backward: those of a row, divided by its ids."""
        return super().flops_per_token(seq_len) * self.count_row_tokens(0) / self.row_ids

    # ---- memory ----

    def attention_elements(self, layer: int = 0) -> int:
        """Return the elements per token that attention reads and writes beside its matmuls: norms and rotation."""
        return 8 * self.heads * self.head_size

    def elementwise_elements(self, part: str, layer: int = 0) -> tuple[float, float]:
        """Return the elements per token that a block's operations beside matmuls read and write in a pass.

        Forward: modulated norms read and write D each, gates with additions read 2D and write D, GELU reads and writes
        F, joining and dividing streams copies D. Backward has as many again for the gradients.
        """
        is_double = layer < self.double
        stream = (12 if is_double else 5) * self.dim * (1 if part == "forward" else 2)
        return stream, self.attention_elements(layer) + (2 if part == "forward" else 3) * self.ffn

    def block_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> BlockActivations:
        """Return the activation memory of a block."""
        c, n, queries, ffn = batch.bytes, batch.tokens, self._split(self.heads * self.head_size, batch), self.ffn
        widths = SAVED[layer < self.double, batch.compiled]
        norms = 2 if layer < self.double else 1
        head_bytes = 2 * batch.count_norm_bytes(queries) + 4 * self.heads / batch.tensor
        saved = c * (widths.dim * self.dim + widths.queries * queries + widths.ffn * self._split(ffn, batch))
        saved += head_bytes + NORM_BYTES * norms + self._count_modulation_bytes(c, layer)
        gradient = c * self.dim * n
        selective = gradient + self._count_selective_bytes(batch, layer)
        backward = gradient + c * n * max(2 * self._split(ffn, batch), 3 * queries + self.dim, 4 * self.dim)
        outputs = sum(
            c * n * matmul.split(batch.tensor).outputs * matmul.compute_token_share(1)
            for matmul in self.block_matmuls(layer).values()
        )
        return BlockActivations(gradient, saved * n, selective, backward, outputs)

    def _split(self, width: int, batch: RankBatch) -> float:
        return width / batch.tensor

    def _count_modulation_bytes(self, element: int, layer: int) -> float:
        """Return the bytes per token of a block's modulations: vectors of the row, and their sums with one."""
        outputs = sum(m.outputs for name, m in self.block_matmuls(layer).items() if "modulation" in name)
        return 2 * element * outputs * self.shares.row

    def _count_selective_bytes(self, batch: RankBatch, layer: int) -> float:
        """Return the bytes that selective checkpointing saves: every other matmul's results, attention, sums."""
        matmuls = list(self.block_matmuls(layer).values())
        results = [
            m.split(batch.tensor).outputs * m.compute_token_share(1) for m in matmuls[:-1:2]
        ]  # fmt: skip
        reduced = [self.dim * m.compute_token_share(1) for m in matmuls if m.rowwise and batch.tensor > 1]
        attention = batch.bytes * self.heads * self.head_size / batch.tensor + 4 * self.heads / batch.tensor
        return (batch.bytes * (sum(results) + sum(reduced)) + attention) * batch.tokens

    def embedding_activations(self, batch: RankBatch) -> float:
        """Return the bytes that the embedding saves: its inputs, and the velocity of the image for the loss."""
        words = batch.bytes * self.text_width * self.shares.text
        patches = (batch.bytes + 4) * self.patch_values * self.shares.image
        rows = batch.bytes * (4 * self.dim + self.pooled_width + 2 * FREQUENCIES) * self.shares.row
        return (words + patches + rows) * batch.tokens

    def head_activations(self, batch: RankBatch, **options: Any) -> HeadActivations:
        """Return the activation memory of last norm, head and loss: the settings of logits have no meaning here."""
        n, c = batch.tokens * self.shares.image, batch.bytes
        hidden = c * self.dim * n
        saved = 3 * hidden + (NORM_BYTES + 4 * 2 * self.patch_values) * n
        peak = saved + 4 * 2 * self.patch_values * n
        return HeadActivations(saved, peak, peak + 2 * hidden, 2 * hidden + c * self.dim * batch.tokens)


def _sum_computed(matmuls: dict[str, Matmul]) -> float:
    """Return the elements of matrices that compute a token, on average over the tokens of a row."""
    return float(sum(matmul.size * matmul.compute_token_share(1) for matmul in matmuls.values()))
