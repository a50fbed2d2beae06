"""Base class of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from relax_hpc.environments.base import Observation
from relax_hpc.environments.tool_calls import ToolError

Kind = Literal["string", "number", "integer", "boolean", "numbers"]
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
MAX_NUMBER = 10**15
"""Maximum absolute value of a number. JSON allows larger ones, with which tools cannot compute."""
Answer = str | Observation


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a tool."""

    kind: Kind
    description: str
    default: Any = None
    """Value if a call does not have the argument; None: the argument is required."""
    length: int = 0
    """Length of a list of kind `numbers`; 0: any length."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the argument."""
        if self.kind != "numbers":
            return {"type": self.kind, "description": self.description}
        bounds = {"minItems": self.length, "maxItems": self.length} if self.length else {}
        return {
            "type": "array",
            "items": {"type": "number"},
            **bounds,
            "description": self.description,
        }

    def check(self, name: str, value: Any) -> None:
        """ToolError: ``value`` is not a valid argument."""
        if not self._allows(value):
            allowed: str = self.kind
            if self.kind == "numbers":
                allowed = f"a list of {self.length or 'any'} numbers"
            raise ToolError(f"argument {name}: found {str(value)[:80]!r}, allowed: {allowed}")

    def _allows(self, value: Any) -> bool:
        if self.kind != "numbers":
            return _is_kind(value, self.kind)
        if not isinstance(value, list) or not all(_is_kind(item, "number") for item in value):
            return False
        return not self.length or len(value) == self.length


class Tool:
    """A tool that the policy may call.

    Arguments of `__init__` are its options. A tool is made once in a process for all episodes,
    which may call it concurrently. It must not store anything between calls.

    >>> class Twice(Tool):
    ...     name, description = "twice", "Doubles a number."
    ...     parameters = {"number": Parameter("number", "the number")}
    ...     def call(self, number):
    ...         return str(2 * number)
    >>> Twice().called({"number": 2})
    '4'
    """

    name: str
    description: str
    parameters: ClassVar[Mapping[str, Parameter]] = {}

    # With these two types a subclass may declare any parameters.
    def call(self, *args: Any, **arguments: Any) -> Answer:
        """Answer to the policy. ToolError: its text is the answer. Any other exception ends the
        episode."""
        raise NotImplementedError

    def called(self, arguments: Mapping[str, Any]) -> Answer:
        """Check ``arguments``, and return the answer of `call`. ToolError: they do not fit the
        parameters of this tool."""
        unknown = sorted(set(arguments).difference(self.parameters))
        if unknown:
            raise ToolError(
                f"{self.name} has no argument {', '.join(unknown)}; it has: "
                f"{', '.join(self.parameters)}"
            )
        checked = {}
        for name, parameter in self.parameters.items():
            checked[name] = arguments.get(name, parameter.default)
            if name not in arguments and parameter.default is None:
                raise ToolError(f"{self.name} needs the argument {name}: {parameter.description}")
            parameter.check(name, checked[name])
        return self.call(**checked)

    @property
    def signature(self) -> dict[str, Any]:
        """Signature of the tool, in OpenAI's format, for the chat template."""
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        required = [
            name for name, parameter in self.parameters.items() if parameter.default is None
        ]
        schema = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def _is_kind(value: Any, kind: str) -> bool:
    """Whether ``value`` is of this kind. In Python, a bool is an integer, too."""
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    if isinstance(value, int | float):
        return -MAX_NUMBER <= value <= MAX_NUMBER
    return True
