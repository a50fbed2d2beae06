"""Sequences of the rows of a file that are learned from as they are: demonstrations, and pairs of
responses.

A demonstration is {"prompt" (a text, or messages) or "messages", "answer"}, or a whole chat in
"messages", of which all turns of the assistant are learned that have no `weight` of 0; or
{"token_ids", "prompt_len"}. A pair is {"prompt" or "messages", "chosen", "rejected"}: each of the
two a text, the messages that follow, or a whole chat; learned is what differs. Each row may have an
"id", and media as rows of prompts have them, see `relax_hpc.data.media`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from relax_hpc.config.schema import Config
from relax_hpc.data.media import MediaRules, PromptMedium, ReadHeader
from relax_hpc.data.messages import ASSISTANT, Message, left_out_of_turn, says_nothing
from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.named_media import Columns
from relax_hpc.data.prompts import (
    BAD_RECORD,
    PromptRules,
    bad_line,
    chat_in,
    check_ids,
    columns_in,
    is_chat,
    refuse_chat_as_text,
    rendered,
)
from relax_hpc.data.rows import BadLine, BadRecord, Record
from relax_hpc.data.tokenizer import Tokenizer

_WEIGHTS = (None, 0, 1)
"""Values of a message's `weight`, as OpenAI's fine-tuning has it; with 0 it is not learned."""
_LONG_PROMPT = 16
"""Characters of a prompt at least. Only an answer that begins with such a prompt is refused for
repeating it."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One sequence, and which of its tokens are learned."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 for tokens of the assistant, else 0."""
    media: tuple[PromptMedium, ...] = ()
    """Media that the sequence has places for, in their order."""

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
    order: float = 0.0
    """Value of the column `data.order_by`."""
    fault: BadMedium | None = None
    """Reason why its media cannot be used any more, though they could when its file was indexed."""


@dataclass(frozen=True, slots=True)
class ExampleRules(PromptRules):
    """Rules by which a row becomes an example; `max_tokens` are of a whole sequence."""

    sequences: int = 1
    """Sequences of a row: 1, or 2 that are compared."""

    @classmethod
    def from_rules(cls, rules: PromptRules, max_tokens: int, sequences: int) -> Self:
        """``rules`` of prompts, all of them, for sequences of at most ``max_tokens``."""
        values = {field.name: getattr(rules, field.name) for field in fields(PromptRules)}
        return cls(**values | {"max_tokens": max_tokens}, sequences=sequences)

    def about(self) -> list[Any]:
        """See `PromptRules`."""
        return [*PromptRules.about(self), self.sequences]

    def read(
        self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True
    ) -> Example | BadLine:
        """The example of the row in line ``number``, or why it has none. Its tokens are made in any
        case: no row may turn out to be too long later."""
        try:
            row = self.columns.read(number, record, has_template=self.template is not None)
            prompt_id, order = row["id"], self.columns.order(row)
            return Example(prompt_id, _sequences(row, tokenizer, self) if tokenizer else (), order)
        except BAD_RECORD as error:
            return bad_line(number, error)

    def unusable(self, number: int, record: Record, fault: BadMedium) -> Example:
        """See `PromptRules`."""
        return Example(self.columns.id_of(self.columns.renamed(record), number), (), fault=fault)


def rules_of(
    config: Config,
    tokenizer: Tokenizer | None,
    folder: Path = Path(),
    tools: Sequence[Mapping[str, Any]] = (),
    set_name: str = "train",
) -> PromptRules:
    """Rules by which rows of the run's files in ``folder``, of the set ``set_name``, become
    prompts, or examples. ``tools``: signatures of the tools in prompts whose rows name none.
    ConfigError: as of `PromptRules.of`."""
    rules = PromptRules.of(config.data, tokenizer, folder, set_name)
    sequences = config.algorithm.sequences
    if sequences:
        return ExampleRules.from_rules(rules, config.data.max_row_tokens, sequences)
    return replace(rules, tools=json.dumps(tools)) if rules.template and tools else rules


def _sequences(record: Record, tokenizer: Tokenizer, rules: ExampleRules) -> tuple[Learned, ...]:
    if rules.sequences == 1:
        sequences = [demonstration_of(record, tokenizer, rules)]
    else:
        sequences = _pair(record, tokenizer, rules.with_tools(record))
    for sequence in sequences:
        if not any(sequence.loss_mask):
            raise BadRecord("empty_answer", "nothing in it is learned")
        if (length := len(sequence.token_ids)) > rules.max_tokens:
            raise BadRecord(
                "over_long", f"{length} tokens, data.max_row_tokens is {rules.max_tokens}"
            )
    return tuple(sequences)


def demonstration_of(
    record: Record,
    tokenizer: Tokenizer,
    rules: PromptRules,
    read_header: ReadHeader | None = None,
) -> Learned:
    """Sequence of a demonstration. ``read_header``: reads headers of media; None: the pool of
    ``rules``. BadRecord: it is none."""
    record, rules = dict(record), rules.with_tools(record)
    columns = columns_in(record, rules)
    if "token_ids" in record:
        learned = _of_ids(record, tokenizer)
        return _with_media(learned, columns, tokenizer, rules, read_header)
    prompt = _prompt_of(record, rules)
    whole = is_chat(prompt) and prompt[-1]["role"] == ASSISTANT
    if whole and "answer" in record:
        raise BadRecord(
            "answer_in_prompt",
            "the chat ends with the assistant's message, and there is an answer too; list "
            "'answer' in data.ignore_keys to learn the chat",
        )
    (answer,) = [[]] if whole else _named(record, rules, "answer")
    if not rules.template:
        learned = _of_texts(prompt, answer, columns, tokenizer, rules)
    elif whole:
        learned, columns = _of_chat(prompt, 0, columns, tokenizer, rules)
    else:
        messages = _messages(prompt, "user")
        chat = [*messages, *_messages(answer, ASSISTANT)]
        learned, columns = _of_chat(chat, len(messages), columns, tokenizer, rules)
    return _with_media(learned, columns, tokenizer, rules, read_header)


def _of_ids(record: Record, tokenizer: Tokenizer) -> Learned:
    ids, prompt_len = record["token_ids"], record.get("prompt_len")
    check_ids(ids, tokenizer.vocab_size)
    if type(prompt_len) is not int or not 0 < prompt_len <= len(ids):
        raise BadRecord("wrong_type", f"prompt_len is {prompt_len!r}, of {len(ids)} tokens")
    return Learned(tuple(ids), (0,) * prompt_len + (1,) * (len(ids) - prompt_len))


def _pair(record: Record, tokenizer: Tokenizer, rules: ExampleRules) -> list[Learned]:
    record = dict(record)
    columns = columns_in(record, rules)
    answers = _named(record, rules, "chosen", "rejected")
    if answers[0] == answers[1]:
        raise BadRecord("no_preference", "chosen and rejected are the same")
    prompt = _prompt_of(record, rules) if {"messages", "prompt"} & record.keys() else []
    if not rules.template:
        pair = [
            (_of_texts(prompt, answer, columns, tokenizer, rules), columns) for answer in answers
        ]
    else:
        chats = _chats_of_pair(prompt, answers)
        shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*chats, strict=False)))
        if any(chat[shared]["role"] != ASSISTANT for chat in chats if len(chat) > shared):
            raise BadRecord(
                "no_preference",
                f"message {shared}, where chosen and rejected differ, is not the assistant's",
            )
        pair = [_of_chat(chat, shared, columns, tokenizer, rules) for chat in chats]
    return [_with_media(learned, media, tokenizer, rules, None) for learned, media in pair]


def _chats_of_pair(prompt: str | list[Message], answers: Sequence[Any]) -> list[list[Message]]:
    """Whole chats of a pair whose prompt is a text or messages, which an answer may repeat.
    BadRecord: an answer is a whole chat that has another prompt."""
    messages = _messages(prompt, "user")
    chats = []
    for answer in answers:
        reply = _messages(answer, ASSISTANT)
        if not messages or reply[: len(messages)] == messages:
            chats.append(reply)
        elif reply[0]["role"] == ASSISTANT and messages[-1]["role"] != ASSISTANT:
            chats.append([*messages, *reply])
        elif reply[0]["role"] != ASSISTANT and all(message in reply for message in messages):
            # Of a whole chat the prompt may be the user's message alone, without the system's
            # before it.
            chats.append(reply)
        else:
            raise BadRecord(
                "answer_in_prompt",
                "an answer is a chat that does not begin with the messages of the prompt",
            )
    return chats


def _prompt_of(record: Record, rules: PromptRules) -> Any:
    (value,) = _named(record, rules, "messages" if "messages" in record else "prompt")
    return value


def _named(record: Record, rules: PromptRules, *names: str) -> list[Any]:
    """Values of the fields ``names``, texts or messages."""
    if missing := [name for name in names if name not in record]:
        raise BadRecord("missing_field", rules.columns.missing(missing))
    for name in names:
        refuse_chat_as_text(name, record[name])
        if not (isinstance(record[name], str) or is_chat(record[name])):
            kind = type(record[name]).__name__
            raise BadRecord("wrong_type", f"{name} is {kind}, no text and no chat messages")
    return [record[name] for name in names]


def _messages(value: str | list[Message], role: str) -> list[Message]:
    """Chat messages; of a text one, by ``role``."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _of_texts(
    prompt: Any, answer: Any, columns: Columns, tokenizer: Tokenizer, rules: PromptRules
) -> Learned:
    """The text of a prompt, as it stands, and that of an answer with the token that ends it."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadRecord(
            "wrong_type", "it has chat messages, or no prompt; set data.chat_template: model"
        )
    if not answer:
        raise BadRecord("empty_answer", "nothing in it is learned")
    if len(prompt) >= _LONG_PROMPT and answer.startswith(prompt):
        raise BadRecord(
            "answer_in_prompt",
            "the answer repeats the prompt, which would stand twice; remove it there",
        )
    as_tokens = "prompt" in rules.special_tokens
    if rules.media:
        before = rules.media.encoded(prompt, columns, tokenizer, as_tokens)
    else:
        before = tokenizer.encode(prompt, special_tokens=as_tokens)
    after = [*tokenizer.encode_after(prompt, answer), tokenizer.eos_ids[0]]
    return Learned((*before, *after), (0,) * len(before) + (1,) * len(after))


def _of_chat(
    messages: list[Message], first: int, columns: Columns, tokenizer: Tokenizer, rules: PromptRules
) -> tuple[Learned, Columns]:
    """A chat of which the assistant's turns are learned, from message ``first`` on, and its media.
    What comes after the last of these turns is left out.

    Tokens are made of each part by itself, as when the policy is prompt: what it is prompt, and
    what it answers.
    """
    chat, columns = chat_in(messages, columns, rules)
    text = rendered(chat, tokenizer, rules, whole=True)
    ids: list[int] = []
    mask: list[int] = []
    start = 0
    for begin, end in _turns(text, chat, first, tokenizer, rules):
        for first_index, last_index, is_learned in ((start, begin, 0), (begin, end, 1)):
            piece = text[first_index:last_index]
            tokens = tokenizer.encode_after(text[:first_index], piece, special_tokens=True)
            ids += tokens
            mask += [is_learned] * len(tokens)
        start = end
    return Learned(tuple(ids), tuple(mask)), columns


def _turns(
    text: str, chat: list[Message], first: int, tokenizer: Tokenizer, rules: PromptRules
) -> Iterator[tuple[int, int]]:
    """Begin and end, in ``text``, of each of the assistant's turns that is learned: from where the
    template asks for it to the end of the token that ends it."""
    for number in range(first, len(chat)):
        message = chat[number]
        if message["role"] != ASSISTANT or _weight(number, message) == 0:
            continue
        if says_nothing(message):
            raise BadRecord("empty_answer", f"message {number} is empty, and would be learned")
        prompt = rendered(chat[:number], tokenizer, rules) if number else ""
        if not prompt or not text.startswith(prompt):
            why = (
                f"it does not begin message {number} as it asks for it; give its last turn "
                "single_turn, as `answer`"
            )
            raise BadRecord("chat_template", why)
        until = rendered(chat[: number + 1], tokenizer, rules, whole=True)
        if missing := left_out_of_turn(message, until[len(prompt) :]):
            raise BadRecord(
                "chat_template",
                f"the chat template leaves out {missing} of message {number}, to be learned",
            )
        end = _turn_end(text, until, len(prompt), tokenizer)
        if end is None:
            raise BadRecord(
                "chat_template", f"no special token ends message {number} where it stands"
            )
        yield len(prompt), end


def _weight(number: int, message: Message) -> int:
    weight = message.get("weight")
    if weight not in _WEIGHTS:
        raise BadRecord(
            "wrong_type", f"message {number}: weight is {str(weight)[:40]!r}, allowed: 0 or 1"
        )
    return 1 if weight is None else int(weight)


def _turn_end(text: str, until: str, begin: int, tokenizer: Tokenizer) -> int | None:
    """Index in ``text`` of the end of the turn that begins at ``begin``, or None. ``until``: the
    text of the same chat, which ends with this turn.

    A turn ends with the first token that ends a response, or, if it has none, with its last special
    token: Llama 3.1 ends a call of a tool by `<|eom_id|>`. Within ``text`` the turn may say less,
    as templates drop earlier thoughts, but must have the same special tokens.
    """
    # A config.json may name an id that the tokenizer lacks.
    ends = set(filter(None, map(tokenizer.name_of, tokenizer.eos_ids)))
    names = sorted({*tokenizer.special_names, *ends}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)))
    single_turn = [match[0] for match in pattern.finditer(until, begin)]
    if not single_turn:
        return None
    last = next(
        (index for index, name in enumerate(single_turn) if name in ends), len(single_turn) - 1
    )
    within = list(islice(pattern.finditer(text, begin), last + 1))
    if [match[0] for match in within] != single_turn[: last + 1]:
        return None
    return within[last].end()


def _with_media(
    learned: Learned,
    columns: Columns,
    tokenizer: Tokenizer,
    rules: PromptRules,
    read_header: ReadHeader | None,
) -> Learned:
    """``learned`` with as many placeholders for each medium as it has tokens. BadRecord: a medium
    cannot be used."""
    if not rules.media:
        return learned
    try:
        return _placed(learned, columns, rules.media, tokenizer, read_header)
    except BadMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def _placed(
    learned: Learned,
    columns: Columns,
    rules: MediaRules,
    tokenizer: Tokenizer,
    read_header: ReadHeader | None,
) -> Learned:
    """The same, piece by piece, so that the mask keeps its places. BadMedium."""
    encode = functools.partial(tokenizer.encode, special=False)
    waiting = {kind: iter(columns.get(kind, ())) for kind in Kind}
    tokens: list[int] = []
    mask: list[int] = []
    media: list[PromptMedium] = []
    pairs = zip(learned.loss_mask, learned.token_ids, strict=True)
    for is_learned, piece in groupby(pairs, itemgetter(0)):
        ids = [token for _, token in piece]
        sources = {
            kind: list(islice(waiting[kind], ids.count(place.placeholder)))
            for kind, place in rules.places
        }
        if is_learned and any(sources.values()):
            raise BadMedium(
                Reason.SPANS, "a medium stands in what the assistant says, which is learned"
            )
        ids, placed = rules.placed(ids, sources, encode, read_header)
        media += [medium.behind(len(tokens)) for medium in placed]
        tokens += ids
        mask += [is_learned] * len(ids)
    if unused := sum(len(list(values)) for values in waiting.values()):
        raise BadMedium(Reason.SPANS, f"{unused} media named that there is no place for")
    return Learned(tuple(tokens), tuple(mask), tuple(media))
