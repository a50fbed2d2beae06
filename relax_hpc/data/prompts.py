"""Prompts made of the rows of a file: text, token ids, answer and media, or the reason why a row is
bad."""

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
from relax_hpc.data.media import (
    MediaRules,
    PromptMedium,
    columns_of,
    read_placeholder_tokens,
    unsupported_kind,
)
from relax_hpc.data.messages import (
    ASSISTANT,
    Message,
    check_messages,
    left_out_message,
    says_something,
    without_null_fields,
)
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.named_media import Columns, kind_of_part, with_parts
from relax_hpc.data.row_files import RowLocations
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
    """All other fields of the line."""
    media: tuple[PromptMedium, ...] = ()
    """Media of the prompt, in the order of their placeholders."""
    order: float = 0.0
    """Value of the column `data.order_by`."""
    media_error: UnusableMedium | None = None
    """Reason why its media cannot be used now, although they could when its file was indexed. The
    other fields except `prompt_id` are empty then."""


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules by which a row becomes a prompt."""

    max_tokens: int
    special_tokens: tuple[str, ...] = ()
    """Setting `data.special_tokens`: where special tokens may stand."""
    template: ChatTemplate | None = None
    """Chat template; None: a row with messages is bad."""
    truncate_left: bool = False
    """Whether the last tokens of a prompt that is too long are used. If not, or if it has media,
    it is bad."""
    media: MediaRules | None = None
    """Rules for media; None: the model supports no media."""
    unsupported_columns: tuple[tuple[Kind, str], ...] = ()
    """Kinds of media that the model does not support, and the columns that would name them."""
    tools: str = ""
    """Signatures of the tools that a template shows, as JSON."""
    columns: ColumnRules = NO_COLUMNS
    """Rules for columns, and for ids of rows without an id."""

    @classmethod
    def from_config(
        cls,
        data: DataConfig,
        tokenizer: Tokenizer | None,
        folder: Path = Path(),
        set_name: str = "train",
    ) -> PromptRules:
        """Rules of a configuration for the set ``set_name``, whose files are in ``folder``.
        ConfigError: the chat template is missing or cannot be read."""
        template = template_for(data, tokenizer) if data.chat_template and tokenizer else None
        media = MediaRules.from_config(data, tokenizer.directory, folder) if tokenizer else None
        supported = read_placeholder_tokens(tokenizer.directory) if tokenizer else [*Kind]
        unsupported_columns = [
            (kind, column) for kind, column in columns_of(data) if kind not in supported
        ]
        return cls(
            data.max_prompt_tokens,
            tuple(data.special_tokens),
            template,
            truncate_left=data.truncate == "left",
            media=media,
            unsupported_columns=tuple(unsupported_columns),
            columns=ColumnRules.from_config(data, set_name),
        )

    of = from_config  # Name in release 0.1.

    def key_parts(self) -> list[Any]:
        """Values that decide what rows become, except for the tokenizer."""
        return [
            self.max_tokens,
            *self.special_tokens,
            self.template.key if self.template else "",
            self.truncate_left,
            *(self.media.key if self.media else []),
            *map(list, self.unsupported_columns),
            *([self.tools] if self.tools else []),
            self.columns.key,
        ]

    def with_tools(self, record: Record) -> Self:
        """The rules for one row, with the tools of its column `tools`, if any. BadRecord: it is not
        a list of signatures, or the template shows no tools."""
        tools = record.get("tools") or []
        if not self.template or not tools:
            return self
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRecord(
                "wrong_type",
                f"tools is {_describe_value(tools)}, allowed: a list of signatures as OpenAI's",
            )
        if not self.template.mentions("tools"):
            raise BadRecord(
                "chat_template", "the chat template shows no tools, and the row has some"
            )
        return replace(self, tools=json.dumps(without_null_fields(tools)))

    def parse_row(
        self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True
    ) -> Any:
        """The prompt of the row in line ``number``, or a `BadLine`; see `parse_rows`."""
        try:
            return self._parse_usable(number, record, tokenizer, tokens)
        except BAD_RECORD as error:
            return bad_line(number, error)

    read = parse_row  # Name in release 0.1.

    def _parse_usable(
        self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool
    ) -> Prompt:
        """The prompt of a row. One of `BAD_RECORD`: the row cannot be used."""
        row = self.columns.read(number, record, has_template=self.template is not None)
        source = next((name for name in ("token_ids", "messages") if name in row), "prompt")
        missing = [name for name in (source, "answer") if name not in row]
        if missing:
            raise BadRecord("missing_field", self.columns.missing(missing))
        prompt_id, order = row.pop("id"), self.columns.order(row)
        answer, value = row.pop("answer"), row.pop(source)
        if not isinstance(answer, str | int | float) or answer != answer:
            raise BadRecord("wrong_type", f"answer is {_describe_value(answer)}")
        columns = columns_in(row, self)
        ids: list[int] | None
        if source == "token_ids":
            check_ids(value, tokenizer.vocab_size if tokenizer else None)
            text = str(row.pop("prompt", "") or (tokenizer.decode(value) if tokenizer else ""))
            ids = value
        else:
            text, ids, columns = _encode(
                value, source, columns, tokenizer, self.with_tools(row), tokens
            )
        if not (text.strip() if ids is None else ids):
            raise BadRecord("empty_prompt", f"{source} is empty")
        ids, media = _with_media(ids, columns, tokenizer, self)
        ids = ids or []
        if len(ids) > self.max_tokens:
            if not self.truncate_left or media:
                raise BadRecord(
                    "over_long", f"{len(ids)} tokens, data.max_prompt_tokens is {self.max_tokens}"
                )
            ids = ids[-self.max_tokens :]
        # The columns that are left become metadata.
        return Prompt(prompt_id, tuple(ids), text, str(answer), row, tuple(media), order)

    def unusable(self, number: int, record: Record, media_error: UnusableMedium) -> Any:
        """The prompt of a row whose media could be used when its file was indexed, but cannot
        now."""
        prompt_id = self.columns.id_of(self.columns.renamed(record), number)
        return Prompt(prompt_id, (), "", "", media_error=media_error)

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Context in which many rows are read. At its end the child processes of the template and
        of media end."""
        try:
            yield
        finally:
            if self.template:
                self.template.close()
            if self.media:
                self.media.pool.close()


