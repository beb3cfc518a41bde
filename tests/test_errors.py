"""Errors that a user did not cause are not called the user's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch._dynamo.exc import TorchRuntimeError
from torch._inductor.exc import CppCompileError, InductorError

from titan.errors import describe_user_error

KILLED = CppCompileError(["g++", "x.cpp", *["-O3"] * 2000], "g++: fatal error: Killed signal\nmore\n")


@pytest.mark.parametrize(
    ("error", "start"),
    [
        pytest.param(InductorError(KILLED, None), "C++ compile error, g++: fatal error: Killed signal", id="compiler"),
        pytest.param(KILLED, "C++ compile error, g++: fatal error: Killed signal", id="without-inductor"),
        pytest.param(InductorError(RuntimeError("no lowering " * 900), None), "RuntimeError: no lowering", id="own"),
    ],
)
def test_a_failed_compiler_is_no_error_of_the_users_code(error: Exception, start: str, tmp_path: Path) -> None:
    file = tmp_path / "cgenerated.py"
    file.write_text("def run(error):\n    raise error\n")
    spec = importlib.util.spec_from_file_location("cgenerated", file)
    assert spec is not None and spec.loader is not None
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    with pytest.raises(type(error)) as raised:
        generated.run(error)
    code, sentence = describe_user_error(raised.value) or (0, "")
    assert code == 1 and start in sentence and len(sentence) < 500 and "\n" not in sentence
    assert sentence.startswith("torch.compile failed: ") and sentence.endswith(" or give compile=off.")
    with pytest.raises(TorchRuntimeError) as own:
        generated.run(TorchRuntimeError("shapes differ"))
    code, sentence = describe_user_error(own.value) or (0, "")
    assert code == 2 and "cgenerated.py:2 in run (TorchRuntimeError: shapes differ)" in sentence
