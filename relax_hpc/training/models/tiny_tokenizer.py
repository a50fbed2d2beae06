"""Tokenizer of a small model: one token per character. For chats with tools it also has words and a
chat template in Qwen3's format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

CHARACTERS = "0123456789+-*=:?,>.abcdefghijklmnopqrstuvwxyz "
SPECIAL = ("<pad>", "<s>", "</s>")
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCAB_SIZE = 64
"""Size of a vocabulary of characters only, including unused tokens. A larger vocabulary has a
multiple of this size."""
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
_CHAT_CHARACTERS = '\n{}[]()"_/'
_CHAT_WORDS = (
    *("system", "user", "assistant"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments": {"', '": "', '": [', '"}}', "]}}"),
)
# Chat template: turns, tool calls, tool results within the user's turns, and media.
_TEMPLATE = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == "text" -%}{{ part.text }}
{%- else -%}
{%- set sense = "audio" if part.type == "audio" else "vision" -%}
{{ "<|" + sense + "_start|><|" + part.type + "_pad|><|" + sense + "_end|>" }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set is_tool = message.role == "tool" -%}
{%- set follows = is_tool and loop.previtem is defined and loop.previtem.role == "tool" -%}
{%- set goes_on = is_tool and loop.nextitem is defined and loop.nextitem.role == "tool" -%}
{%- if not follows -%}{{ "<|im_start|>" + ("user" if is_tool else message.role) }}{%- endif -%}
{{ "\\n" }}
{%- if is_tool -%}{{ "<tool_response>\\n" + said(message.content) + "\\n</tool_response>" }}
{%- else -%}{{ said(message.content) }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ "\\n" }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{%- if not goes_on -%}{{ "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}
"""


def vocabulary(extra_special: Sequence[str], chat: bool, extra_texts: Sequence[str]) -> list[str]:
    """Texts of all tokens, by id. For the arguments see `write_tokenizer`."""
    texts = [*SPECIAL, *CHARACTERS, *extra_special]
    if chat:
        texts += [TURN, TURN_END, *_CHAT_CHARACTERS, *_CHAT_WORDS]
    texts = list(dict.fromkeys([*texts, *extra_texts]))
    return texts + [f"<unused{index}>" for index in range(-len(texts) % VOCAB_SIZE)]


def end_of_response(extra_special: Sequence[str], chat: bool) -> int:
    """Id of the token that ends a response."""
    return vocabulary(extra_special, chat, ()).index(TURN_END) if chat else EOS_ID


def write_tokenizer(
    directory: Path,
    extra_special: Sequence[str] = (),
    chat: bool = False,
    extra_texts: Sequence[str] = (),
) -> None:
    """Write the files of a tokenizer. Unknown characters become <pad>.

    ``extra_special``: special tokens besides the common ones. ``chat``: whether it has the words
    and the template for chats with tools; if not, BOS precedes each text. ``extra_texts``: texts
    with one token each.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    texts = vocabulary(extra_special, chat, extra_texts)
    ids = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    longest_first = sorted([*(_CHAT_WORDS if chat else ()), *extra_texts], key=len, reverse=True)
    pieces = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *extra_special, *((TURN, TURN_END) if chat else ())])
    if chat:
        (directory / "chat_template.jinja").write_text(_TEMPLATE)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS_ID)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": TURN_END if chat else "</s>", "pad_token": "<pad>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": not chat,
        "model_max_length": 256,
    }
    content: dict[str, object] = {**settings, **names}
    if extra_special:
        content["extra_special_tokens"] = _processor_names(extra_special)
    (directory / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n")


def _processor_names(tokens: Sequence[str]) -> dict[str, str]:
    """Media ``tokens`` by the names that transformers' processor of Qwen3-Omni requests.

    >>> _processor_names(["<|audio_start|>"])
    {'audio_bos_token': '<|audio_start|>'}
    """
    suffixes = {"pad": "token", "start": "bos_token", "end": "eos_token"}
    names = {}
    for token in tokens:
        medium, role = token.strip("<|>").split("_")
        names[f"{medium}_{suffixes[role]}"] = token
    return names
