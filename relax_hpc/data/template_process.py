"""`python -m relax_hpc.data.template_process`: a process that renders chat templates.

It is a worker, see `relax_hpc.net.workers.serving`. The first message holds the templates and their
variables, each later message holds a chat.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from relax_hpc.data.template_files import MAX_CHARS
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.serving import serve, write_answer

RENDER_CPU_S = 10
"""Seconds of CPU time for one text. The kernel kills a process that takes longer."""
MEMORY_BYTES = 1 << 30
"""Address space of this process."""
_PROBE = "probe"


def render_requests(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the pipe is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = frames.read(requests)
    try:
        with _limited_cpu():
            renderer = Renderer(**setup)
    except (Exception, RecursionError, MemoryError) as error:
        write_answer(answers, _failure(error))
        return
    write_answer(answers, {"at_once": 1})
    while True:
        request = frames.read(requests)
        number = request.pop("id")
        try:
            with _limited_cpu():
                answer = {"text": renderer.render(**request)}
        except (Exception, RecursionError, MemoryError) as error:
            answer = _failure(error)
        write_answer(answers, {"id": number, **answer})


@contextlib.contextmanager
def _limited_cpu() -> Iterator[None]:
    """Kill this process if the block takes more than RENDER_CPU_S of CPU time."""
    # The default action of SIGPROF ends the process. A Python handler would not run within one
    # long operation, such as a multiplication of huge integers.
    signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _failure(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


class Renderer:
    """Compiled templates by name, with the variables that they see."""

    def __init__(self, sources: dict[str, str], variables: dict[str, Any], day: str) -> None:
        self._templates = {name: compile_template(text, day) for name, text in sources.items()}
        self._variables = variables
        self._takes_parts: dict[str, bool] = {}

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Text that the template called ``template`` makes of ``messages``."""
        if any(isinstance(message.get("content"), list) for message in messages):
            if template not in self._takes_parts:
                self._takes_parts[template] = self._probe_parts(template)
            if not self._takes_parts[template]:
                messages = [joined_parts(message) for message in messages]
        return self._generate(template, messages, tools, add_generation_prompt)

    def _generate(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        # transformers passes `documents` too: `documents is none` is true in its templates.
        pieces = self._templates[template].generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )
        return "".join(_limited(pieces))

    def _probe_parts(self, template: str) -> bool:
        """Whether the template renders a content that is a list of one text like the text."""
        texts = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                texts.append(self._generate(template, [{"role": "user", "content": content}]))
            except Exception:  # a template may raise anything
                return False
        return texts[0] == texts[1]


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """``message`` with the joined texts of its parts as its content. ValueError: it has other
    parts, which the template would not show."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    other = [part.get("type") for part in content if part.get("type") != "text"]
    if other:
        raise ValueError(f"the template takes texts alone, found a part of type {other[0]!r}")
    return {**message, "content": "".join(part["text"] for part in content)}


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    """``pieces`` of a text. ValueError: together they are longer than MAX_CHARS."""
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARS:
            raise ValueError(f"more than {MAX_CHARS} characters")
        yield piece


def compile_template(source: str, day: str) -> Any:
    """The jinja2 template of ``source``, in the environment for which the templates of Hugging Face
    models are written (`render_jinja_template` of transformers 5.12). ``day``: YYYY-MM-DD."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks text of the assistant. It is a macro, as in transformers,
        so that variables that are set within it do not exist after it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # The date is fixed for a run. If a template read the clock, prompts would change at midnight.
    environment.globals["strftime_now"] = datetime.fromisoformat(day).strftime
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


if __name__ == "__main__":
    serve(render_requests, dies_with_thread=False)
