"""A tokenizer with a chat template, a deterministic engine, and environments in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import (
    Beginning,
    Environment,
    EnvironmentFault,
    Message,
    Observation,
    Response,
    Step,
)
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    GenerateRequest,
    Generation,
    Sampling,
    checked,
)
from relax_hpc.rollout.episodes.player import EnvironmentBackend, Player
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.episodes.turns import EpisodeStart, TurnRules

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
TEMPLATE = """{%- for message in messages -%}
{%- set is_tool = message.role == "tool" -%}
{%- if not (is_tool and loop.previtem is defined and loop.previtem.role == "tool") -%}
{{ "<|im_start|>" + ("user" if is_tool else message.role) }}{%- endif -%}
{%- if is_tool -%}{{ "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else -%}{{ "\\n" + message.content }}{%- endif -%}
{%- if not (is_tool and loop.nextitem is defined and loop.nextitem.role == "tool") -%}{{ "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}
{%- if not enable_thinking -%}{{ "<think>\\n\\n</think>\\n\\n" }}{%- endif -%}{%- endif -%}"""
"""As Qwen3's template, for text messages after the first one."""
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)


def backend() -> Backend:
    """A tokenizer of bytes with some merges. It splits text as Qwen's tokenizer does."""
    tokenizer = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["user\nassistant\nthe tool said 12, then 34.\n\nand\n" * 3], trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    return tokenizer


def wrap_tokenizer(wrapped: Backend) -> Tokenizer:
    """The project's tokenizer around ``wrapped``. A turn ends with <|im_end|>."""
    ends = wrapped.token_to_id("<|im_end|>"), wrapped.token_to_id("<|endoftext|>")
    tokenizer = Tokenizer(wrapped, None, False, ends, ends[1])
    tokenizer.directory = Path()
    return tokenizer


def template(enable_thinking: bool = True) -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {"enable_thinking": enable_thinking}, "")


class DeterministicEngine:
    """An engine whose next token depends only on the tokens before it and the sample."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[str] = ("a", "b", "7"), version: int = 3
    ) -> None:
        """``texts``: the engine generates the first token of each."""
        self.tokenizer, self.version = tokenizer, Version(1, version)
        self.choices = [tokenizer.encode(text, special=False)[0] for text in texts]
        self.requests: list[GenerateRequest] = []
        self.drawn = 0
        """Number of generated tokens."""

    async def __call__(self, request: GenerateRequest) -> Generation | BadAnswer:
        draft = request.draft
        assert draft
        self.requests.append(request)
        tokens, finish = list(draft.token_ids), "length"
        while len(tokens) < request.budget:
            draw = np.random.default_rng([*request.prompt_ids, *tokens, request.sample]).random()
            ends = draw < 0.3 and len(tokens) > draft.turn_start
            token = (
                self.tokenizer.eos_ids[0]
                if ends
                else self.choices[int(draw * 97) % len(self.choices)]
            )
            tokens.append(token)
            self.drawn += 1
            if token == self.tokenizer.eos_ids[0]:
                finish = "stop"
                break
            draft.add([token], [-1.0], [self.version.encode()])
            self.note_token()
        new = len(tokens) - len(draft.token_versions)
        logprobs = [*draft.logprobs, *[-1.0] * new]
        versions = np.array([*draft.token_versions, *[self.version.encode()] * new], np.int32)
        generation = checked(Generation(tokens, logprobs, versions, finish), request.budget)
        draft.ended = generation
        return generation

    def note_token(self) -> None:
        """Called after each token of the draft."""


class InProcessEnvironments:
    """Opens environments in this process."""

    def __init__(self, kind: Callable[..., Environment], **options: Any) -> None:
        self._kind, self._options = kind, options
        self.opened: list[Beginning] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, beginning: Beginning) -> InProcessSession:
        self.opened.append(beginning)
        session = InProcessSession(self._kind(**self._options))
        session.opening = await session.messages(
            await _await_if_needed(session.environment.reset(beginning))
        )
        return session


class InProcessSession:
    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.opening: tuple[Message, ...] = ()

    async def step(self, response: Response) -> tuple[Step, tuple[Message, ...]]:
        step = await _await_if_needed(self.environment.step(response))
        return step, await self.messages(step.observations)

    async def messages(self, observations: Sequence[Observation]) -> tuple[Message, ...]:
        messages = list[Message]()
        for observation in observations:
            content = await _await_if_needed(self.environment.format_observation(observation))
            messages.append(Message(observation.role, tuple(content)))
        return tuple(messages)

    async def close(self) -> None:
        await _await_if_needed(self.environment.close())


async def _await_if_needed(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def player(
    kind: Callable[..., Environment],
    tokenizer: Tokenizer,
    chat: ChatTemplate | None = None,
    note: Callable[[EnvironmentFault], None] = lambda fault: None,
    note_cut: Callable[[], None] = lambda: None,
    **limits: int,
) -> Player:
    settings = EnvironmentConfig(**limits)
    bridge = TurnTokenizer(
        tokenizer, chat, max_tokens=settings.max_observation_tokens, note_cut=note_cut
    )
    stage = EnvironmentBackend(InProcessEnvironments(kind), TurnRules(bridge, tokenizer, settings))
    return Player(stage, settings.max_faults, 60.0, note)


def start(
    tokenizer: Tokenizer, ask: Any, text: str = "go", budget: int = 400, sample: int = 0
) -> EpisodeStart:
    """Start of an episode whose prompt is ``text``, without a template."""
    prompt = Prompt(
        "p",
        tuple(tokenizer.encode(text, special=False, special_tokens=True)),
        text,
        "answer",
        {"k": 1},
    )
    sampling = Sampling(1.0, 1.0, tokenizer.eos_ids, 5)
    return EpisodeStart(
        prompt, GenerateRequest(prompt.token_ids, "0/p", sample, sampling, budget), ask
    )
