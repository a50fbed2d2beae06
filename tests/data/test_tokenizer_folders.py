"""Tokenizers and chat templates of changed model directories: prompts have the tokens that
transformers gives them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import DataConfig, TinyModelConfig
from relax_hpc.data.chat import ChatTemplate, template_of
from relax_hpc.data.examples import demonstration_of
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.rows import BadLine
from relax_hpc.data.template_files import find_templates
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.environments.base import Message
from relax_hpc.rollout.agents.rendering import Renderer
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.effort import effort
from tests.requirements import requires

requires("torch", "transformers")

MESSAGES = [{"role": "system", "content": "add"}, {"role": "user", "content": "add 3+4"}]
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}
BASE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content "
    "}}<|im_end|>\n{% endfor %}{% if image_token is defined %}{{ image_token }}{% endif %}{% if "
    "documents is none %}.{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
    "endif %}"
)
WITH_TOOLS = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + BASE
GENERATION = (
    "{% set ns = 'a' %}{% for m in messages %}{% generation %}{% set ns = 'b' %}{{ m.content }}{% "
    "endgeneration %}"
    "{{ ns }}{{ {'x': m.role} | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}"
)
JSON = dict[str, Any]
Change = Callable[[Path], None]


def edit_json(name: str, change: Callable[[JSON], Any]) -> Change:
    """A change that edits the object in a JSON file, and creates a missing file."""

    def edit(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content))

    return edit


def tokenizer_file(change: Callable[[JSON], Any]) -> Change:
    return edit_json("tokenizer.json", change)


def config_file(change: Callable[[JSON], Any]) -> Change:
    return edit_json("tokenizer_config.json", change)


def generation_ids(**ids: Any) -> Change:
    """A change that writes token ids to generation_config.json."""

    def write(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps(ids))

    return write


def move_names(folder: Path) -> None:
    """Move names of special tokens to special_tokens_map.json, as in older repositories."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    names = {
        key: config.pop(key) for key in ("bos_token", "eos_token", "pad_token") if key in config
    }
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))


def template_files(**templates: str) -> Change:
    """A change that writes each template to a file."""

    def write(folder: Path) -> None:
        for name, text in templates.items():
            path = folder / (
                "chat_template.jinja"
                if name == "default"
                else f"additional_chat_templates/{name}.jinja"
            )
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def config_template(value: Any) -> Change:
    """A change that replaces the template file by a template in tokenizer_config.json."""

    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        config_file(lambda config: config.update(chat_template=value))(folder)

    return write


