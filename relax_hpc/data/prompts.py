"""Prompts of the rows of a file."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.chat import ChatTemplate, TemplateError, template_for
from relax_hpc.data.columns import NO_COLUMNS, ColumnRules
from relax_hpc.data.media import MediaRules, PromptMedium, columns_of, not_taken, places_of
from relax_hpc.data.messages import (
    ASSISTANT,
    Message,
    check_messages,
    left_out_message,
    says_something,
    without_null_fields,
)
from relax_hpc.data.multimodal.bad_media import BadMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.named_media import Columns, kind_of_part, with_parts
from relax_hpc.data.row_files import Places
from relax_hpc.data.rows import BadLine, BadRecord, Record, Row
from relax_hpc.data.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One usable line of a prompt file."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """Fields of the line besides these."""
    media: tuple[PromptMedium, ...] = ()
    """Media that the prompt has places for, in their order."""
    order: float = 0.0
    """Value of the column `data.order_by`."""
    fault: BadMedium | None = None
    """Reason why its media are of no use any more, though they were when its file was indexed; the
    rest is not known then."""


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules by which a row becomes a prompt."""

    max_tokens: int
    special_tokens: tuple[str, ...] = ()
    """Special tokens that a prompt may have, see `data.special_tokens`."""
    template: ChatTemplate | None = None
    """Template that makes text of messages; None: a row with messages is bad."""
    keeps_end: bool = False
    """Whether the last tokens of a prompt that is too long are taken; if not, or if it has media,
    it is bad."""
    media: MediaRules | None = None
    """Rules of media; None: a row has none, of which the model could make anything."""
    not_taken: tuple[tuple[Kind, str], ...] = ()
    """Kinds of media that the model does not take, and the columns that would name them."""
    tools: str = ""
    """Signatures of the tools that a template shows, as JSON."""
    columns: ColumnRules = NO_COLUMNS
    """Columns of the rows, and ids of rows that have none."""

    @classmethod
    def of(
        cls,
        data: DataConfig,
        tokenizer: Tokenizer | None,
        folder: Path = Path(),
        set_name: str = "train",
    ) -> PromptRules:
        """Rules of a configuration for the files of ``folder``, which are the set ``set_name``.
        ConfigError: there is no such template."""
        template = template_for(data, tokenizer) if data.chat_template and tokenizer else None
        media = MediaRules.of(data, tokenizer.directory, folder) if tokenizer else None
        taken = places_of(tokenizer.directory) if tokenizer else [*Kind]
        refused = tuple((kind, column) for kind, column in columns_of(data) if kind not in taken)
        return cls(
            data.max_prompt_tokens,
            tuple(data.special_tokens),
            template,
            keeps_end=data.truncate == "left",
            media=media,
            not_taken=refused,
            columns=ColumnRules.from_config(data, set_name),
        )

    def about(self) -> list[Any]:
        """All that decides what rows become, but for the tokenizer."""
        template = self.template.key if self.template else ""
        media = self.media.key if self.media else []
        kinds, shown = map(list, self.not_taken), filter(None, [self.tools])
        columns = self.columns.key
        return [
            self.max_tokens,
            *self.special_tokens,
            template,
            self.keeps_end,
            *media,
            *kinds,
            *shown,
            columns,
        ]

    def with_tools(self, record: Record) -> Self:
        """The rules for one row, whose column `tools` the template shows. BadRecord: it is no list
        of signatures."""
        tools = record.get("tools") or []
        if not self.template or not tools:
            return self
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRecord(
                "wrong_type", f"tools is {_kind(tools)}, allowed: a list of signatures as OpenAI's"
            )
        if not self.template.mentions("tools"):
            raise BadRecord(
                "chat_template", "the chat template shows no tools, and the row has some"
            )
        return replace(self, tools=json.dumps(without_null_fields(tools)))

    def read(
        self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True
    ) -> Any:
        """The prompt of the row in line ``number``, or why it has none, a `BadLine`; see
        `prompts_of`."""
        return prompt_of(number, record, tokenizer, self, tokens)

    def unusable(self, number: int, record: Record, fault: BadMedium) -> Any:
        """The prompt of a row whose media could be used when its file was indexed, and cannot
        now."""
        return Prompt(
            self.columns.id_of(self.columns.renamed(record), number), (), "", "", fault=fault
        )

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Context in which rows are read; the processes of the template and of media end with
        it."""
        try:
            yield
        finally:
            for process in (self.template, self.media and self.media.pool):
                if process:
                    process.close()


def prompts_of(
    rows: Iterable[Row], tokenizer: Tokenizer | None, how: PromptRules, tokens: bool = True
) -> Iterator[Prompt | BadLine]:
    """The prompt of each row, or why it has none; of one id the first counts.

    A row is {"id", "prompt" (text, or messages), "messages" or "token_ids", "answer", ...}; other
    columns become metadata, and a row without "id" gets one of its set and number. Without a
    tokenizer texts get no tokens, and no length is judged; without ``tokens`` only those whose
    length cannot be judged otherwise.
    """
    seen: set[str] = set()
    for row in rows:
        found = row if isinstance(row, BadLine) else how.read(*row, tokenizer, tokens)
        if not isinstance(found, BadLine):
            if found.prompt_id in seen:
                found = BadLine(row[0], "duplicate_id", f"id {found.prompt_id}")
            else:
                seen.add(found.prompt_id)
        yield found


def prompt_of(
    number: int, record: Record, tokenizer: Tokenizer | None, how: PromptRules, tokens: bool = True
) -> Prompt | BadLine:
    """The prompt of the row in line ``number``, or why it has none; see `prompts_of`."""
    try:
        return _prompt(number, record, tokenizer, how, tokens)
    except BAD_RECORD as error:
        return bad_line(number, error)


BAD_RECORD = BadRecord, TokenizerError, RecursionError
"""Errors of a row that cannot be used."""


def bad_line(number: int, error: Exception) -> BadLine:
    """Reason why the row in line ``number`` is not used, from one of `BAD_RECORD`."""
    if isinstance(error, BadRecord):
        return BadLine(number, *error.args)
    if isinstance(error, TokenizerError):
        return BadLine(number, "tokenizer", str(error))
    return BadLine(number, "broken_json", "nested too deep")


class Tally:
    """Rows of a prompt file, counted as they pass."""

    def __init__(
        self,
        rows: int = 0,
        counts: Mapping[str, int] | None = None,
        bad: Iterable[BadLine] = (),
        places: Places | None = None,
    ) -> None:
        """``counts``: of bad lines by reason. ``bad``: the first of them."""
        self.rows, self.places = rows, places or Places()
        self.counts = Counter(counts or {})
        self._first: dict[str, BadLine] = {}
        """First bad line of each reason."""
        for line in bad:
            self._first.setdefault(line.reason, line)

    @property
    def bad(self) -> int:
        return self.counts.total()

    def add(self, one: Prompt | BadLine) -> None:
        """Count another row."""
        self.rows += 1
        if isinstance(one, BadLine):
            self.count(one)

    def count(self, bad: BadLine) -> None:
        """Count a row as bad that was counted before."""
        self.counts[bad.reason] += 1
        self._first.setdefault(bad.reason, bad)

    @property
    def reasons(self) -> str:
        """Number of bad rows by reason, each with the first row and why it is bad."""
        return "; ".join(
            f"{count} {reason} (first {self.places.of(self._first[reason].line)}: "
            f"{self._first[reason].detail})"
            for reason, count in self.counts.most_common()
        )

    def problem(self, max_bad_share: float, total: int) -> str:
        """Problem of a file of ``total`` rows of which so many are bad; empty if it will do."""
        if not total:
            return 'no prompts; write one {"id", "prompt", "answer"} a line'
        if self.bad < total and self.bad <= max_bad_share * total:
            return ""
        cure = "raise that limit, or " if "over_long" in self.counts else ""
        return (
            f"{self.bad} of {total} lines are bad: {self.reasons}; allowed share {max_bad_share}; "
            f"{cure}mend the file, or raise data.max_bad_share"
        )


def _prompt(
    number: int, record: Record, tokenizer: Tokenizer | None, how: PromptRules, tokens: bool
) -> Prompt:
    rest = how.columns.read(number, record, has_template=how.template is not None)
    source = next((name for name in ("token_ids", "messages") if name in rest), "prompt")
    if missing := [name for name in (source, "answer") if name not in rest]:
        raise BadRecord("missing_field", how.columns.missing(missing))
    prompt_id, order = rest.pop("id"), how.columns.order(rest)
    answer, given = rest.pop("answer"), rest.pop(source)
    if not isinstance(answer, str | int | float) or answer != answer:
        raise BadRecord("wrong_type", f"answer is {_kind(answer)}")
    sources = columns_in(rest, how)
    if source != "token_ids":
        text, ids, sources = _encoded(
            given, source, sources, tokenizer, how.with_tools(rest), tokens
        )
    else:
        check_ids(given, tokenizer.vocab_size if tokenizer else None)
        text = str(rest.pop("prompt", "") or (tokenizer.decode(given) if tokenizer else ""))
        ids = given
    if not (text.strip() if ids is None else ids):
        raise BadRecord("empty_prompt", f"{source} is empty")
    ids, media = _with_media(ids, sources, tokenizer, how)
    if len(ids or ()) > how.max_tokens:
        if not how.keeps_end or media:
            raise BadRecord(
                "over_long", f"{len(ids)} tokens, data.max_prompt_tokens is {how.max_tokens}"
            )
        ids = ids[-how.max_tokens :]
    return Prompt(prompt_id, tuple(ids or ()), text, str(answer), rest, tuple(media), order)


def columns_in(record: Record, how: PromptRules) -> Columns:
    """Media that the columns of ``record`` name, which are taken out of it. BadRecord: the model
    takes none of a kind."""
    for kind, column in how.not_taken:
        if record.get(column):
            bad = not_taken(kind)
            hint = (
                f"data.multimodal_keys: {{{kind}: ''}} says that column {column!r} is something "
                "else"
            )
            raise BadRecord(bad.reason, f"{bad.detail}; {hint}")
    try:
        return how.media.taken(record) if how.media else {}
    except BadMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def chat_in(
    messages: list[Message], columns: Columns, how: PromptRules
) -> tuple[list[Message], Columns]:
    """``messages`` as the template takes them, and the media that they and ``columns`` name.
    BadRecord: a message cannot be used."""
    assert how.template
    checked = check_messages(messages, how.template.reads, how.columns.ignored)
    try:
        if how.media:
            return with_parts(checked, columns)
        for kind in _media_kinds(checked):
            raise not_taken(kind)
    except BadMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None
    return checked, columns


def _media_kinds(messages: list[Message]) -> Iterator[Kind]:
    """Kinds of the media in ``messages``. BadMedium: a part is none."""
    for message in messages:
        parts = message["content"] if isinstance(message["content"], list) else []
        for part in parts:
            if part.get("type") != "text":
                yield kind_of_part(part)


def _with_media(
    ids: list[int] | None, sources: Columns, tokenizer: Tokenizer | None, how: PromptRules
) -> tuple[list[int] | None, list[PromptMedium]]:
    """Tokens of a prompt, those that stand for media included, and its media."""
    if ids is None or not (how.media and tokenizer):
        return ids, []
    try:
        return how.media.placed(ids, sources, functools.partial(tokenizer.encode, special=False))
    except BadMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def is_chat(given: Any) -> bool:
    """Whether ``given`` is a list of chat messages."""
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(one, dict) and "role" in one for one in given)
    )


def refuse_chat_as_text(name: str, value: Any) -> None:
    """BadRecord: ``value`` is chat messages as one text of JSON, as some programs write them into
    tables."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or '"role"' not in value:
        return
    with suppress(ValueError, RecursionError):
        if is_chat(json.loads(value)):
            raise BadRecord(
                "wrong_type", f"{name} is a text of JSON with chat messages; store them as a list"
            )


