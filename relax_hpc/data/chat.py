"""Chat messages as the text that a template makes of them: the only place that renders.

A template is a program of whoever made the model's folder. It runs in jinja2's sandbox, in a child process
(`python -m relax_hpc.data.chat`) that has so many seconds and so much memory, and that we talk to in lines of JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from relax_hpc.errors import ConfigError

RENDER_S = 10
"""Seconds for one prompt. A child that takes longer is killed by the kernel, whatever it is at."""
START_S = 60.0
"""Seconds for the child process to begin."""
MEMORY_BYTES = 1 << 30
"""Address space of the child process."""
MOST_CHARS = 1 << 20
"""Characters of a template, and of what it makes, at most."""


class TemplateError(Exception):
    """A template does not take these messages, or cannot be used at all."""


class ChatTemplate:
    """A template with what it is given beside messages. Threads may share it."""

    def __init__(self, source: str, variables: Mapping[str, Any], system: str) -> None:
        """``system``: goes before messages that begin with none; empty: nothing does."""
        self._first = {"template": source, "variables": dict(variables)}
        self._system = system
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    @property
    def key(self) -> str:
        """Key that is the same for templates that make the same text."""
        return hashlib.sha256(json.dumps([self._first, self._system], sort_keys=True).encode()).hexdigest()

    def render(
        self, messages: list[dict[str, Any]], whole: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The prompt of these messages, up to where the model answers; ``whole``: it has answered. ``tools``: their
        signatures, of those that it may call. TemplateError: there is none."""
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        with self._turn:
            answer = self._ask({"messages": messages, "add_generation_prompt": not whole, "tools": tools or None})
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the child process; the next prompt starts another."""
        with self._turn:
            if self._child:
                self._end()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = _start()
            if error := self._exchange(self._first, START_S).get("error"):
                self._end()
                raise ConfigError(f"data.chat_template: {error}")
        return self._exchange(question, 2.0 * RENDER_S)

    def _exchange(self, line: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._child and self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps(line).encode() + b"\n")
            self._child.stdin.flush()
            ready, _, _ = select.select([self._child.stdout], [], [], seconds)
            return json.loads(self._child.stdout.readline() if ready else b"")
        except (OSError, ValueError):
            code = self._end()
            limits = f"{RENDER_S} s and {MEMORY_BYTES >> 20} MiB a prompt"
            why = f"signal {-code}" if code < 0 else f"code {code}"
            raise ConfigError(f"data.chat_template: the template's process ended by {why}; allowed: {limits}") from None

    def _end(self) -> int:
        """Kill the child process, if it lives; how it ended."""
        child, self._child = self._child, None
        assert child
        child.kill()
        child.communicate()
        return child.returncode


def find_template(chosen: str, model_dir: Path) -> str:
    """The source of a template: that of the ``model_dir`` if ``chosen`` is `model`, or that of a file.

    ConfigError: there is none.
    """
    paths = [model_dir / "chat_template.jinja"] if chosen == "model" else [Path(chosen)]
    for path in paths:
        if path.is_file():
            return _short(_text(path), path)
    if chosen != "model":
        raise ConfigError(
            f"data.chat_template: found {chosen!r}, allowed: model, or a Jinja file; there is no such file"
        )
    # That of a processor, as models with media were published, comes before their tokenizer's.
    files = [model_dir / name for name in ("chat_template.json", "tokenizer_config.json")]
    path = next((file for file in files if file.is_file() and _named_in(file)), files[-1])
    found = _named_in(path) if path.is_file() else None
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict)]
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ConfigError(
            f"data.chat_template: found model, but {model_dir} has no chat_template.jinja, and none in its "
            "tokenizer_config.json; name a Jinja file"
        )
    return _short(found, path)


@functools.lru_cache(maxsize=4)
def template_of(
    chosen: str, model_dir: Path, system: str, enable_thinking: bool, names: tuple[tuple[str, str], ...]
) -> ChatTemplate:
    """One template for all who ask, so that it has one child process. ``names``: of the tokenizer's special tokens."""
    variables = {**dict(names), "enable_thinking": enable_thinking}
    return ChatTemplate(find_template(chosen, model_dir), variables, system)


def _named_in(path: Path) -> Any:
    return json.loads(path.read_bytes()).get("chat_template")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        text = "data.chat_template: {}: cannot be read: {}; allowed: a Jinja file in UTF-8 that you may read"
        raise ConfigError(text.format(path, error)) from error


def _short(source: str, path: Path) -> str:
    if len(source) > MOST_CHARS:
        raise ConfigError(f"data.chat_template: {path}: found {len(source)} characters, allowed {MOST_CHARS}")
    return source


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "relax_hpc.data.chat"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


# -- the child process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer each line of standard input by one line, until there are no more: whoever started this has ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, template, variables = os.fdopen(os.dup(1), "wb"), None, {}
    for line in sys.stdin.buffer:
        question, answer = json.loads(line), {}
        # Its default action ends this process, also within an endless multiplication.
        signal.alarm(RENDER_S)
        try:
            if template is None:
                template, variables = _compiled(question["template"]), question["variables"]
            else:
                answer["text"] = "".join(_limited(template.generate(**question, **variables)))
        except (Exception, RecursionError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        signal.alarm(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limited(pieces: Any) -> Any:
    """The pieces of a text, as long as it is no longer than is allowed."""
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_CHARS:
            raise ValueError(f"more than {MOST_CHARS} characters")
        yield piece


def _compiled(source: str) -> Any:
    """The template in the sandbox that Hugging Face's templates are written for."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model has written; here its body alone counts."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


if __name__ == "__main__":
    main()
