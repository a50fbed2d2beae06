"""A verifiable task for small models: sort the digits of the prompt ("4312?" -> "1234")."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path

from relax_hpc.data.prompts import Tokenizer


def sort_answer(digits: str) -> str:
    """The right response to ``digits + "?"``."""
    return "".join(sorted(digits))


def split(digits: int) -> dict[str, list[str]]:
    """Every number of `digits` digits in one of three disjoint sets, the same on every machine.

    `heldout_multisets`: no permutation of the prompt is in `train` (a fifth of the multisets); `heldout_prompts`: a
    fifth of the rest, other permutations of which may be. Each list is in the order of a hash, so that any prefix
    of it is a fair sample.
    """
    sets: dict[str, list[str]] = {"train": [], "heldout_multisets": [], "heldout_prompts": []}
    for number in range(10**digits):
        text = f"{number:0{digits}d}"
        if _hash("m" + sort_answer(text)) % 5 == 0:
            sets["heldout_multisets"].append(text)
        else:
            sets["heldout_prompts" if _hash("p" + text) % 5 == 0 else "train"].append(text)
    for texts in sets.values():
        texts.sort(key=lambda text: _hash("o" + text))
    trained = {sort_answer(text) for text in sets["train"]}
    assert not trained & {sort_answer(text) for text in sets["heldout_multisets"]}
    assert not set(sets["train"]) & set(sets["heldout_prompts"])
    return sets


def make_sort_digits(
    directory: Path, tokenizer: Tokenizer, digits: int, seed: int, warm_start_rows: int, noise: float
) -> None:
    """Write train.jsonl, heldout_multisets.jsonl, heldout_prompts.jsonl and warm_start.jsonl into `directory`.

    The first three hold {"id", "prompt", "answer"}. warm_start.jsonl holds `warm_start_rows` demonstrations
    {"token_ids": prompt + answer + EOS, "prompt_len"} of prompts drawn from train with `seed`; a share `noise` of
    them answers another train prompt. Deterministic; each file appears whole or not at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sets = split(digits)
    for name, texts in sets.items():
        lines = ({"id": text, "prompt": f"{text}?", "answer": sort_answer(text)} for text in texts)
        _write_lines(directory / f"{name}.jsonl", lines)
    rng = random.Random(f"warm start {seed}")
    rows = (_demonstration(tokenizer, sets["train"], noise, rng) for _ in range(warm_start_rows))
    _write_lines(directory / "warm_start.jsonl", rows)


def _demonstration(tokenizer: Tokenizer, train: list[str], noise: float, rng: random.Random) -> dict[str, object]:
    text = rng.choice(train)
    answered = rng.choice(train) if rng.random() < noise else text
    prompt = tokenizer.encode(f"{text}?")
    answer = tokenizer.encode(sort_answer(answered), special=False)
    return {"token_ids": [*prompt, *answer, tokenizer.eos_ids[0]], "prompt_len": len(prompt)}


def _write_lines(path: Path, lines: Iterable[dict[str, object]]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    partial.replace(path)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
