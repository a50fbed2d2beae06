"""Parts of tests of agents: a chat model's tokenizer and template, and an engine that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.engines.engine import BadAnswer, GenerateRequest, Generation, Sampling
from relax_hpc.rollout.turns import Start
from relax_hpc.versions import Version

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As that of Qwen3, of which it leaves out what the policy has thought before."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def write_chat_tokenizer(folder: Path) -> None:
    """A byte-level BPE of some hundred tokens, with the added tokens of Qwen3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEMPLATE, json.dumps(TOOLS), "the quick brown fox " * 9, "aaa bb\n\n abab\n"], trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    ends = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


@dataclass
class Chats:
    """A model for chats."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def in_folder(cls, folder: Path) -> Chats:
        write_chat_tokenizer(folder)
        return cls(load_tokenizer(folder), ChatTemplate(TEMPLATE, {}, ""))

    @property
    def end(self) -> int:
        return self.tokenizer.eos_ids[0]

    def said(self, text: str) -> list[int]:
        """Tokens of an answer."""
        return [*self.tokenizer.encode(text, special=False), self.end]

    def whole(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Tokens of a chat, made of its text in one piece."""
        text = self.template.render(list(messages), tools=tools or ())
        return self.tokenizer.encode(text, special=False, special_tokens=True)


Say = Callable[[list[int], int], list[int]]
"""Tokens of an answer to those of a prompt, and how many there may be."""


@dataclass
class ToldEngine:
    """An engine that says what it is told to, and notes what it was asked with."""

    say: Say
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))
    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens of each request, and what it drew."""

    async def once(self, request: GenerateRequest) -> Generation | BadAnswer:
        draft = request.draft
        assert draft is not None
        before, known = list(request.so_far), len(draft.token_ids)
        drawn = self.say(before, request.budget - known)
        assert 0 < len(drawn) <= request.budget - known
        await asyncio.sleep(0)
        version = Version(1, next(self.versions)).encode()
        draft.add(drawn, [-0.5] * len(drawn), [version] * len(drawn))
        self.asked.append((before, drawn))
        versions = np.array(draft.token_versions, np.int32)
        draft.ended = Generation(list(draft.token_ids), list(draft.logprobs), versions, "stop")
        return draft.ended

    def start(self) -> Start:
        """Start of an episode that it is asked in."""
        request = GenerateRequest((1, 2, 3), "7/p", 0, Sampling(1.0, 1.0, (), 0), 2000)
        return Start(Prompt("p", (1, 2, 3), "2+2?", "4", {"level": 3}), request, self.once)