def parse_rows(
    rows: Iterable[Row], tokenizer: Tokenizer | None, rules: PromptRules, tokens: bool = True
) -> Iterator[Prompt | BadLine]:
    """The prompt of each row, or a `BadLine`. If rows have the same id, only the first is used.

    A row is {"id", "prompt" (text, or messages), "messages" or "token_ids", "answer", ...}. Other
    columns become metadata. A row without "id" gets the set's name and its number. Without a
    tokenizer, texts are not tokenized and lengths are not checked. If ``tokens`` is false, a text
    is only tokenized if its length cannot be bounded without that.
    """
    ids: set[str] = set()
    for row in rows:
        if isinstance(row, BadLine):
            yield row
            continue
        prompt = rules.parse_row(*row, tokenizer, tokens)
        if isinstance(prompt, BadLine):
            yield prompt
        elif prompt.prompt_id in ids:
            yield BadLine(row[0], "duplicate_id", f"id {prompt.prompt_id}")
        else:
            ids.add(prompt.prompt_id)
            yield prompt


prompts_of = parse_rows  # Name in release 0.1.


def prompt_of(
    number: int,
    record: Record,
    tokenizer: Tokenizer | None,
    rules: PromptRules,
    tokens: bool = True,
) -> Prompt | BadLine:
    """`PromptRules.parse_row` by its name in release 0.1."""
    return rules.parse_row(number, record, tokenizer, tokens)


BAD_RECORD = BadRecord, TokenizerError, RecursionError
"""Exceptions for a row that cannot be used."""


def bad_line(number: int, error: Exception) -> BadLine:
    """The bad row in line ``number``, for an ``error`` of `BAD_RECORD`."""
    if isinstance(error, BadRecord):
        return BadLine(number, *error.args)
    if isinstance(error, TokenizerError):
        return BadLine(number, "tokenizer", str(error))
    return BadLine(number, "broken_json", "nested too deep")


