"""Training sequences from the rows of a file: demonstrations (SFT), and pairs of responses (DPO).

A demonstration has one of these forms:

- {"prompt" (a text, or messages) or "messages", "answer"}
- {"messages"}: a whole chat. All turns of the assistant are learned except those with `weight` 0.
- {"token_ids", "prompt_len"}

A pair is {"prompt" or "messages", "chosen", "rejected"}. Each of `chosen` and `rejected` is a text,
the messages that follow the prompt, or a whole chat. Learned is the part in which they differ.

Each row may have an "id", and media like rows of prompts, see `relax_hpc.data.media`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from relax_hpc.config.schema import Config
from relax_hpc.data.media import MediaRules, PromptMedium, ReadHeader
from relax_hpc.data.messages import ASSISTANT, Message, left_out_of_turn, says_nothing
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.named_media import Columns
from relax_hpc.data.prompts import (
    BAD_RECORD,
    PromptRules,
    bad_line,
    check_ids,
    columns_in,
    is_chat,
    prepare_messages,
    refuse_chat_as_text,
    rendered,
)
from relax_hpc.data.rows import BadLine, BadRecord, Record
from relax_hpc.data.tokenizer import Tokenizer

_WEIGHTS = (None, 0, 1)
"""Values of a message's `weight`, as in OpenAI's fine-tuning format. A message with 0 is not
learned."""
_LONG_PROMPT_CHARS = 16
"""An answer that begins with its prompt is refused, but only if the prompt has at least so many
characters: a short one may be repeated by chance."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A training sequence with the mask of its learned tokens."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 for tokens of the assistant, else 0."""
    media: tuple[PromptMedium, ...] = ()
    """Media of the sequence, in the order of their placeholders."""

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first learned token."""
        return self.loss_mask.index(1)


@dataclass(frozen=True, slots=True)
class Example:
    """One usable row."""

    prompt_id: str
    sequences: tuple[Learned, ...]
    """The demonstration, or the chosen and the rejected sequence; empty without a tokenizer."""
    order: float = 0.0
    """Value of the column `data.order_by`."""
    media_error: UnusableMedium | None = None
    """Reason why its media cannot be used now, although they could when its file was indexed."""


@dataclass(frozen=True, slots=True)
class ExampleRules(PromptRules):
    """Rules by which a row becomes an example; `max_tokens` limits a whole sequence."""

    sequences: int = 1
    """Sequences of a row: 1, or 2 if they are compared."""

    @classmethod
    def from_rules(cls, rules: PromptRules, max_tokens: int, sequences: int) -> Self:
        """All ``rules`` of prompts, with a limit of ``max_tokens`` for a whole sequence."""
        values = {field.name: getattr(rules, field.name) for field in fields(PromptRules)}
        return cls(**values | {"max_tokens": max_tokens}, sequences=sequences)

    def key_parts(self) -> list[Any]:
        """See `PromptRules`."""
        return [*PromptRules.key_parts(self), self.sequences]

    def parse_row(
        self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True
    ) -> Example | BadLine:
        """The example of the row in line ``number``, or the reason why the row is bad. It is always
        tokenized, so that a row that is too long is found when its file is indexed."""
        try:
            row = self.columns.read(number, record, has_template=self.template is not None)
            prompt_id, order = row["id"], self.columns.order(row)
            return Example(prompt_id, _sequences(row, tokenizer, self) if tokenizer else (), order)
        except BAD_RECORD as error:
            return bad_line(number, error)

    read = parse_row  # Name in release 0.1.

    def unusable(self, number: int, record: Record, media_error: UnusableMedium) -> Example:
        """See `PromptRules`."""
        return Example(
            self.columns.id_of(self.columns.renamed(record), number), (), media_error=media_error
        )


