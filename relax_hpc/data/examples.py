"""Sequences that are learned from as they are, of the rows of a file: demonstrations, and pairs of responses.

A demonstration is {"id", "prompt" (text, or messages) or "messages", "answer"}, or a whole chat in "messages", of which
all turns of the assistant are learned; or {"id", "token_ids", "prompt_len"}. A pair is {"id", "prompt" or "messages",
"chosen", "rejected"}: each of the two a text, the messages that follow, or a whole chat; learned is what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import BadRecord, PromptRules, check_ids, id_of, is_chat, rendered
from relax_hpc.data.rows import BadLine, Record
from relax_hpc.data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Learned:
    """One sequence, and which of its tokens are learned."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 for tokens of the assistant, else 0."""

    @property
    def prompt_len(self) -> int:
        """Tokens before the first that is learned."""
        return self.loss_mask.index(1)


@dataclass(frozen=True, slots=True)
class Example:
    """One usable row."""

    prompt_id: str
    sequences: tuple[Learned, ...]
    """The demonstration, or the chosen and the rejected one; none where there is no tokenizer."""


@dataclass(frozen=True, slots=True)
class ExampleRules(PromptRules):
    """Rules by which a row becomes an example; `max_tokens` are of a whole sequence."""

    sequences: int = 1
    """Sequences of a row: 1, or 2 that are compared."""

    def about(self) -> list[Any]:
        """See `PromptRules`."""
        return [*PromptRules.about(self), self.sequences]

    def read(self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True) -> Example | BadLine:
        """The example of the row in line ``number``, or why it has none. Its tokens are made in any case: no row may
        turn out to be too long later."""
        try:
            return Example(id_of(record), _sequences(record, tokenizer, self) if tokenizer else ())
        except BadRecord as bad:
            return BadLine(number, *bad.args)


def rules_of(
    config: Config, tokenizer: Tokenizer | None, folder: Path = Path(), tools: Sequence[Mapping[str, Any]] = ()
) -> PromptRules:
    """Rules by which rows of the run's files in ``folder`` become prompts, or examples. ``tools``: signatures of those
    that prompts have whose rows name none. ConfigError: as of `PromptRules.of`."""
    found, sequences = PromptRules.of(config.data, tokenizer, folder), config.algorithm.sequences
    if not sequences:
        return replace(found, tools=json.dumps(tools)) if found.template and tools else found
    return ExampleRules(config.data.max_row_tokens, found.special_tokens, found.template, sequences=sequences)


def _sequences(record: Record, tokenizer: Tokenizer, how: ExampleRules) -> tuple[Learned, ...]:
    how = how.with_tools(record)
    found = [demonstration_of(record, tokenizer, how)] if how.sequences == 1 else _pair(record, tokenizer, how)
    for one in found:
        if not any(one.loss_mask):
            raise BadRecord("empty_answer", "nothing in it is learned")
        if (length := len(one.token_ids)) > how.max_tokens:
            raise BadRecord("over_long", f"{length} tokens, data.max_row_tokens is {how.max_tokens}")
    return tuple(found)


def demonstration_of(record: Record, tokenizer: Tokenizer, how: PromptRules) -> Learned:
    """Sequence of a demonstration. BadRecord: it is none."""
    if "token_ids" in record:
        ids, known = record["token_ids"], record.get("prompt_len")
        check_ids(ids, tokenizer.vocab_size)
        if type(known) is not int or not 0 < known <= len(ids):
            raise BadRecord("wrong_type", f"prompt_len is {known!r}, of {len(ids)} tokens")
        return Learned(tuple(ids), (0,) * known + (1,) * (len(ids) - known))
    asked = _asked(record)
    whole = is_chat(asked) and asked[-1]["role"] == _ASSISTANT and "answer" not in record
    (answer,) = [[]] if whole else _named(record, "answer")
    if not how.template:
        return _of_texts(asked, answer, tokenizer, how)
    if whole:
        return _of_chat(asked, 0, tokenizer, how)
    messages = _messages(asked, "user")
    return _of_chat([*messages, *_messages(answer, _ASSISTANT)], len(messages), tokenizer, how)