class RowCounts:
    """Counts of the rows of a prompt file, and of the bad ones by reason."""

    def __init__(
        self,
        rows: int = 0,
        counts: Mapping[str, int] | None = None,
        bad: Iterable[BadLine] = (),
        locations: RowLocations | None = None,
    ) -> None:
        """``counts``: number of bad lines by reason. ``bad``: the first of these lines."""
        self.rows, self.locations = rows, locations or RowLocations()
        self.counts = Counter(counts or {})
        self._first: dict[str, BadLine] = {}
        """First bad line of each reason."""
        for line in bad:
            self._first.setdefault(line.reason, line)

    @property
    def bad(self) -> int:
        return self.counts.total()

    def add(self, prompt: Prompt | BadLine) -> None:
        """Count another row."""
        self.rows += 1
        if isinstance(prompt, BadLine):
            self.count(prompt)

    def count(self, bad: BadLine) -> None:
        """Count a row as bad that `add` has counted as usable."""
        self.counts[bad.reason] += 1
        self._first.setdefault(bad.reason, bad)

    @property
    def reasons(self) -> str:
        """Number of bad rows by reason, each with the first such row and its detail."""
        texts: list[str] = []
        for reason, count in self.counts.most_common():
            first = self._first[reason]
            location = self.locations.describe(first.line)
            texts.append(f"{count} {reason} (first {location}: {first.detail})")
        return "; ".join(texts)

    def problem(self, max_bad_share: float, total: int) -> str:
        """Reason why a file of ``total`` rows cannot be used, with the bad ones counted here.

        Empty if it can be used.
        """
        if not total:
            return 'no prompts; write one {"id", "prompt", "answer"} a line'
        if self.bad < total and self.bad <= max_bad_share * total:
            return ""
        fix = "raise that limit, or " if "over_long" in self.counts else ""
        return (
            f"{self.bad} of {total} lines are bad: {self.reasons}; allowed share {max_bad_share}; "
            f"{fix}correct the file, or raise data.max_bad_share"
        )


Tally = RowCounts  # Name in release 0.1.


def columns_in(record: Record, rules: PromptRules) -> Columns:
    """Media that the columns of ``record`` name. The columns are removed from it. BadRecord: the
    model does not support such media."""
    for kind, column in rules.unsupported_columns:
        if record.get(column):
            bad = unsupported_kind(kind)
            hint = (
                f"data.multimodal_keys: {{{kind}: ''}} says that column {column!r} is something "
                "else"
            )
            raise BadRecord(bad.reason, f"{bad.detail}; {hint}")
    try:
        return rules.media.take_columns(record) if rules.media else {}
    except UnusableMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def prepare_messages(
    messages: list[Message], columns: Columns, rules: PromptRules
) -> tuple[list[Message], Columns]:
    """``messages`` for the template, and the media that they and ``columns`` name. BadRecord: a
    message cannot be used."""
    assert rules.template
    checked = check_messages(messages, rules.template.reads, rules.columns.ignored)
    try:
        if rules.media:
            return with_parts(checked, columns)
        for kind in _media_kinds(checked):
            raise unsupported_kind(kind)
    except UnusableMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None
    return checked, columns


def _media_kinds(messages: list[Message]) -> Iterator[Kind]:
    """Kinds of the media in ``messages``. UnusableMedium: a part is neither a text nor a medium."""
    for message in messages:
        if isinstance(message["content"], list):
            for part in message["content"]:
                if part.get("type") != "text":
                    yield kind_of_part(part)


def _with_media(
    ids: list[int] | None, columns: Columns, tokenizer: Tokenizer | None, rules: PromptRules
) -> tuple[list[int] | None, list[PromptMedium]]:
    """Tokens of a prompt, with one placeholder for each token of its media; and its media."""
    if ids is None or not (rules.media and tokenizer):
        return ids, []
    encode = functools.partial(tokenizer.encode, special=False)
    try:
        return rules.media.expand_placeholders(ids, columns, encode)
    except UnusableMedium as bad:
        raise BadRecord(bad.reason, bad.detail) from None


def is_chat(value: Any) -> bool:
    """Whether ``value`` is a list of chat messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and "role" in message for message in value)


def refuse_chat_as_text(name: str, value: Any) -> None:
    """BadRecord: ``value`` is a JSON text of chat messages. Some programs write such texts into
    tables."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or '"role"' not in value:
        return
    with suppress(ValueError, RecursionError):
        if is_chat(json.loads(value)):
            raise BadRecord(
                "wrong_type", f"{name} is a text of JSON with chat messages; store them as a list"
            )