def rules_of(
    config: Config,
    tokenizer: Tokenizer | None,
    folder: Path = Path(),
    tools: Sequence[Mapping[str, Any]] = (),
    set_name: str = "train",
) -> PromptRules:
    """Rules by which rows of the set ``set_name``, with files in ``folder``, become prompts or
    examples. ``tools``: signatures of tools, shown in prompts whose rows have no column `tools`.
    ConfigError: see `PromptRules.from_config`."""
    rules = PromptRules.from_config(config.data, tokenizer, folder, set_name)
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
        length = len(sequence.token_ids)
        if length > rules.max_tokens:
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
    ``rules`` reads them. BadRecord: the row cannot be used."""
    record, rules = dict(record), rules.with_tools(record)
    columns = columns_in(record, rules)
    if "token_ids" in record:
        learned = _learn_ids(record, tokenizer)
        return _with_media(learned, columns, tokenizer, rules, read_header)
    prompt = _prompt_of(record, rules)
    is_whole_chat = is_chat(prompt) and prompt[-1]["role"] == ASSISTANT
    if is_whole_chat and "answer" in record:
        raise BadRecord(
            "answer_in_prompt",
            "the chat ends with the assistant's message, and there is an answer too; list "
            "'answer' in data.ignore_keys to learn the chat",
        )
    (answer,) = [[]] if is_whole_chat else _field_values(record, rules, "answer")
    if not rules.template:
        learned = _learn_texts(prompt, answer, columns, tokenizer, rules)
    elif is_whole_chat:
        learned, columns = _learn_chat(prompt, 0, columns, tokenizer, rules)
    else:
        messages = _messages(prompt, "user")
        chat = [*messages, *_messages(answer, ASSISTANT)]
        learned, columns = _learn_chat(chat, len(messages), columns, tokenizer, rules)
    return _with_media(learned, columns, tokenizer, rules, read_header)


def _learn_ids(record: Record, tokenizer: Tokenizer) -> Learned:
    ids, prompt_len = record["token_ids"], record.get("prompt_len")
    check_ids(ids, tokenizer.vocab_size)
    if type(prompt_len) is not int or not 0 < prompt_len <= len(ids):
        raise BadRecord("wrong_type", f"prompt_len is {prompt_len!r}, of {len(ids)} tokens")
    return Learned(tuple(ids), (0,) * prompt_len + (1,) * (len(ids) - prompt_len))


def _pair(record: Record, tokenizer: Tokenizer, rules: ExampleRules) -> list[Learned]:
    record = dict(record)
    columns = columns_in(record, rules)
    answers = _field_values(record, rules, "chosen", "rejected")
    if answers[0] == answers[1]:
        raise BadRecord("no_preference", "chosen and rejected are the same")
    prompt = _prompt_of(record, rules) if {"messages", "prompt"} & record.keys() else []
    if not rules.template:
        pair = [
            (_learn_texts(prompt, answer, columns, tokenizer, rules), columns) for answer in answers
        ]
    else:
        chats = _chats_of_pair(prompt, answers)
        shared = 0
        for chosen, rejected in zip(*chats, strict=False):
            if chosen != rejected:
                break
            shared += 1
        if any(chat[shared]["role"] != ASSISTANT for chat in chats if len(chat) > shared):
            raise BadRecord(
                "no_preference",
                f"message {shared}, where chosen and rejected differ, is not the assistant's",
            )
        pair = [_learn_chat(chat, shared, columns, tokenizer, rules) for chat in chats]
    return [_with_media(learned, media, tokenizer, rules, None) for learned, media in pair]


def _chats_of_pair(prompt: str | list[Message], answers: Sequence[Any]) -> list[list[Message]]:
    """The two whole chats of a pair. The prompt is a text or messages, and an answer may repeat it.
    BadRecord: an answer is a whole chat with another prompt."""
    messages = _messages(prompt, "user")
    chats = []
    for answer in answers:
        reply = _messages(answer, ASSISTANT)
        if not messages or reply[: len(messages)] == messages:
            chats.append(reply)
        elif reply[0]["role"] == ASSISTANT and messages[-1]["role"] != ASSISTANT:
            chats.append([*messages, *reply])
        elif reply[0]["role"] != ASSISTANT and all(message in reply for message in messages):
            # The answer is a whole chat, and the prompt is only its user message, without the
            # system message before it.
            chats.append(reply)
        else:
            raise BadRecord(
                "answer_in_prompt",
                "an answer is a chat that does not begin with the messages of the prompt",
            )
    return chats


def _prompt_of(record: Record, rules: PromptRules) -> Any:
    (value,) = _field_values(record, rules, "messages" if "messages" in record else "prompt")
    return value


def _field_values(record: Record, rules: PromptRules, *names: str) -> list[Any]:
    """Values of the fields ``names``, texts or messages. BadRecord: a field is missing, or has
    another type."""
    missing = [name for name in names if name not in record]
    if missing:
        raise BadRecord("missing_field", rules.columns.missing(missing))
    for name in names:
        refuse_chat_as_text(name, record[name])
        if not (isinstance(record[name], str) or is_chat(record[name])):
            kind = type(record[name]).__name__
            raise BadRecord("wrong_type", f"{name} is {kind}, no text and no chat messages")
    return [record[name] for name in names]


def _messages(value: str | list[Message], role: str) -> list[Message]:
    """``value`` as chat messages; a text becomes one message of ``role``."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _learn_texts(
    prompt: Any, answer: Any, columns: Columns, tokenizer: Tokenizer, rules: PromptRules
) -> Learned:
    """Sequence of a prompt and an answer without a template: the two texts, and the end token."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadRecord(
            "wrong_type", "it has chat messages, or no prompt; set data.chat_template: model"
        )
    if not answer:
        raise BadRecord("empty_answer", "nothing in it is learned")
    if len(prompt) >= _LONG_PROMPT_CHARS and answer.startswith(prompt):
        raise BadRecord(
            "answer_in_prompt",
            "the answer repeats the prompt, which would stand twice; remove it there",
        )
    as_tokens = "prompt" in rules.special_tokens
    if rules.media:
        prompt_ids = rules.media.encode_with_marks(prompt, columns, tokenizer, as_tokens)
    else:
        prompt_ids = tokenizer.encode(prompt, special_tokens=as_tokens)
    answer_ids = [*tokenizer.encode_after(prompt, answer), tokenizer.eos_ids[0]]
    mask = (0,) * len(prompt_ids) + (1,) * len(answer_ids)
    return Learned((*prompt_ids, *answer_ids), mask)


def _learn_chat(
    messages: list[Message], first: int, columns: Columns, tokenizer: Tokenizer, rules: PromptRules
) -> tuple[Learned, Columns]:
    """Sequence of a chat, and its media. The assistant's turns from message ``first`` on are
    learned; the text after the last of them is left out.

    Prompts and answers are tokenized separately, as in a rollout: no token spans both.
    """
    chat, columns = prepare_messages(messages, columns, rules)
    text = rendered(chat, tokenizer, rules, add_generation_prompt=False)
    ids: list[int] = []
    mask: list[int] = []
    start = 0
    for begin, end in _learned_turns(text, chat, first, tokenizer, rules):
        for piece_start, piece_end, is_learned in ((start, begin, 0), (begin, end, 1)):
            piece = text[piece_start:piece_end]
            tokens = tokenizer.encode_after(text[:piece_start], piece, special_tokens=True)
            ids += tokens
            mask += [is_learned] * len(tokens)
        start = end
    return Learned(tuple(ids), tuple(mask)), columns


def _learned_turns(
    text: str, chat: list[Message], first: int, tokenizer: Tokenizer, rules: PromptRules
) -> Iterator[tuple[int, int]]:
    """Begin and end, in ``text``, of each learned turn of the assistant. A turn begins after the
    generation prompt and includes the token that ends it."""
    for number in range(first, len(chat)):
        message = chat[number]
        if message["role"] != ASSISTANT or _weight(number, message) == 0:
            continue
        if says_nothing(message):
            raise BadRecord("empty_answer", f"message {number} is empty, and would be learned")
        prompt = rendered(chat[:number], tokenizer, rules) if number else ""
        if not prompt or not text.startswith(prompt):
            raise BadRecord(
                "chat_template",
                f"message {number} does not begin with the template's generation prompt; store "
                "only the last turn, as `answer`",
            )
        until = rendered(chat[: number + 1], tokenizer, rules, add_generation_prompt=False)
        missing = left_out_of_turn(message, until[len(prompt) :])
        if missing:
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
    """Index in ``text`` of the end of the turn that begins at ``begin``; None: its end is unclear.
    ``until``: the text of the same chat up to the end of this turn.

    A turn ends with the first token that ends a response. If it has none, it ends with its last
    special token: Llama 3.1 ends a tool call by `<|eom_id|>`. In ``text`` the turn may be shorter,
    because templates drop earlier thoughts, but it must have the same special tokens.
    """
    # A config.json may name an id that the tokenizer lacks.
    ends = set(filter(None, map(tokenizer.name_of, tokenizer.eos_ids)))
    names = sorted({*tokenizer.special_names, *ends}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)))
    expected = [match[0] for match in pattern.finditer(until, begin)]
    if not expected:
        return None
    last = next((index for index, name in enumerate(expected) if name in ends), len(expected) - 1)
    matches = list(islice(pattern.finditer(text, begin), last + 1))
    if [match[0] for match in matches] != expected[: last + 1]:
        return None
    return matches[last].end()


def _with_media(
    learned: Learned,
    columns: Columns,
    tokenizer: Tokenizer,
    rules: PromptRules,
    read_header: ReadHeader | None,
) -> Learned:
    """``learned`` with one placeholder for each token of its media. BadRecord: a medium cannot be
    used."""
    if not rules.media:
        return learned
    try:
        return _expand_placeholders(learned, columns, rules.media, tokenizer, read_header)
    except UnusableMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def _expand_placeholders(
    learned: Learned,
    columns: Columns,
    rules: MediaRules,
    tokenizer: Tokenizer,
    read_header: ReadHeader | None,
) -> Learned:
    """The same for runs of equal mask one after the other, so that the mask fits the new tokens.
    UnusableMedium: a medium cannot be used, or stands in a learned run."""
    encode = functools.partial(tokenizer.encode, special=False)
    pending = {kind: iter(columns.get(kind, ())) for kind in Kind}
    tokens: list[int] = []
    mask: list[int] = []
    media: list[PromptMedium] = []
    pairs = zip(learned.loss_mask, learned.token_ids, strict=True)
    for is_learned, piece in groupby(pairs, itemgetter(0)):
        ids = [token for _, token in piece]
        sources = {
            kind: list(islice(pending[kind], ids.count(tokens_of_kind.placeholder)))
            for kind, tokens_of_kind in rules.placeholders
        }
        if is_learned and any(sources.values()):
            raise UnusableMedium(
                Reason.SPANS, "a medium stands in a turn of the assistant that is learned"
            )
        ids, run_media = rules.expand_placeholders(ids, sources, encode, read_header)
        media += [medium.shifted(len(tokens)) for medium in run_media]
        tokens += ids
        mask += [is_learned] * len(ids)
    unused = sum(len(list(values)) for values in pending.values())
    if unused:
        raise UnusableMedium(Reason.SPANS, f"{unused} media named that there is no place for")
    return Learned(tuple(tokens), tuple(mask), tuple(media))
