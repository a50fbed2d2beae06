"""Chat messages rendered to text by a model's chat template.

This is the only code of the package that renders. Callers: `data.prompts.rendered` (prompts, and
examples of sft), `rollout.episodes.chat_tokens` (environments and agents). For a judge, SGLang
renders.

A template is a program that comes with the model, and is not trusted. It runs in jinja2's sandbox,
in a child process (`relax_hpc.data.template_process`, one of `relax_hpc.net.workers`) with limits
on CPU time and memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.data.template_files import DEFAULT, choose_template, find_templates
from relax_hpc.data.template_process import MEMORY_BYTES, RENDER_CPU_S
from relax_hpc.net.workers.blocking import BlockingWorker
from relax_hpc.net.workers.process import ATTEMPTS, WorkerEnded

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

ANSWER_S = 120.0
"""Seconds to wait for one text. The child's own limit counts CPU time, so a busy or suspended node
does not fail a prompt."""
UNUSABLE_TEXTS = 3
"""Texts on which a template may exceed its limits before it has rendered any. It is refused
then."""
_OVER_LIMIT = -signal.SIGPROF
"""Exit code of a child that took more CPU time than allowed."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, None)
"""Exit codes of a child that another process killed or suspended, see `WorkerEnded`. They say
nothing about the template."""
_MODULE = "relax_hpc.data.template_process"


class TemplateError(Exception):
    """The template does not accept these messages, or cannot be used at all."""


class ChatTemplate:
    """The templates of a model and the variables that they see. Threads may share one object."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        variables: Mapping[str, Any],
        system: str = "",
        day: str = "",
    ) -> None:
        """``sources``: one template, or several by name; a chat with tools uses `tool_use`.
        ``variables``: variables that the template sees in addition to the messages. ``system``:
        text of a system message that is put before chats without one; empty: none. ``day``: the
        date, YYYY-MM-DD, that `strftime_now` formats; empty: today."""
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self._setup = {
            "sources": self._sources,
            "variables": dict(variables),
            "day": day or str(date.today()),
        }
        self._system = system
        self._child: BlockingWorker | None = None
        self._lock = threading.Lock()
        self._has_rendered = False
        self._failed_texts = 0

    @property
    def key(self) -> str:
        """Hash of everything that decides what the template renders. The date counts only if a
        template reads it."""
        setup = dict(self._setup)
        if not self.mentions("strftime_now"):
            del setup["day"]
        return hashlib.sha256(
            json.dumps([setup, self._system], sort_keys=True).encode()
        ).hexdigest()

    def mentions(self, name: str) -> bool:
        """Whether a template contains ``name`` as a whole word, in its code or in its text."""
        pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        return any(pattern.search(source) for source in self._sources.values())

    def reads(self, key: str) -> bool:
        """Whether a template reads the ``key`` of an object, as `message.key` or `message["key"]`.
        The key as a word in the template's text does not count."""
        pattern = re.compile(rf"[.'\"]{re.escape(key)}(?!\w)")
        return any(pattern.search(source) for source in self._sources.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Text of ``messages``. ``add_generation_prompt``: with the generation prompt at the end,
        after which the model answers. ``tools``: signatures of the functions that the model may
        call. TemplateError: the template refuses the messages."""
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            name = choose_template(self._sources, bool(tools))
        except ValueError as error:
            raise TemplateError(str(error)) from None
        request = {
            "template": name,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
        }
        with self._lock:
            answer = self._ask_child(request)
        if "error" in answer:
            raise TemplateError(escape_line(answer["error"]))
        return answer["text"]

    def close(self) -> None:
        """End the child process; the next text starts another."""
        with self._lock:
            if self._child:
                self._child.end()

    def _ask_child(self, request: dict[str, Any]) -> dict[str, Any]:
        """Response of the child process. TemplateError: this text exceeds the limits, or the child
        was killed at each attempt. ConfigError: UNUSABLE_TEXTS texts exceeded the limits, and none
        was rendered before."""
        for _ in range(ATTEMPTS):
            try:
                if self._child is None or self._child.has_ended:
                    self._child = _start_worker(self._setup)
                answer = self._child.ask(request, ANSWER_S)
                self._has_rendered = True
                return answer
            except (TypeError, ValueError, RecursionError) as error:
                raise TemplateError(f"not JSON: {escape_line(str(error))}") from None
            except WorkerEnded as error:
                child_end = error
                if error.code == _OVER_LIMIT:
                    break
        self._failed_texts += child_end.code not in _FROM_OUTSIDE
        limits = f"{RENDER_CPU_S} s of CPU time and {MEMORY_BYTES >> 20} MiB a text"
        reason = f"the template's process {child_end}; allowed: {limits}"
        if not self._has_rendered and self._failed_texts >= UNUSABLE_TEXTS:
            raise ConfigError(
                f"data.chat_template: {reason}; {self._failed_texts} texts, none rendered"
            )
        raise TemplateError(reason)


def _start_worker(setup: dict[str, Any]) -> BlockingWorker:
    """A child process that renders. WorkerEnded: see `BlockingWorker`. ConfigError: it refuses the
    template."""
    try:
        return BlockingWorker(_MODULE, setup)
    except ConfigError as error:
        raise ConfigError(f"data.chat_template: {error}") from None


def template_for(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that a configuration chooses, with the variables of ``tokenizer``. ConfigError:
    the template is missing or cannot be read."""
    extra = json.dumps(data.chat_template_kwargs, sort_keys=True)
    names = tuple(sorted(tokenizer.named.items()))
    return template_of(
        data.chat_template,
        tokenizer.directory,
        data.system,
        data.enable_thinking,
        names,
        data.template_date,
        extra,
    )


@functools.lru_cache(maxsize=4)
def template_of(
    chosen: str,
    model_dir: Path,
    system: str,
    enable_thinking: bool | None,
    names: tuple[tuple[str, str], ...],
    day: str = "",
    extra: str = "{}",
) -> ChatTemplate:
    """The template for these settings, shared by all callers so that it has one child process.
    ``names``: the tokenizer's special tokens. ``day``: see `ChatTemplate`. ``extra``: more
    variables, as JSON."""
    variables: dict[str, Any] = dict(names)
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    variables |= json.loads(extra)
    return ChatTemplate(find_templates(chosen, model_dir), variables, system, day)
