"""Helpers of tests of agents: a tokenizer and template for chats, sessions, and an engine with
chosen answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.rendering import Renderer
from relax_hpc.rollout.agents.session import AgentSession
from relax_hpc.rollout.engines.engine import BadAnswer, GenerateRequest, Generation, Sampling
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.turns import EpisodeStart

Body = dict[str, Any]
COMPLETIONS = "/v1/chat/completions"
USER = {"role": "user", "content": "What is 2 + 2?"}
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
"""Like the template of Qwen3. It leaves out earlier thoughts of the policy."""
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
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        [TEMPLATE, json.dumps(TOOLS), "the quick brown fox " * 9, "aaa bb\n\n abab\n"], trainer
    )
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    ends = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]
FUNCTION: dict[str, Any] = TOOLS[0]["function"]
ARGUMENTS = {"a": 2, "b": 2}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
ANSWERS = [f"Let me see.\n{CALL}", "It is 4.", "Bye."]
"""Answers of the engine of `addition_session`."""


@dataclass
class Chats:
    """A tokenizer and a template for chats."""

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
        """Tokens of a whole chat, tokenised as one text."""
        text = self.template.render(list(messages), tools=tools or ())
        return self.tokenizer.encode(text, special=False, special_tokens=True)


Say = Callable[[list[int], int], list[int]]
"""Function of the prompt's tokens and the maximum number of tokens. Returns tokens of an answer."""


@dataclass
class ToldEngine:
    """An engine that generates the tokens that `say` returns, and records its requests."""

    say: Say
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))
    requests: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens of each request, and the tokens that the engine generated."""

    async def once(self, request: GenerateRequest) -> Generation | BadAnswer:
        draft = request.draft
        assert draft is not None
        before, drafted = list(request.context_ids), len(draft.token_ids)
        drawn = self.say(before, request.budget - drafted)
        assert 0 < len(drawn) <= request.budget - drafted
        await asyncio.sleep(0)
        version = Version(1, next(self.versions)).encode()
        draft.add(drawn, [-0.5] * len(drawn), [version] * len(drawn))
        self.requests.append((before, drawn))
        versions = np.array(draft.token_versions, np.int32)
        draft.ended = Generation(list(draft.token_ids), list(draft.logprobs), versions, "stop")
        return draft.ended

    def start(self) -> EpisodeStart:
        """Start of an episode with requests to this engine."""
        request = GenerateRequest((1, 2, 3), "7/p", 0, Sampling(1.0, 1.0, (), 0), 2000)
        return EpisodeStart(Prompt("p", (1, 2, 3), "2+2?", "4", {"level": 3}), request, self.once)


@pytest.fixture(scope="module", name="chats")
def chats_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    """A tokenizer and template for chats, shared by the tests of a file."""
    model = Chats.in_folder(tmp_path_factory.mktemp("model"))
    yield model
    model.template.close()


def session_of(
    chats: Chats, engine: ToldEngine, history: History | None = None, **limits: int
) -> AgentSession:
    """A session with requests to ``engine``. ``limits``: fields of `EnvironmentConfig`."""
    bounds = Bounds(EnvironmentConfig(**{"max_turns": 50} | limits), 4000, 8000)
    renderer = Renderer(chats.template, chats.tokenizer)
    return AgentSession(
        engine.start(), history or History(), renderer, chats.tokenizer, bounds, lambda reason: None
    )


async def ask(session: AgentSession, messages: list[Body], **fields: Any) -> Body:
    """The message that answers a chat completion request. ``fields``: further fields of it."""
    body = json.dumps({"messages": messages, **fields}).encode()
    reply = await session.reply(COMPLETIONS, body, 0)
    if session.error:
        raise session.error
    assert reply.status == 200, reply.body
    return json.loads(reply.body)["choices"][0]["message"]


def rows(session: AgentSession) -> list[OpenRow]:
    """All rows of ``session``."""
    return session._history.rows


def tokens(row: OpenRow) -> list[int]:
    """Tokens of the prompt and of the draft."""
    return [*row.prompt, *row.draft.token_ids]


def scripted(chats: Chats, *texts: str) -> ToldEngine:
    """An engine whose answers are these ``texts``, in this order."""
    answers = iter(texts)
    return ToldEngine(lambda before, limit: chats.said(next(answers)))


def addition_session(chats: Chats) -> tuple[AgentSession, ToldEngine]:
    """A session, and its engine that calls the tool `add`, tells the result and says goodbye."""
    engine = scripted(chats, *ANSWERS)
    return session_of(chats, engine, History()), engine
