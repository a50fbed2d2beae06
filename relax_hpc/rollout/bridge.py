"""Tokens between two turns of the policy: what others say, as the run's chat template has it.

History is never tokenised again: what is around messages comes from the template once, and each message is tokenised
with what is around it, behind tokens that stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_hpc.data.chat import ChatTemplate, TemplateError
from relax_hpc.data.media import Place
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import EnvironmentFault, Message, Part, Role
from relax_hpc.multimodal.medium import Kind

_NOTE = "\n[cut here: {} more tokens]"
"""End of a text that is longer than an observation may be."""
_BYTES = 4
"""Bytes of a character, at most."""
_MARK = "mark-{}-of-a-message"
"""Content by which the place of a message is found in what a template makes."""


@dataclass(frozen=True, slots=True)
class _Around:
    """Texts around messages of some roles: what ends the turn before, what stands before, between and behind them."""

    end: str
    texts: tuple[str, ...]


class Bridge:
    """Bridge from turn to turn of one run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        places: Mapping[Kind, Place] | None = None,
        most: int = 1 << 20,
        note_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """``template``: None where prompts are texts as they stand, between which nothing is put. ``places``: those of
        media, by kind. ``most``: tokens of the texts of a message; ``note_cut`` is called for each that has more."""
        self._tokenizer, self._template, self._places, self._most = tokenizer, template, dict(places or {}), most
        self._known: dict[tuple[Role, ...], _Around] = {}
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        self._ids = {name: tokenizer.encode(name, special=False, special_tokens=True) for name in names}
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._opening = self._opens() if template else []
        self._note_cut = note_cut

    def tokens(self, before: Sequence[int], messages: Sequence[Message], is_prompt: bool) -> tuple[int, list[int]]:
        """Number of the tokens ``before`` that stay, and those that follow, a medium's placeholder once for each.

        ``is_prompt``: nothing of it was sampled, so that what would have the policy speak at its end is left out.
        EnvironmentFault: nothing follows, or the template takes no such messages.
        """
        around = self._around(tuple(message.role for message in messages))
        kept = len(before) - len(self._opening)
        if is_prompt and self._opening and list(before[kept:]) == self._opening:
            # The line break after the end of a turn stands before what is left out.
            return kept, self._joined(messages, (around.texts[0].removeprefix("\n"), *around.texts[1:]))
        end = "" if before[-1] in self._tokenizer.eos_ids else around.end
        return len(before), self._joined(messages, (end + around.texts[0], *around.texts[1:]))

    def _joined(self, messages: Sequence[Message], around: Sequence[str]) -> list[int]:
        ids, plain = list[int](), ""
        for piece in self._pieces(messages, around):
            if isinstance(piece, str):
                # One text, as its tokens may reach over the beginning and the end of a message.
                plain += piece
                continue
            ids += [*self._plain(plain), *piece]
            plain = ""
        ids += self._plain(plain)
        if not ids:
            raise EnvironmentFault("environment_answer", "found an empty observation, allowed: text or media")
        return ids

    def _pieces(self, messages: Sequence[Message], around: Sequence[str]) -> Iterator[str | list[int]]:
        """Texts in which no token is special, and tokens that are."""
        yield from self._of_template(around[0])
        for message, behind in zip(messages, around[1:], strict=True):
            for part in self._shortened(message.parts):
                if isinstance(part, str):
                    yield part
                elif Kind(part.kind) in self._places:
                    yield list(self._places[Kind(part.kind)].tokens)
                else:
                    raise EnvironmentFault("environment_answer", f"found {part.kind}, of which the model takes none")
            yield from self._of_template(behind)

    def _of_template(self, text: str) -> Iterator[str | list[int]]:
        start = 0
        for found in self._special.finditer(text):
            yield text[start : found.start()]
            yield self._ids[found[0]]
            start = found.end()
        yield text[start:]

    def _plain(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EnvironmentFault("environment_answer", f"found a text that is not Unicode: {error}") from error
        return self._tokenizer.encode(text, special=False) if text else []

    def _shortened(self, parts: Sequence[Part]) -> Sequence[Part]:
        """``parts`` with texts of as many tokens as are allowed together; where they had more, a note says so."""
        texts = [part for part in parts if isinstance(part, str)]
        # A character of any language has no more tokens than bytes.
        if sum(map(len, texts)) * _BYTES <= self._most or sum(len(self._plain(one)) for one in texts) <= self._most:
            return parts
        self._note_cut()
        short, left = list[Part](), self._most
        for part in parts:
            if isinstance(part, str):
                ids = self._plain(part)
                part = part if len(ids) <= left else self._tokenizer.decode(ids[:left]) + _NOTE.format(len(ids) - left)
                left = max(0, left - len(ids))
            short.append(part)
        return short

    def _around(self, roles: tuple[Role, ...]) -> _Around:
        if not self._template:
            return _Around("", ("",) * (len(roles) + 1))
        if roles not in self._known:
            self._known[roles] = self._rendered(roles, self._template)
        return self._known[roles]

    def _rendered(self, roles: tuple[Role, ...], template: ChatTemplate) -> _Around:
        marks = [_MARK.format(number) for number in range(len(roles) + 1)]
        turns = [{"role": "user", "content": "text"}, {"role": "assistant", "content": marks[0]}]
        said = [{"role": role, "content": mark} for role, mark in zip(roles, marks[1:], strict=True)]
        try:
            text = template.render([*turns, *said])
        except TemplateError as error:
            raise EnvironmentFault(
                "environment_answer", f"the chat template takes no messages of {' and '.join(roles)}: {error}"
            ) from error
        texts = re.split("|".join(marks), text)
        if len(texts) != len(marks) + 1:
            raise EnvironmentFault("environment_answer", f"the chat template leaves out messages of {roles}")
        names = filter(None, map(self._tokenizer.name_of, self._tokenizer.eos_ids))
        end = next((name for name in names if texts[1].startswith(name)), "")
        return _Around(end, (texts[1].removeprefix(end), *texts[2:]))

    def _opens(self) -> list[int]:
        """Tokens at the end of a prompt by which the policy is to speak."""
        assert self._template
        asked = [{"role": "user", "content": "text"}]
        whole, without = self._template.render(asked), self._template.render(asked, whole=True)
        opening = whole.removeprefix(without)
        return self._tokenizer.encode(opening, special=False, special_tokens=True) if opening != whole else []