def _encoded(
    given: Any,
    source: str,
    columns: Columns,
    tokenizer: Tokenizer | None,
    how: PromptRules,
    tokens: bool,
) -> tuple[str, list[int] | None, Columns]:
    """The text of a prompt, by a template or as it is, its tokens, and the media it names, by
    ``columns`` of its row or by itself. None for tokens: they were not looked at."""
    refuse_chat_as_text(source, given)
    chat = is_chat(given)
    if not (chat or (isinstance(given, str) and source == "prompt")):
        raise BadRecord("wrong_type", f"{source} is {_kind(given)}")
    if chat and given[-1]["role"] == ASSISTANT:
        raise BadRecord(
            "answer_in_prompt",
            "the last message is the assistant's, which the policy would only have to repeat; "
            "remove it, or learn from it with algorithm.name sft",
        )
    if not tokenizer:
        return (given if isinstance(given, str) else json.dumps(given)), None, columns
    as_tokens = "prompt" in how.special_tokens
    if chat and not how.template:
        raise BadRecord(
            "wrong_type", f"{source} is a list of chat messages; set data.chat_template: model"
        )
    if isinstance(given, str) and not given.strip():
        return given, [], columns
    text = given
    if how.template:
        messages, columns = chat_in(
            given if chat else [{"role": "user", "content": given}], columns, how
        )
        if not any(says_something(message["content"]) for message in messages):
            raise BadRecord("empty_prompt", f"{source} has messages without content")
        text = rendered(messages, tokenizer, how, as_tokens)
    looks = tokens or how.media or not text.strip()
    if (
        not looks
        and (most := tokenizer.at_most(text))
        and (how.keeps_end or most <= how.max_tokens)
    ):
        return text, None, columns
    if how.template:
        return text, tokenizer.encode(text, special=False, special_tokens=True), columns
    if how.media:
        return text, how.media.encoded(text, columns, tokenizer, as_tokens), columns
    return text, tokenizer.encode(text, special_tokens=as_tokens), columns