def _encode(
    value: Any,
    source: str,
    columns: Columns,
    tokenizer: Tokenizer | None,
    rules: PromptRules,
    tokens: bool,
) -> tuple[str, list[int] | None, Columns]:
    """Text of a prompt, its tokens, and its media. ``value``: the value of the column ``source``, a
    text or messages. ``columns``: media that columns of the row name. None for the tokens: there is
    no tokenizer, or ``tokens`` is false and the prompt is short enough for sure."""
    refuse_chat_as_text(source, value)
    chat = is_chat(value)
    if not (chat or (isinstance(value, str) and source == "prompt")):
        raise BadRecord("wrong_type", f"{source} is {_describe_value(value)}")
    if chat and value[-1]["role"] == ASSISTANT:
        raise BadRecord(
            "answer_in_prompt",
            "the last message is the assistant's, which the policy would only have to repeat; "
            "remove it, or learn from it with algorithm.name sft",
        )
    if not tokenizer:
        return (value if isinstance(value, str) else json.dumps(value)), None, columns
    as_tokens = "prompt" in rules.special_tokens
    if chat and not rules.template:
        raise BadRecord(
            "wrong_type", f"{source} is a list of chat messages; set data.chat_template: model"
        )
    if isinstance(value, str) and not value.strip():
        return value, [], columns
    text = value
    if rules.template:
        chat_messages = value if chat else [{"role": "user", "content": value}]
        messages, columns = prepare_messages(chat_messages, columns, rules)
        if not any(says_something(message["content"]) for message in messages):
            raise BadRecord("empty_prompt", f"{source} has messages without content")
        text = rendered(messages, tokenizer, rules, as_tokens)
    needs_tokens = tokens or rules.media or not text.strip()
    if not needs_tokens and _fits_for_sure(text, tokenizer, rules):
        return text, None, columns
    if rules.template:
        return text, tokenizer.encode(text, special=False, special_tokens=True), columns
    if rules.media:
        return text, rules.media.encode_with_marks(text, columns, tokenizer, as_tokens), columns
    return text, tokenizer.encode(text, special_tokens=as_tokens), columns


def _fits_for_sure(text: str, tokenizer: Tokenizer, rules: PromptRules) -> bool:
    """Whether ``text`` is known to fit, without tokenizing it, which takes much longer."""
    max_count = tokenizer.max_token_count(text)
    if max_count is None:
        return False
    return rules.truncate_left or max_count <= rules.max_tokens


def rendered(
    messages: list[Any],
    tokenizer: Tokenizer,
    rules: PromptRules,
    as_tokens: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """Text of ``messages`` by the template of ``rules``, with the generation prompt if
    ``add_generation_prompt``. BadRecord: the template refuses the messages, or leaves out a text or
    a tool.

    Names of special tokens in the text will become these tokens. Messages must not contain them
    unless ``as_tokens``: a message could end a turn by such a name.
    """
    tools = json.loads(rules.tools or "[]")
    content = json.dumps([messages, tools], ensure_ascii=False)
    special_names = [name for name in tokenizer.special_names if name in content]
    if special_names and not as_tokens:
        raise BadRecord(
            "special_token", f"a message has {special_names[0]} in it, which would be a token"
        )
    assert rules.template
    try:
        text = rules.template.render(messages, add_generation_prompt, tools)
    except TemplateError as error:
        raise BadRecord("chat_template", str(error)) from None
    number = left_out_message(messages, text)
    if number is not None:
        role = messages[number]["role"]
        raise BadRecord(
            "chat_template", f"the chat template leaves out message {number} (role {role!r})"
        )
    hidden_tools = [name for name in map(_tool_name, tools) if name not in text]
    # A template that shows no tools at all is accepted: a policy may still learn the tools of its
    # environment by trying.
    if hidden_tools and rules.template.mentions("tools"):
        raise BadRecord(
            "chat_template", f"the chat template does not show the tool {hidden_tools[0]!r}"
        )
    return text


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name") or "")


def check_ids(ids: Any, vocab_size: int | None) -> None:
    """BadRecord: ``ids`` are not a list of token ids below ``vocab_size``."""
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise BadRecord("wrong_type", "token_ids is no list of integers")
    unknown = [number for number in ids if not 0 <= number < vocab_size] if vocab_size else []
    if unknown:
        raise BadRecord(
            "wrong_type", f"token_ids has {unknown[0]}, the tokenizer {vocab_size} tokens"
        )


def _describe_value(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
