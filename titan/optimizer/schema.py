"""The optimizer axis. Each kind is a dataclass whose `build` makes the torch optimizer. Free of torch until then.

The schemas are defined in the package itself: ids name a kind by its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.config.settings import nearest, setting, show
from titan.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter

    from titan.model.schema import Decoder

Implementation = Literal["fused", "foreach", "for-loop"]
"""How an update runs: one kernel for all parameters, one an operation for all, or one an operation and parameter."""
Type = Literal["auto", "fp32", "bf16"]
EMBEDDING, BLOCKS = "tok_embeddings.weight", "layers."
"""What the embedding's name is (a tied head's too), and what the names of the blocks' parameters begin with."""
LARGEST_BETA2 = 1 - 2**-8
"""The largest `betas[1]` with which a second moment in bf16 still falls.

bf16 has 8 significant bits: between 2^e and 2^(e+1) its values are 2^(e-7) apart, and what moves a value by less than
half of that, 2^(e-8), is lost in rounding. Without a gradient a second moment v loses (1 - beta2) * v, at the lower end
of such an interval (1 - beta2) * 2^e: with 1 - beta2 below 2^-8 it would stay for ever.
"""


class Part(NamedTuple):
    """How a parameter is updated; parameters with equal parts are one of torch's parameter groups.

    Attributes:
        weight_decay: its own weight decay.
        factor: its learning rate as a factor on the optimizer's.
        orthogonal: whether Muon updates it.
    """

    weight_decay: float
    factor: float
    orthogonal: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are updated in their own way."""

    match: tuple[str, ...] = setting(help="patterns of parameters' names, such as ['*norm.weight','layers.0.*']")
    weight_decay: float | None = setting(None, "weight decay; null: as for the others", at_least=0, cap=1e4)
    lr: float = setting(1.0, "learning rate, as a factor on optimizer.lr", at_least=0, cap=1e6)

    def matches(self, name: str) -> bool:
        """Whether a parameter of that name is in the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has in common."""

    lr: float = setting(1e-3, "peak learning rate", above=0)
    weight_decay: float = setting(0.1, "weight decay", at_least=0, cap=1e4)
    decay: Literal["all", "matrices"] = setting(
        "all", "what weight decay is for; matrices: neither norms, biases nor the embedding"
    )
    groups: Mapping[str, Group] | None = setting(
        None,
        "parameters with a decay or rate of their own, {NAME: {match: [PATTERN,...],...}}; the first match holds",
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`, given with their names in the whole model."""
        raise NotImplementedError

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """Bytes of state that it keeps.

        Args:
            matrices: how many numbers the blocks' matrices have.
            others: how many all other parameters have.
            weight_bytes: of a number of a weight: 4 for fp32, 2 for bf16.
        """
        return 0

    def describe(self) -> str:
        """What is out of the ordinary, in a few words for people; empty where nothing is."""
        words = ["weight decay of matrices only"] * (self.decay != "all")
        words += [f"groups {', '.join(self.groups)}"] if self.groups else []
        return "; ".join(words)

    def working_bytes(self, matrix: int, elements: int) -> int:
        """Bytes that an update takes for a while.

        Args:
            matrix: elements of the largest matrix, of which ranks may share the parts.
            elements: of all weights on a rank.
        """
        return 4 * elements if getattr(self, "implementation", "fused") == "foreach" else 0

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Refuse settings that fit neither each other nor the model.

        Args:
            model: what is trained.
            weight_bytes: see `state_bytes`.

        Raises:
            ConfigError: naming the setting to change.
        """
        names = model.parameter_names() if self.groups else ()
        for group, content in (self.groups or {}).items():
            if not content.match:
                raise ConfigError(
                    f"optimizer.groups.{group}.match=[]: names nothing; give patterns such as ['*norm.weight']."
                )
            for pattern in content.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"optimizer.groups.{group}.match={show(content.match)}: no parameter of the model is called "
                        f"{pattern}; names are such as {names[0]}, {names[1]} and {names[-1]}{nearest(pattern, names)}"
                    )

    def part(self, name: str, dimensions: int) -> Part:
        """How the parameter of that name in the whole model, which has so many dimensions, is updated."""
        group = next((g for g in (self.groups or {}).values() if g.matches(name)), Group(match=()))
        decays = self.decay == "all" or (dimensions > 1 and name != EMBEDDING)
        decay = group.weight_decay if group.weight_decay is not None else self.weight_decay if decays else 0.0
        return Part(decay, group.lr, orthogonal=False)

    def param_groups(self, parameters: Iterable[tuple[str, Parameter]]) -> list[dict[str, Any]]:
        """Torch's parameter groups; beside `lr` and `weight_decay` each has `factor` and `orthogonal`, see `Part`."""
        found: dict[Part, list[Parameter]] = {}
        for name, parameter in parameters:
            found.setdefault(self.part(name, parameter.dim()), []).append(parameter)
        return [{"params": those, "lr": self.lr * part.factor, **part._asdict()} for part, those in found.items()]


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the two moments", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0, cap=1)
    moments: Literal["auto", "fp32", "bf16"] = setting("auto", "type in which the moments are kept; auto: the weights'")
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "fused, foreach or for-loop", science=False
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`: torch's own where weights and moments are of one type."""
        import torch

        from titan.optimizer import mixed_precision

        groups = self.param_groups(parameters)
        common: dict[str, Any] = {"betas": self.betas, "eps": self.eps}
        kept = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}[self.moments]
        kinds = {p.dtype for group in groups for p in group["params"]}
        alike = all(kind == (kept or kind) for kind in kinds)
        if alike and (self.implementation == "fused" or kinds <= {torch.float32}):  # the fused one computes in fp32
            how: dict[str, Any] = flags(self.implementation)
            return torch.optim.AdamW(groups, **common, **how)
        return mixed_precision.AdamW(groups, common, self.moments, self.implementation)

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """Two moments of each number; see `Optimizer.state_bytes`."""
        return 2 * self.moment_bytes(weight_bytes) * (matrices + others)

    def describe(self) -> str:
        """As for all; the moments' type and the implementation where they are not torch's defaults."""
        words = [f"moments in {self.moments}"] * (self.moments != "auto")
        words += [self.implementation] * (self.implementation != "fused")
        return "; ".join(filter(None, [*words, super().describe()]))

    def moment_bytes(self, weight_bytes: int) -> int:
        """Bytes of a number of a moment."""
        return {"auto": weight_bytes, "fp32": 4, "bf16": 2}[self.moments]

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Refuse a second moment that could not fall; see `Optimizer.check` and `LARGEST_BETA2`."""
        super().check(model, weight_bytes)
        if self.moment_bytes(weight_bytes) == 2 and self.betas[1] > LARGEST_BETA2:
            raise ConfigError(
                f"optimizer.betas={show(self.betas)}: a second moment in bf16 is rounded to 8 bits and can't fall with "
                f"so slow a decay; give at most {LARGEST_BETA2:.3f} as the second one, or optimizer.moments=fp32."
            )


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    momentum: float = setting(0.0, "momentum", at_least=0, below=1)
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "fused (where parameters are not cut), foreach or for-loop", science=False
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`."""
        import torch
        from torch.distributed.tensor import DTensor

        groups = self.param_groups(parameters)
        all_ = [p for group in groups for p in group["params"]]
        # There is no fused kernel for DTensors, and that for CPUs leaves weights that are not fp32 as they are.
        none = any(isinstance(p, DTensor) or (p.device.type == "cpu" and p.dtype != torch.float32) for p in all_)
        how = {"fused": False} if none and self.implementation == "fused" else flags(self.implementation)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, **how)

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """The momentum, where there is any, in the weights' type; see `Optimizer.state_bytes`."""
        return weight_bytes * (matrices + others) if self.momentum else 0


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for all others.

    The update of a matrix is its momentum, orthogonalised by a few steps of a Newton-Schulz iteration.
    """

    momentum: float = setting(0.95, "decay of the momentum of matrices", at_least=0, below=1)
    nesterov: bool = setting(True, "look ahead along the momentum")
    iterations: int = setting(5, "steps of the Newton-Schulz iteration", at_least=1, at_most=99)
    newton_schulz: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type in which it computes; auto: bf16 on GPUs, fp32 on CPUs"
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw", "how a matrix's shape scales its update: as large as AdamW's (arXiv:2502.16982), or Jordan's"
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`."""
        from titan.optimizer import muon

        return muon.Muon(self, self.param_groups(parameters))

    def part(self, name: str, dimensions: int) -> Part:
        """As for all optimizers; the blocks' matrices are orthogonal."""
        return super().part(name, dimensions)._replace(orthogonal=dimensions == 2 and name.startswith(BLOCKS))

    def describe(self) -> str:
        """As for AdamW, and what is whose."""
        return "; ".join(filter(None, ["muon for the blocks' matrices, adamw for the rest", super().describe()]))

    def working_bytes(self, matrix: int, elements: int) -> int:
        """What a Newton-Schulz iteration has at once: five matrices, and the two that are gathered and sent."""
        return 7 * matrix * (4 if self.newton_schulz == "fp32" else 2)

    def state_bytes(self, matrices: int, others: int, weight_bytes: int = 4) -> int:
        """One momentum of matrices and two moments of all others; see `Optimizer.state_bytes`."""
        return self.moment_bytes(weight_bytes) * (matrices + 2 * others)


def flags(implementation: Implementation) -> dict[str, bool]:
    """An implementation as torch's optimizers are told of it."""
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}
