"""The optimizer axis. Each kind is a dataclass whose `build` returns the torch optimizer. Free of torch until then."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value, setting, suggest_nearest, suggest_pattern
from titan.config.text_kinds import Label
from titan.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter

    from titan.model.schema import Decoder

EMBEDDING, BLOCKS = "tok_embeddings.weight", "layers."
"""The name of the embedding's weight (and of a tied head's), and the prefix of the blocks' parameters."""
LARGEST_BETA2 = 1 - 2**-8
"""The largest `betas[1]` with which a second moment in bf16 can still decay.

bf16 has 8 significant bits: between 2^e and 2^(e+1) its values are 2^(e-7) apart, and a change of less than half of
that, 2^(e-8), is lost in rounding. With a zero gradient a second moment v decreases by (1 - beta2) * v, which at the
lower end of the interval is (1 - beta2) * 2^e: with 1 - beta2 below 2^-8 it would never change.
"""


def is_block_matrix(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of them."""
    return dimensions in (2, 3) and name.startswith(BLOCKS)


class GroupSettings(NamedTuple):
    """How a parameter is updated; parameters with equal values form one of torch's parameter groups.

    `factor` is its learning rate as a factor of optimizer.lr, `orthogonal` whether Muon updates it, or an external
    optimizer.
    """

    weight_decay: float
    factor: float
    orthogonal: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with another weight decay or learning rate."""

    match: tuple[Label, ...] = setting(help="patterns of parameter names, such as ['*norm.weight','layers.0.*']")
    weight_decay: float | None = setting(None, "weight decay; null: optimizer.weight_decay", at_least=0, cap=1e4)
    lr: float = setting(1.0, "learning rate as a factor of optimizer.lr", at_least=0, cap=1e6)

    def matches(self, name: str) -> bool:
        """Return whether a parameter of that name is in the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings common to all optimizers."""

    lr: float | str = setting(
        1e-3,
        "peak learning rate; auto: of AdamW, by parameters and tokens (Step Law, arXiv:2503.04715)",
        words=("auto",),
        above=0,
    )
    weight_decay: float = setting(0.1, "weight decay", at_least=0, cap=1e4)
    decay: Literal["all", "matrices"] = setting(
        "all", "parameters with weight decay; matrices: no norms, biases or embedding"
    )
    groups: Mapping[str, Group] | None = setting(
        None,
        "parameters with another weight decay or lr, {NAME: {match: [PATTERN,...],...}}; the first match applies",
    )

    @property
    def peak_lr(self) -> float:
        """The peak learning rate of a run, in which "auto" has become a number."""
        return float(self.lr)

    @abstractmethod
    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`, given with their names in the whole model."""
        raise NotImplementedError

    def state_bytes(self, matrices: int, other_parameters: int, weight_bytes: int = 4) -> int:
        """Return the bytes of optimizer state.

        Args:
            matrices: elements of the blocks' matrices.
            other_parameters: elements of all other parameters.
            weight_bytes: bytes per weight element: 4 for fp32, 2 for bf16.
        """
        return 0

    def describe(self) -> str:
        """Return a short description of settings that differ from the defaults; empty if none does."""
        words = ["weight decay for matrices only"] * (self.decay != "all")
        words += [f"groups {', '.join(self.groups)}"] if self.groups else []
        return "; ".join(words)

    def working_bytes(self, matrix: int, elements: int, device: str) -> int:
        """Return the bytes of temporary tensors of an update on a device, "cuda" or "cpu".

        Args:
            matrix: elements of the largest matrix before sharding.
            elements: weight elements of the rank.
        """
        return 4 * elements if getattr(self, "implementation", "fused") == "foreach" else 0

    def list_matrix_products(self, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """Return the matmuls [m, k] x [k, n] of one update of a block's whole matrix, as (m, n, k); often none."""
        return []

    def choose_matrix_bytes(self, device: str) -> int:
        """Return the bytes per element of a whole matrix on a device where `list_matrix_products` names products."""
        return 4

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Raise ConfigError for settings that contradict each other or the model; see `state_bytes`."""
        factors = model.update_factors(self)
        names = model.parameter_names() if self.groups or factors else ()
        for name, group in (self.groups or {}).items():
            if not group.match:
                raise ConfigError(
                    f"optimizer.groups.{name}.match=[]: matches no parameter; give patterns such as ['*norm.weight']."
                )
            for pattern in group.match:
                if not any(fnmatchcase(parameter, pattern) for parameter in names):
                    raise ConfigError(
                        f"optimizer.groups.{name}.match={format_value(group.match)}: no parameter of the model "
                        f"matches {pattern}; names are such as {names[0]}, {names[1]} and "
                        f"{names[-1]}{suggest_pattern(pattern, names)}"
                    )
        known_names = frozenset(names)
        for name, values in factors.items():
            if name not in known_names:
                raise ConfigError(
                    f"model={get_kind(type(model))}: update_factors names {name}, and no parameter has this name; "
                    f"correct the name{suggest_nearest(name, sorted(names))}"
                )
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise ConfigError(
                    f"model={get_kind(type(model))}: update_factors gives {name} the factors "
                    f"{format_value(tuple(values))}; return finite factors of at least 0."
                )

    def measure(self, model: Decoder) -> Optimizer:
        """Return these settings with what must be measured of the optimizer before work starts; here nothing."""
        return self

    def list_packages(self) -> tuple[str, ...]:
        """Return the top-level packages beside titan and torch that the settings name as texts."""
        return ()

    def choose_settings(self, name: str, dimensions: int) -> GroupSettings:
        """Return how a parameter is updated, from its name in the whole model and its number of dimensions."""
        group = next((group for group in (self.groups or {}).values() if group.matches(name)), Group(match=()))
        decays = self.decay == "all" or (dimensions > 1 and name != EMBEDDING)
        decay = group.weight_decay if group.weight_decay is not None else self.weight_decay if decays else 0.0
        return GroupSettings(decay, group.lr, orthogonal=False)

    def param_groups(self, parameters: Iterable[tuple[str, Parameter]]) -> list[dict[str, Any]]:
        """Return torch's parameter groups; each also has the keys `factor` and `orthogonal`; see `GroupSettings`."""
        groups: dict[GroupSettings, list[Parameter]] = {}
        for name, parameter in parameters:
            groups.setdefault(self.choose_settings(name, parameter.dim()), []).append(parameter)
        return [
            {"params": members, "lr": self.peak_lr * settings.factor, **settings._asdict()}
            for settings, members in groups.items()
        ]


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates of the two moments", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the square root of the second moment", above=0, cap=1)
    moments: Literal["auto", "fp32", "bf16"] = setting("auto", "type of the moments; auto: the weights' type")
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "fused, foreach or for-loop", science=False
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return torch's AdamW if weights and moments have one type, else `mixed_precision.MixedPrecisionAdamW`."""
        from titan.optimizer import mixed_precision

        common = {"betas": self.betas, "eps": self.eps}
        return mixed_precision.build_adamw(self.param_groups(parameters), common, self.moments, self.implementation)

    def state_bytes(self, matrices: int, other_parameters: int, weight_bytes: int = 4) -> int:
        """Return the bytes of two moments per element; see `Optimizer.state_bytes`."""
        return 2 * self.moment_bytes(weight_bytes) * (matrices + other_parameters)

    def describe(self) -> str:
        """Return also the moments' type and the implementation, if they are not the defaults."""
        words = [f"moments in {self.moments}"] * (self.moments != "auto")
        words += [self.implementation] * (self.implementation != "fused")
        return "; ".join(filter(None, [*words, super().describe()]))

    def moment_bytes(self, weight_bytes: int) -> int:
        """Return bytes per element of a moment."""
        return {"auto": weight_bytes, "fp32": 4, "bf16": 2}[self.moments]

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Raise ConfigError for a second moment that can't decay; see `Optimizer.check` and `LARGEST_BETA2`."""
        super().check(model, weight_bytes)
        if self.moment_bytes(weight_bytes) == 2 and self.betas[1] > LARGEST_BETA2:
            raise ConfigError(
                f"optimizer.betas={format_value(self.betas)}: a second moment in bf16 has 8 significant bits and "
                f"can't decay so slowly; give at most {LARGEST_BETA2:.3f} as the second value, or "
                "optimizer.moments=fp32."
            )


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    momentum: float = setting(0.0, "momentum", at_least=0, below=1)
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "fused (for parameters that are not sharded), foreach or for-loop", science=False
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`."""
        from titan.optimizer import mixed_precision

        common = {"lr": self.peak_lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        return mixed_precision.build_sgd(self.param_groups(parameters), common, self.implementation)

    def state_bytes(self, matrices: int, other_parameters: int, weight_bytes: int = 4) -> int:
        """Return the bytes of the momentum, in the weights' type; see `Optimizer.state_bytes`."""
        return weight_bytes * (matrices + other_parameters) if self.momentum else 0


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for all others.

    The update of a matrix is its momentum, orthogonalised by a few Newton-Schulz iterations.
    """

    momentum: float = setting(0.95, "decay rate of the matrices' momentum", at_least=0, below=1)
    nesterov: bool = setting(True, "Nesterov momentum")
    iterations: int = setting(5, "number of Newton-Schulz iterations", at_least=1, at_most=99)
    newton_schulz: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "type of the Newton-Schulz iterations; auto: bf16 on GPUs, fp32 on CPUs"
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "scaling of the update by a matrix's shape: to the RMS of AdamW's (arXiv:2502.16982), or Jordan's",
    )

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`."""
        from titan.optimizer import muon

        return muon.MuonWithAdamW(self, self.param_groups(parameters))

    def choose_settings(self, name: str, dimensions: int) -> GroupSettings:
        """Return the same, with the blocks' matrices updated by Muon."""
        return super().choose_settings(name, dimensions)._replace(orthogonal=is_block_matrix(name, dimensions))

    def describe(self) -> str:
        """Return also which parameters each algorithm updates."""
        return "; ".join(filter(None, ["muon for the blocks' matrices, adamw for the rest", super().describe()]))

    def working_bytes(self, matrix: int, elements: int, device: str) -> int:
        """Return the bytes of a Newton-Schulz iteration: five matrices, the gathered one and the broadcast one."""
        return 7 * matrix * self.choose_matrix_bytes(device)

    def list_matrix_products(self, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """Return the three products of each iteration, with the smaller side as rows; see `titan.optimizer.muon`."""
        small, large = sorted((rows, columns))
        return [(small, small, large), (small, small, small), (small, large, small)] * self.iterations

    def choose_matrix_bytes(self, device: str) -> int:
        """Return the bytes per element of the Newton-Schulz iterations."""
        return {"fp32": 4, "bf16": 2}[self.choose_newton_schulz(device)]

    def state_bytes(self, matrices: int, other_parameters: int, weight_bytes: int = 4) -> int:
        """Return the bytes of one momentum for matrices and two moments for others; see `Optimizer.state_bytes`."""
        return self.moment_bytes(weight_bytes) * (matrices + 2 * other_parameters)

    def choose_newton_schulz(self, device: str) -> Literal["fp32", "bf16"]:
        """Return the type of the Newton-Schulz iterations on a device, such as "cuda" or "cpu"."""
        if self.newton_schulz == "auto":
            return "bf16" if device == "cuda" else "fp32"
        return self.newton_schulz
