"""The tokenizer of a small model: one token a character, and, for chats with tools, words and a
template in Qwen3's form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

CHARACTERS = "0123456789+-*=:?,>.abcdefghijklmnopqrstuvwxyz "
SPECIAL = ("<pad>", "<s>", "</s>")
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCAB_SIZE = 64
"""Tokens of characters alone, spare ones included; a larger vocabulary is a multiple of it."""
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
_CHAT_CHARACTERS = '\n{}[]()"_/'
_CHAT_WORDS = (
    "system",
    "user",
    "assistant",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_CHAT_WORDS += ('{"name": "', '", "arguments": {"', '": "', '": [', '"}}', "]}}")
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
"""Chat template: turns, calls of tools, results of tools within the user's, places for media."""


def vocabulary(more: Sequence[str], chat: bool, words: Sequence[str]) -> list[str]:
    """Texts of all tokens, by id; ``more`` are special tokens after all characters, see
    `write_tokenizer`."""
    found = [*SPECIAL, *CHARACTERS, *more]
    found += [TURN, TURN_END, *_CHAT_CHARACTERS, *_CHAT_WORDS] if chat else []
    found = list(dict.fromkeys([*found, *words]))
    return found + [f"<unused{index}>" for index in range(-len(found) % VOCAB_SIZE)]


def end_of_response(more: Sequence[str], chat: bool) -> int:
    """Id of the token that ends a response."""
    return vocabulary(more, chat, ()).index(TURN_END) if chat else EOS_ID


def write_tokenizer(
    directory: Path, more: Sequence[str] = (), chat: bool = False, words: Sequence[str] = ()
) -> None:
    """Write the files of a tokenizer whose unknown characters become <pad>.

    ``more``: special tokens beside those of all. ``chat``: it has what chats with tools need, and a
    template; without, BOS goes before each text. ``words``: texts that have a token each.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    all_words = vocabulary(more, chat, words)
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(all_words)}, unk_token="<pad>")
    )
    longest_first = sorted([*(_CHAT_WORDS if chat else ()), *words], key=len, reverse=True)
    pieces = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *more, *((TURN, TURN_END) if chat else ())])
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
    named = {"extra_special_tokens": _named(more)} if more else {}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings | names | named, indent=2) + "\n"
    )


def _named(tokens: Sequence[str]) -> dict[str, str]:
    """Names of ``tokens`` of media by which transformers' processor of Qwen3-Omni asks for them."""
    words = {"pad": "token", "start": "bos_token", "end": "eos_token"}
    parts = ((token, *token.strip("<|>").split("_")) for token in tokens)
    return {f"{sense}_{words[what]}": token for token, sense, what in parts}
