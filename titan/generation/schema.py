"""The settings of `titan.generate`. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from titan.config.arguments import operand
from titan.config.settings import setting
from titan.config.text_kinds import Input, Label, Output
from titan.errors import ConfigError
from titan.files import untrusted
from titan.parallelism.schema import DIMENSIONS, Layout


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The degree of each dimension, with the names of the parallelism axis."""

    pipeline: int = setting(1, "stages; 1 only", at_least=1)
    replicate: int = setting(1, "replicas; 1 only", at_least=1)
    shard: int = setting(1, "ranks that weights are sharded over; 1 only", at_least=1)
    context: int = setting(1, "ranks that each sequence is split over; 1 only", at_least=1)
    tensor: int = setting(1, "ranks that each weight matrix is split over", at_least=1)

    def build_layout(self) -> Layout:
        """Return the layout.

        Raises:
            ConfigError: when another dimension than tensor is above one.
        """
        for name in DIMENSIONS:
            if (degree := getattr(self, name)) > 1 and name != "tensor":
                raise ConfigError(
                    f"parallelism.{name}={degree}: text is generated on one device or with tensor parallelism only; "
                    f"give parallelism.tensor={degree}."
                )
        return Layout(tensor=self.tensor)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the prompts and the sampling of a generation."""

    source: Input = operand("MODEL", "a run, a checkpoint, or a folder in the format of Hugging Face or Meta")
    prompt: Label | None = setting(None, "a text to continue, or several: [a,b]", any_text=True)
    prompts: Input | None = setting(None, "a file with one prompt per line, or *.jsonl with the key text")
    tokens: tuple[int, ...] | None = setting(
        None, "token ids to continue, used unchanged: [1,2,3]; how many follow is max_tokens", at_least=0
    )
    markup: bool = setting(False, "parse special tokens in the text of prompts")
    max_tokens: int = setting(128, "maximum number of tokens to generate", at_least=1, cap=10**9)
    samples: int = setting(1, "continuations of each prompt", at_least=1, cap=10**6)
    temperature: float = setting(
        0.8, "the logits are divided by it; 0: always the most likely token", at_least=0, cap=1e6
    )
    top_k: int = setting(40, "sample from this many most likely tokens; 0: from all", at_least=0)
    top_p: float = setting(
        1.0, "sample from the fewest most likely tokens with this total probability", above=0, at_most=1
    )
    seed: int = setting(0, "of the random numbers", at_least=0, below=2**63)
    stop: Label | None = setting(None, "a text before which the continuation ends, or several: [a,b]", any_text=True)
    ignore_eos: bool = setting(False, "continue after the token that ends a document")
    to: Output | None = setting(None, "a file *.jsonl to write (JSON Lines); null: the terminal")
    dtype: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "type of the weights and of computation; auto: bf16 where the device is fast at it, else fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: GPUs if available, else the CPU")
    batch: int = setting(8, "continuations computed together", at_least=1, cap=10**6)
    chunk: int = setting(512, "tokens of a prompt computed together", at_least=1)
    parallelism: Degrees = field(default_factory=Degrees)

    def read_texts(self) -> list[str] | None:
        """Return the prompts as texts; None where `tokens` are given.

        Raises:
            ConfigError: when there are none, or given in more than one way, or in a file that can't be read.
        """
        provided = [name for name in ("prompt", "prompts", "tokens") if getattr(self, name) is not None]
        if len(provided) > 1:
            raise ConfigError(f"{' and '.join(provided)}: give one of them only.")
        if not provided:
            raise ConfigError('prompt is missing: give prompt="a text to continue", prompts=FILE or tokens=[1,2,3].')
        if self.tokens == ():
            raise ConfigError("tokens=[]: there is nothing to continue; give token ids, such as tokens=[1,2,3].")
        if self.prompts is not None:
            return read_prompts(self.prompts)
        return None if self.prompt is None else parse_list(self.prompt)

    def list_stops(self) -> tuple[str, ...]:
        """Return the texts that end a continuation."""
        return tuple(text for text in parse_list(self.stop or "") if text)


def parse_list(text: str) -> list[str]:
    """Return the strings of a YAML list, `[a,b]`; any other text is a single string."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    try:
        items = yaml.load(text, yaml.BaseLoader)  # keeps numbers as strings
    except yaml.YAMLError:
        return [text]
    return items if items and all(isinstance(item, str) for item in items) else [text]


def read_prompts(name: str) -> list[str]:
    """Return the prompts in a file: one per line, in *.jsonl the value of the key text; empty lines are skipped.

    Raises:
        ConfigError: when it can't be read, or has no prompt.
    """
    try:
        content = untrusted.read_regular_file(Path(name).expanduser()).decode()
    except OSError as error:
        raise ConfigError(
            f"prompts={name}: can't be read ({error.strerror}); give a file with one prompt per line."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts={name}: not UTF-8 (byte {error.start}); convert it.") from error
    except ValueError as error:
        raise ConfigError(f"prompts={name}: {error}; give a file with one prompt per line.") from error
    # not splitlines, which splits at characters that JSON allows inside of a string
    numbered = enumerate((line.removesuffix("\r") for line in content.split("\n")), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigError(f"prompts={name}: has no prompt; give a file with one prompt per line.")
    json_lines = Path(name).suffix == ".jsonl"
    return [_parse_text(line, f"prompts={name}: line {number}") if json_lines else line for number, line in lines]


def _parse_text(line: str, location: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{location} is not like {{"text": "a prompt"}}; correct it.') from error
    if not isinstance(text, str):
        raise ConfigError(f"{location} has a value of text that is no string; correct it.")
    return text