TEMPLATE_LIST = [
    {"name": "default", "template": BASE},
    {"name": "tool_use", "template": WITH_TOOLS},
]
CHANGES: dict[str, Change] = {
    "truncation": tokenizer_file(
        lambda t: t.update(
            truncation={
                "direction": "Right",
                "max_length": 8,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        )
    ),
    "padding": tokenizer_file(
        lambda t: t.update(
            padding={
                "strategy": {"Fixed": 64},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        )
    ),
    "template": template_files(default=BASE),
    "generation": template_files(default=GENERATION),
    "listed": config_template(TEMPLATE_LIST),
    "files": template_files(default=BASE, tool_use=WITH_TOOLS),
    "text": config_template(BASE),
    "names": move_names,
    "bos": config_file(
        lambda c: c.update(bos_token={"content": "<s>", "lstrip": True, "__type": "AddedToken"})
    ),
    "no bos": config_file(lambda c: c.pop("bos_token", None)),
    "image": config_file(lambda c: c.update(image_token="<pad>")),
    "named": config_file(lambda c: c.update(extra_special_tokens={"image_token": "<s>"})),
    "extra": config_file(lambda c: c.update(additional_special_tokens=["zzz", "<s>"])),
    "decoder": config_file(
        lambda c: c.update(
            added_tokens_decoder={"1": {"content": "<s>", "lstrip": True, "special": True}}
        )
    ),
    "unlisted": tokenizer_file(
        lambda t: t.update(added_tokens=[a for a in t["added_tokens"] if a["content"] != "<s>"])
    ),
    "legacy": edit_json("added_tokens.json", lambda content: content.update({"<s>": 1})),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shape = TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8, chat=True)
    make_tiny_model(directory, shape, seed=0)
    return directory


def our_tokens(folder: Path, tools: list[JSON]) -> list[int] | str:
    """Prompt tokens of MESSAGES, or the reason of a refusal."""
    row: JSON = {"id": "1", "messages": MESSAGES, "answer": "7"}
    try:
        tokenizer = load_tokenizer(folder)
        rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
        with rules.rendering():
            result = rules.parse_row(1, row | ({"tools": tools} if tools else {}), tokenizer)
    except ConfigError as error:
        return str(error)
    finally:
        template_of.cache_clear()
    return (
        f"{result.reason}: {result.detail}"
        if isinstance(result, BadLine)
        else list(result.token_ids)
    )


def their_tokens(folder: Path, tools: list[JSON]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        MESSAGES, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@settings(
    max_examples=effort(20, 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), max_size=4, unique=True),
    has_tools=st.booleans(),
)
@example(names=["truncation", "padding"], has_tools=False)
@example(names=["listed"], has_tools=True)
@example(names=["files"], has_tools=True)
@example(names=["template", "names"], has_tools=False)
@example(names=["template", "named", "decoder"], has_tools=False)
@example(names=["generation"], has_tools=False)
@example(names=["unlisted", "template"], has_tools=False)
def test_prompts_of_changed_directories_have_the_tokens_of_transformers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, names: list[str], has_tools: bool
) -> None:
    """A prompt is refused if the template shows no tools, or if transformers refuses it too."""
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(model, folder)
    for name in names:
        CHANGES[name](folder)
    tools = [TOOL] if has_tools else []
    tokens = our_tokens(folder, tools)
    if isinstance(tokens, str) and "the chat template shows no tools" in tokens:
        tools = []
        tokens = our_tokens(folder, [])
    if isinstance(tokens, str):
        assert "allowed: one named default" in tokens
        with pytest.raises(ValueError, match="multiple chat templates"):
            their_tokens(folder, tools)
        return
    assert tokens == their_tokens(folder, tools)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            config_file(lambda c: c.update(split_special_tokens=True)),
            "split_special_tokens: found true, allowed: false",
        ),
        (
            config_file(
                lambda c: c.update(
                    added_tokens_decoder={"60": {"content": "<think>", "special": False}}
                )
            ),
            "token '<think>' has the id 128, but 60 in tokenizer_config.json",
        ),
        (
            config_file(lambda c: c.update(pad_token={"text": "<pad>"})),
            "as a token, allowed: a text, or an object",
        ),
        (generation_ids(eos_token_id=[7, -1]), "eos_token_id: found -1, allowed: ids of tokens"),
        (config_template([{"name": "rag", "template": BASE}]), "allowed: one named default"),
        (config_template({"default": 7}), "neither a text nor a list of objects"),
    ],
)
def test_settings_that_change_tokens_are_refused(
    model: Path, tmp_path: Path, change: Change, expected: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    tokens = our_tokens(folder, [])
    assert isinstance(tokens, str) and expected in tokens


def test_a_negative_padding_id_is_not_used(model: Path, tmp_path: Path) -> None:
    """Conversions of LLaMA have `pad_token_id: -1`, which is not an index of an embedding."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config_file(lambda config: config.pop("pad_token"))(folder)
    generation_ids(pad_token_id=-1)(folder)
    assert load_tokenizer(folder).pad_id >= 0


def test_a_message_with_an_end_token_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)

    def unmark_special(content: JSON) -> None:
        content["added_tokens"] = [token | {"special": False} for token in content["added_tokens"]]

    tokenizer_file(unmark_special)(folder)
    tokenizer = load_tokenizer(folder)
    name = tokenizer.name_of(tokenizer.eos_ids[0])
    rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
    with rules.rendering():
        result = rules.parse_row(1, {"prompt": f"3+4{name}", "answer": "7"}, tokenizer)
    assert isinstance(result, BadLine) and result.reason == "special_token"


def test_content_parts_are_joined_for_templates_of_text() -> None:
    content_parts = [{"type": "text", "text": "add "}, {"type": "text", "text": "3+4"}]
    with closing(
        ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", {})
    ) as template:
        assert template.render([{"role": "user", "content": content_parts}]) == "user:add 3+4"
    parts_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
        "m.content %}"
    )
    parts_template += "{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    with closing(ChatTemplate(parts_template, {})) as template:
        assert template.render([{"role": "user", "content": content_parts}]) == "add 3+4"


def test_a_template_has_one_date_in_a_run(model: Path) -> None:
    text = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{{ messages[0].content }}"
    with closing(ChatTemplate(text, {}, day="2026-11-26")) as template:
        assert template.render([{"role": "user", "content": "!"}]) == "2026-11-26 00:00:00!"
    dated_template, next_day_template = (
        ChatTemplate(text, {}, day=day) for day in ("2026-11-26", "2026-11-27")
    )
    assert dated_template.key != next_day_template.key, "another day changes the prompts"
    undated_template, undated_next_day = (
        ChatTemplate("{{ messages }}", {}, day=day) for day in ("2026-11-26", "2026-11-27")
    )
    assert undated_template.key == undated_next_day.key


def test_templates_are_found_by_name(model: Path, tmp_path: Path) -> None:
    template_files(default=BASE, rag="r")(tmp_path)
    assert find_templates("model", tmp_path) == {"default": BASE, "rag": "r"}
    (tmp_path / "own.jinja").write_text("x")
    assert find_templates(str(tmp_path / "own.jinja"), model) == {"default": "x"}


# -- texts that continue a text --------------------------------------------------------------------

LINE_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""As in Zephyr and TinyLlama, the assistant's text follows a line break and no special token."""
TWO_TURNS = [
    {"role": "user", "content": "add 3 and 4"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "seven again"},
]


def sentence_pieces(normalizer: JSON | None, pre_tokenizer: JSON | None) -> Change:
    """A tokenizer.json as of Llama 2: characters, `▁` for a blank, and two tokens with `▁`."""

    def write(folder: Path) -> None:
        characters = sorted(set("\n<|>▁ add3n4sevgiusrto7"))
        vocab = {
            name: number for number, name in enumerate(["<s>", "</s>", *characters, "▁s", "▁a"])
        }
        model = {"type": "BPE", "vocab": vocab, "merges": ["▁ s", "▁ a"]}
        flags = {
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        added = [
            {"id": number, "content": name, **flags} for number, name in enumerate(["<s>", "</s>"])
        ]
        content = {
            "model": model,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "added_tokens": added,
        }
        (folder / "tokenizer.json").write_text(json.dumps(content))
        names = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
        (folder / "chat_template.jinja").write_text(LINE_TEMPLATE)

    return write


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


REPLACE_BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND_BLANK = {
    "type": "Sequence",
    "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE_BLANKS],
}


def metaspace(scheme: str) -> JSON:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


@pytest.mark.parametrize(
    "change",
    [
        sentence_pieces(PREPEND_BLANK, None),
        sentence_pieces(None, metaspace("first")),
        sentence_pieces(None, metaspace("always")),
        sentence_pieces(None, metaspace("never")),
    ],
)
def test_an_answer_begins_without_an_added_blank(
    model: Path, tmp_path: Path, change: Change
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    tokenizer = load_tokenizer(folder)
    rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
    reference = transformers_tokenizer(folder)
    expected = reference.apply_chat_template(TWO_TURNS, return_dict=False)
    with rules.rendering():
        demonstration = demonstration_of({"messages": TWO_TURNS}, tokenizer, rules)
        assert rules.template
        prompt_tokens = reference.apply_chat_template(
            TWO_TURNS[:1], add_generation_prompt=True, return_dict=False
        )
        turn_tokens = expected[len(prompt_tokens) : expected.index(1, len(prompt_tokens)) + 1]
        _, observation_tokens = TurnTokenizer(tokenizer, rules.template).tokens(
            [*prompt_tokens, *turn_tokens], [Message("user", ("again",))], False
        )
        assert [*prompt_tokens, *turn_tokens, *observation_tokens] == expected[
            : len(prompt_tokens + turn_tokens + observation_tokens)
        ]
        rendered_tokens = Renderer(rules.template, tokenizer).between(TWO_TURNS[:3], 1, [], 1)
        assert rendered_tokens == observation_tokens
    assert [*demonstration.token_ids] == expected[: len(demonstration.token_ids)]
    pairs = zip(demonstration.token_ids, demonstration.loss_mask, strict=True)
    learned_text = "".join(tokenizer.name_of(token) for token, mask in pairs if mask)
    assert learned_text == "seven</s>seven▁again</s>"
    prompt_rules = PromptRules.from_config(DataConfig(), tokenizer)
    prompt_demonstration = demonstration_of(
        {"prompt": "add\n", "answer": "seven"}, tokenizer, prompt_rules
    )
    assert [*prompt_demonstration.token_ids[:-1]] == reference("add\nseven")["input_ids"]


@pytest.mark.parametrize("prefix", [True, False])
def test_add_prefix_space_decides_on_a_leading_blank(
    model: Path, tmp_path: Path, prefix: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    sentence_pieces(None, metaspace("first"))(folder)
    config_file(lambda c: c.update(tokenizer_class="LlamaTokenizerFast", add_prefix_space=prefix))(
        folder
    )
    ids = load_tokenizer(folder).encode("seven again")
    assert ids == transformers_tokenizer(folder)("seven again")["input_ids"]


def test_a_tokenizer_with_dropout_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    sentence_pieces(None, metaspace("first"))(folder)
    tokenizer_file(lambda content: content["model"].update(dropout=0.1))(folder)
    with pytest.raises(ConfigError, match=r"dropout: found 0\.1, allowed: null"):
        load_tokenizer(folder)
