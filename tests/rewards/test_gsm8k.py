"""The recipe that a user with a GPU begins with: its prompts from a copy of the data set, and that
`check` takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from relax_hpc.config import load
from relax_hpc.data.chat import template_of
from relax_hpc.ops.checks.settings import check
from relax_hpc.rewards import RewardInput, get_reward
from tests.helpers.model_files import model_directory
from tests.requirements import requires

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/runs/gsm8k-qwen3-0.6b.yaml"
ROWS = [
    {"question": "Tom has 2 eggs and buys 3. How many?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "And at $1,000 each?", "answer": "5*1000=5000 of €.\n#### 5,000"},
]
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not(message.content.startswith('<tool')) %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""What Qwen3's does with prompts, by the same means: namespaces, slices, texts' methods, a thought
that is empty."""


def prepared(copy: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/prepare_gsm8k.py", copy, "--output", output]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_recipe_is_in_order_with_a_model_of_the_true_shape(tmp_path: Path) -> None:
    requires("pyarrow", "megatron")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "copy/main").mkdir(parents=True)
    (tmp_path / "copy/socratic").mkdir()
    for place in (
        "main/train-00000-of-00001",
        "socratic/train-00000-of-00001",
        "main/test-00000-of-00001",
    ):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(ROWS), tmp_path / f"copy/{place}.parquet"
        )
    done = prepared(tmp_path / "copy", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert (
        "train.jsonl: 2 prompts (the published data set has 7473)" in done.stdout
        and "not known" in done.stdout
    )
    assert (
        f"--data.train {tmp_path}/data/train.jsonl --data.eval.gsm8k {tmp_path}/data/test.jsonl"
        in done.stdout
    )
    rows = [json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["5", "5,000"] and rows[0]["id"] != rows[1]["id"]
    assert rows[0]["messages"][0]["content"].startswith(ROWS[0]["question"])

    model = model_directory(tmp_path / "model", **QWEN3)
    # Where the published model has it.
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    files = {
        "data.train": tmp_path / "data/train.jsonl",
        "data.eval": {"gsm8k": tmp_path / "data/test.jsonl"},
    }
    over = {"run_dir": tmp_path / "run", "model.path": model, **files}
    # The tokenizer that is made here has a token a character.
    over = json.loads(json.dumps(over, default=str)) | {"data.max_prompt_tokens": 2048}
    one_gpu = {
        "colocate": True,
        "groups": {"rollout": None, "actor": {"roles": ["rollout", "actor"]}},
    }
    for files, more in (
        ([RECIPE, ROOT / "configs/clusters/1-nodes.yaml"], {}),
        ([RECIPE], one_gpu),
        ([RECIPE], {}),
    ):
        config = load(files, over | more)
        assert [one for one in check(config) if "this machine has no GPU" not in one] == []
    template = template_of(config.data.chat_template, model, "", config.data.enable_thinking, ())
    question = (
        ROWS[0]["question"] + "\nReason step by step, and put the final answer within \\boxed{}."
    )
    ends = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.render(rows[0]["messages"]) == f"<|im_start|>user\n{question}<|im_end|>\n{ends}"
    template.close()
    reward = get_reward(config.rollout.reward)
    assert reward(RewardInput("", rows[1]["answer"], r"It is \boxed{5000}.", "stop")) == 1.0


def test_what_is_no_gsm8k_is_named(tmp_path: Path) -> None:
    done = prepared(tmp_path, tmp_path / "data")
    assert done.returncode == 78 and "found none as its train split" in done.stderr
    (tmp_path / "train.jsonl").write_text(
        json.dumps(ROWS[0]) + "\n" + json.dumps({"question": "?", "answer": "5"})
    )
    done = prepared(tmp_path, tmp_path / "data")
    assert done.returncode == 78 and "row 2: found no texts" in done.stderr
    assert not (tmp_path / "data").exists()