def _pair(record: Record, tokenizer: Tokenizer, how: ExampleRules) -> list[Learned]:
    answers = _named(record, "chosen", "rejected")
    if answers[0] == answers[1]:
        raise BadRecord("no_preference", "chosen and rejected are the same")
    asked = _asked(record) if {"messages", "prompt"} & record.keys() else []
    if not how.template:
        return [_of_texts(asked, answer, tokenizer, how) for answer in answers]
    messages = _messages(asked, "user")
    chats = []
    for answer in answers:
        said = _messages(answer, _ASSISTANT)
        chats.append(said if messages and said[: len(messages)] == messages else [*messages, *said])
    shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*chats, strict=False)))
    return [_of_chat(chat, shared, tokenizer, how) for chat in chats]


def _asked(record: Record) -> Any:
    (found,) = _named(record, "messages" if "messages" in record else "prompt")
    return found


def _named(record: Record, *names: str) -> list[Any]:
    """Values of the fields ``names``, texts or messages."""
    if missing := [name for name in names if name not in record]:
        raise BadRecord("missing_field", f"no {', no '.join(missing)}")
    for name in names:
        if not (isinstance(record[name], str) or is_chat(record[name])):
            raise BadRecord("wrong_type", f"{name} is {type(record[name]).__name__}, no text and no chat messages")
    return [record[name] for name in names]


def _messages(given: str | Messages, role: str) -> Messages:
    """Chat messages; of a text one, by ``role``."""
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _of_texts(asked: Any, answer: Any, tokenizer: Tokenizer, how: PromptRules) -> Learned:
    """The text of a prompt, as it stands, and that of an answer with the token that ends it."""
    if not isinstance(asked, str) or not isinstance(answer, str):
        raise BadRecord("wrong_type", "it has chat messages, or no prompt; set data.chat_template: model")
    if not answer:
        raise BadRecord("empty_answer", "nothing in it is learned")
    before = tokenizer.encode(asked, special_tokens="prompt" in how.special_tokens)
    after = [*tokenizer.encode(answer, special=False), tokenizer.eos_ids[0]]
    return Learned((*before, *after), (0,) * len(before) + (1,) * len(after))


def _of_chat(chat: Messages, first: int, tokenizer: Tokenizer, how: PromptRules) -> Learned:
    """A chat of which the assistant's turns are learned, from message ``first`` on, and what comes after the last of
    them is left out.

    Tokens are made of each part by itself, as when the policy is asked: what it is asked, and what it answers.
    """
    text = rendered(chat, tokenizer, how, whole=True)
    ids: list[int] = []
    mask: list[int] = []
    at = 0
    for begin, end in _turns(text, chat, first, tokenizer, how):
        for part, learned in ((text[at:begin], 0), (text[begin:end], 1)):
            made = tokenizer.encode(part, special=False, special_tokens=True)
            ids += made
            mask += [learned] * len(made)
        at = end
    return Learned(tuple(ids), tuple(mask))


def _turns(text: str, chat: Messages, first: int, tokenizer: Tokenizer, how: PromptRules) -> Iterator[tuple[int, int]]:
    """Begin and end, in ``text``, of each of the assistant's turns: from where the template asks for it to the token
    that ends it, which is what the policy itself would be asked, and draw."""
    for number in range(first, len(chat)):
        if chat[number]["role"] != _ASSISTANT:
            continue
        asked = rendered(chat[:number], tokenizer, how) if number else ""
        if not asked or not text.startswith(asked):
            why = f"it does not begin message {number} as it asks for it; give its last turn alone, as `answer`"
            raise BadRecord("chat_template", why)
        ends = [at + len(name) for name in _end_names(tokenizer) if (at := text.find(name, len(asked))) >= 0]
        if not ends:
            raise BadRecord("chat_template", f"no token ends message {number}, allowed: {_end_names(tokenizer)}")
        yield len(asked), min(ends)


def _end_names(tokenizer: Tokenizer) -> Sequence[str]:
    return [tokenizer.name_of(number) for number in tokenizer.eos_ids]