def rendered(
    messages: list[Any],
    tokenizer: Tokenizer,
    how: PromptRules,
    as_tokens: bool = False,
    whole: bool = False,
) -> str:
    """Text that the template of ``how`` makes of messages, up to where the model answers, or
    ``whole``. In it the names of special tokens mean these; in the messages, unless ``as_tokens``,
    they must not stand: one could end a turn by them."""
    tools = json.loads(how.tools or "[]")
    given = json.dumps([messages, tools], ensure_ascii=False)
    if not as_tokens and (found := [name for name in tokenizer.special_names if name in given]):
        raise BadRecord("special_token", f"a message has {found[0]} in it, which would be a token")
    assert how.template
    try:
        text = how.template.render(messages, whole, tools)
    except TemplateError as error:
        raise BadRecord("chat_template", str(error)) from None
    if (number := left_out_message(messages, text)) is not None:
        role = messages[number]["role"]
        raise BadRecord(
            "chat_template", f"the chat template leaves out message {number} (role {role!r})"
        )
    hidden = [name for name in map(_name_of_tool, tools) if name not in text]
    # If the template shows no tools at all, a policy may still learn those of its environment by
    # trying.
    if hidden and how.template.mentions("tools"):
        raise BadRecord("chat_template", f"the chat template does not show the tool {hidden[0]!r}")
    return text


def _name_of_tool(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name") or "")


def check_ids(given: Any, vocab: int | None) -> None:
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise BadRecord("wrong_type", "token_ids is no list of integers")
    if vocab and (wrong := [one for one in given if not 0 <= one < vocab]):
        raise BadRecord("wrong_type", f"token_ids has {wrong[0]}, the tokenizer {vocab} tokens")


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
