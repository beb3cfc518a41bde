"""Small files of tasks from the built-in corpus: the right choice is the next line, others are of other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan.dataset.sources.local import build_stdlib_source


def read_texts(count: int, length: int = 6) -> list[list[str]]:
    """Texts of `length` successive lines of different files of the built-in corpus."""
    texts: list[list[str]] = []
    source = build_stdlib_source()
    for part in source.parts():
        for document in source.documents(part):
            words = [line.strip() for line in str(document).splitlines() if len(line.split()) > 3 and line.isascii()]
            if len(words) >= length + 20:
                texts.append(words[20 : 20 + length])
            if len(texts) == count:
                return texts
    raise ValueError(f"the corpus has only {len(texts)} files")


def build_records(count: int) -> dict[str, list[dict[str, Any]]]:
    """Records of each format, as published."""
    texts = read_texts(count)
    ends = [[texts[(i + k) % count][2] for k in range(4)] for i in range(count)]
    right = [i % 4 for i in range(count)]
    ends = [[*e[1 : r + 1], e[0], *e[r + 1 :]] for e, r in zip(ends, right, strict=True)]
    return {
        "hellaswag": [
            {"activity_label": "Python", "ctx_a": t[0], "ctx_b": t[1], "label": r, "endings": e}
            for t, e, r in zip(texts, ends, right, strict=True)
        ],
        "arc": [
            {
                "id": str(i),
                "question": {
                    "stem": t[1],
                    "choices": [{"text": x, "label": y} for x, y in zip(e, "ABCD", strict=True)],
                },
                "answerKey": "ABCD"[r],
            }
            for i, (t, e, r) in enumerate(zip(texts, ends, right, strict=True))
        ],
        "lambada": [{"text": " ".join(t[:3])} for t in texts],
    }


def write_tasks(folder: Path, count: int = 8) -> dict[str, Path]:
    """Write a file of each format, and give their paths."""
    paths = {}
    for name, task_records in build_records(count).items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(record) + "\n" for record in task_records))
    return paths


def build_settings(paths: dict[str, Path]) -> list[str]:
    """Overrides for tasks of these files, by the names of their formats."""
    return [f"+evaluation.tasks.{name}={{format: {name}, path: {path}}}" for name, path in paths.items()]


def write_corpus(folder: Path) -> list[str]:
    """Overrides for a small corpus of text."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "\n".join(text)}) + "\n" for text in read_texts(60)))
    return ["dataset=jsonl", f"dataset.path={path}", f"dataset.cache={folder}/cache", "dataset.validation=0.2"]
