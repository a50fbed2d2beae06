"""Prompts of the rows of a file."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.chat import ChatTemplate, TemplateError, template_of
from relax_hpc.data.media import MediaRules, PromptMedium, columns_of, not_taken, places_of
from relax_hpc.data.named_media import Columns, with_parts
from relax_hpc.data.row_files import Places
from relax_hpc.data.rows import BadLine, Record, Row
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.multimodal.bad import BadMedium
from relax_hpc.multimodal.medium import Kind


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
    fault: BadMedium | None = None
    """Reason why its media are of no use any more, though they were when its file was indexed; the rest is not known
    then."""


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules by which a row becomes a prompt."""

    max_tokens: int
    special_tokens: tuple[str, ...] = ()
    """Special tokens that a prompt may have, see `data.special_tokens`."""
    template: ChatTemplate | None = None
    """Template that makes text of messages; None: a row with messages is bad."""
    keeps_end: bool = False
    """Whether the last tokens of a prompt that is too long are taken; if not, or if it has media, it is bad."""
    media: MediaRules | None = None
    """Rules of media; None: a row has none, of which the model could make anything."""
    not_taken: tuple[tuple[Kind, str], ...] = ()
    """Kinds of media that the model does not take, and the columns that would name them."""
    tools: str = ""
    """Signatures of the tools that a template shows, as JSON."""

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Tokenizer | None, folder: Path = Path()) -> PromptRules:
        """Rules that a configuration says for the files of ``folder``. ConfigError: there is no such template."""
        template = None
        if data.chat_template and tokenizer:
            names = tuple(sorted(tokenizer.named.items()))
            about = tokenizer.directory, data.system, data.enable_thinking, names
            template = template_of(data.chat_template, *about)
        media = MediaRules.of(data, tokenizer.directory, folder) if tokenizer else None
        taken = places_of(tokenizer.directory) if tokenizer else [*Kind]
        never = tuple((kind, column) for kind, column in columns_of(data) if kind not in taken)
        return cls(data.max_prompt_tokens, tuple(data.special_tokens), template, data.truncate == "left", media, never)

    def about(self) -> list[Any]:
        """All that decides what rows become, but for the tokenizer."""
        template = self.template.key if self.template else ""
        media = self.media.key if self.media else []
        kinds, shown = map(list, self.not_taken), filter(None, [self.tools])
        return [self.max_tokens, *self.special_tokens, template, self.keeps_end, *media, *kinds, *shown]

    def with_tools(self, record: Record) -> Self:
        """The rules for one row, of whose column `tools` a template is told. BadRecord: there is something else."""
        tools = record.get("tools") or []
        if not self.template or not tools:
            return self
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRecord("wrong_type", f"tools is {_kind(tools)}, allowed: a list of signatures as OpenAI's")
        return replace(self, tools=json.dumps(tools))

    def read(self, number: int, record: Record, tokenizer: Tokenizer | None, tokens: bool = True) -> Any:
        """The prompt of the row in line ``number``, or why it has none, a `BadLine`; see `prompts_of`."""
        return prompt_of(number, record, tokenizer, self, tokens)

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Context in which rows are read; the processes of the template and of media end with it."""
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

    A row is {"id", "prompt" (text, or messages), "messages" or "token_ids", "answer", ...}; the rest becomes metadata.
    Without a tokenizer texts get no tokens, and no length is judged; without ``tokens`` only those whose length cannot
    be judged otherwise.
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
        return _prompt(record, tokenizer, how, tokens)
    except BadRecord as bad:
        return BadLine(number, *bad.args)


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

    def problem(self, max_bad_share: float, total: int) -> str:
        """Problem of a file of ``total`` rows of which so many are bad; empty if it will do."""
        if not total:
            return 'no prompts; write one {"id", "prompt", "answer"} a line'
        if self.bad < total and self.bad <= max_bad_share * total:
            return ""
        reasons = "; ".join(
            f"{count} {reason} (first {self.places.of(self._first[reason].line)}: {self._first[reason].detail})"
            for reason, count in self.counts.most_common()
        )
        cure = "raise that limit, or " if "over_long" in self.counts else ""
        return (
            f"{self.bad} of {total} lines are bad: {reasons}; allowed share {max_bad_share}; {cure}mend the file, or "
            "raise data.max_bad_share"
        )


class BadRecord(Exception):
    """Reason and detail of a row that is of no use."""


def _prompt(record: Record, tokenizer: Tokenizer | None, how: PromptRules, tokens: bool) -> Prompt:
    source = next((name for name in ("token_ids", "messages") if name in record), "prompt")
    if missing := [name for name in ("id", source, "answer") if name not in record]:
        raise BadRecord("missing_field", f"no {', no '.join(missing)}")
    rest = dict(record)
    prompt_id = id_of(rest)
    answer, given = rest.pop("answer"), rest.pop(source)
    if not isinstance(answer, str | int | float):
        raise BadRecord("wrong_type", f"answer is {_kind(answer)}")
    del rest["id"]
    for kind, column in how.not_taken:
        if rest.get(column):
            bad = not_taken(kind)
            raise BadRecord(bad.reason, bad.detail)
    sources = how.media.taken(rest) if how.media else {}
    if source != "token_ids":
        text, ids, sources = _encoded(given, source, sources, tokenizer, how.with_tools(rest), tokens)
    else:
        check_ids(given, tokenizer.vocab_size if tokenizer else None)
        text = str(rest.pop("prompt", "") or (tokenizer.decode(given) if tokenizer else ""))
        ids = given
    if not (text.strip() if ids is None else ids):
        raise BadRecord("empty_prompt", f"{source} is empty")
    ids, media = _with_media(ids, sources, tokenizer, how)
    if len(ids or ()) > how.max_tokens:
        if not how.keeps_end or media:
            raise BadRecord("over_long", f"{len(ids)} tokens, data.max_prompt_tokens is {how.max_tokens}")
        ids = ids[-how.max_tokens :]
    return Prompt(prompt_id, tuple(ids or ()), text, str(answer), rest, tuple(media))


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


def id_of(record: Record) -> str:
    """Id of a row. BadRecord: it has none."""
    if "id" not in record:
        raise BadRecord("missing_field", "no id")
    if not isinstance(record["id"], str | int):
        raise BadRecord("wrong_type", f"id is {_kind(record['id'])}")
    return str(record["id"])


def is_chat(given: Any) -> bool:
    """Whether ``given`` is a list of chat messages."""
    return isinstance(given, list) and bool(given) and all(isinstance(one, dict) and "role" in one for one in given)


def _encoded(
    given: Any, source: str, columns: Columns, tokenizer: Tokenizer | None, how: PromptRules, tokens: bool
) -> tuple[str, list[int] | None, Columns]:
    """The text of a prompt, by a template or as it is, its tokens, and the media it names, by ``columns`` of its row or
    by itself. None for tokens: they were not looked at."""
    chat = is_chat(given)
    if not (chat or (isinstance(given, str) and source == "prompt")):
        raise BadRecord("wrong_type", f"{source} is {_kind(given)}")
    if not tokenizer:
        return (given if isinstance(given, str) else json.dumps(given)), None, columns
    as_tokens = "prompt" in how.special_tokens
    if chat and not how.template:
        raise BadRecord("wrong_type", f"{source} is a list of chat messages; set data.chat_template: model")
    if isinstance(given, str) and not given.strip():
        return given, [], columns
    text = given
    if how.template:
        messages = given if chat else [{"role": "user", "content": given}]
        if how.media:
            messages, columns = with_parts(messages, columns)
        text = rendered(messages, tokenizer, how, as_tokens)
    looks = tokens or how.media or not text.strip()
    if not looks and (most := tokenizer.at_most(text)) and (how.keeps_end or most <= how.max_tokens):
        return text, None, columns
    if how.template:
        return text, tokenizer.encode(text, special=False, special_tokens=True), columns
    if how.media:
        return text, how.media.encoded(text, columns, tokenizer, as_tokens), columns
    return text, tokenizer.encode(text, special_tokens=as_tokens), columns


def rendered(
    messages: list[Any], tokenizer: Tokenizer, how: PromptRules, as_tokens: bool = False, whole: bool = False
) -> str:
    """Text that the template of ``how`` makes of messages, up to where the model answers, or ``whole``. In it the names
    of special tokens mean these; in the messages, unless ``as_tokens``, they must not stand: one could end a turn by
    them."""
    tools = json.loads(how.tools or "[]")
    given = json.dumps([messages, tools], ensure_ascii=False)
    if not as_tokens and (found := [name for name in tokenizer.special_names if name in given]):
        raise BadRecord("special_token", f"a message has {found[0]} in it, which would be a token")
    assert how.template
    try:
        return how.template.render(messages, whole, tools)
    except TemplateError as error:
        raise BadRecord("chat_template", str(error)) from None


def check_ids(given: Any, vocab: int | None) -> None:
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise BadRecord("wrong_type", "token_ids is no list of integers")
    if vocab and (wrong := [one for one in given if not 0 <= one < vocab]):
        raise BadRecord("wrong_type", f"token_ids has {wrong[0]}, the tokenizer {vocab} tokens")


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
