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
MOST = 10**15
"""Size of a number at most: JSON has larger ones, with which tools cannot count."""
Answer = str | Observation


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a tool."""

    kind: Kind
    description: str
    default: Any = None
    """Value where a call has none; None: a call has to have one."""
    length: int = 0
    """Numbers that there have to be of kind `numbers`; 0: any."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of it."""
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
        """ToolError: ``value`` is no such argument."""
        if not self._allows(value):
            wanted = (
                f"a list of {self.length or 'any'} numbers" if self.kind == "numbers" else self.kind
            )
            raise ToolError(f"argument {name}: found {str(value)[:80]!r}, allowed: {wanted}")

    def _allows(self, value: Any) -> bool:
        if self.kind != "numbers":
            return _is(value, self.kind)
        numbers = isinstance(value, list) and all(_is(each, "number") for each in value)
        return numbers and (not self.length or len(value) == self.length)


class Tool:
    """Something that the policy may call. One of `TOOLS` is made once in a process, for all its
    episodes, and called by several of them at a time: it keeps nothing from one call to the next.
    Arguments of `__init__` are its options.

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

    def call(self, **arguments: Any) -> Answer:
        """Answer to the policy. ToolError: it is told that; what else is raised ends the
        episode."""
        raise NotImplementedError

    def called(self, arguments: Mapping[str, Any]) -> Answer:
        """Answer of `call` to ``arguments``, once they are checked. ToolError: they are not those
        of this tool."""
        if unknown := sorted(set(arguments).difference(self.parameters)):
            raise ToolError(
                f"{self.name} has no argument {', '.join(unknown)}; it has: "
                f"{', '.join(self.parameters)}"
            )
        given = {}
        for name, parameter in self.parameters.items():
            given[name] = arguments.get(name, parameter.default)
            if name not in arguments and parameter.default is None:
                raise ToolError(f"{self.name} needs the argument {name}: {parameter.description}")
            parameter.check(name, given[name])
        return self.call(**given)

    @property
    def signature(self) -> dict[str, Any]:
        """The tool as a chat template shows it to the policy."""
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        required = [
            name for name, parameter in self.parameters.items() if parameter.default is None
        ]
        schema = {"type": "object", "properties": properties, "required": required}
        about = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": about}


def _is(value: Any, kind: str) -> bool:
    """Whether ``value`` is of this kind; to Python, true is an integer too."""
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    return isinstance(value, str) or -MOST <= value <= MOST
