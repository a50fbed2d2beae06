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

MESSAGES = [{"role": "system", "content": "add"}, {"role": "user", "content": "what is 3+4?"}]
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


def edited(name: str, change: Callable[[JSON], Any]) -> Change:
    """A change of the object in a JSON file, which is made if it is not there."""

    def edit(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content))

    return edit


def tokenizer_file(change: Callable[[JSON], Any]) -> Change:
    return edited("tokenizer.json", change)


def config_file(change: Callable[[JSON], Any]) -> Change:
    return edited("tokenizer_config.json", change)


def generation_ids(**ids: Any) -> Change:
    """These ids of tokens in generation_config.json."""

    def write(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps(ids))

    return write


def move_names(folder: Path) -> None:
    """Names of special tokens stand in special_tokens_map.json, as in older repositories."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    names = {
        key: config.pop(key) for key in ("bos_token", "eos_token", "pad_token") if key in config
    }
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))


def template_files(**templates: str) -> Change:
    """Templates in files of their own."""

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
    """A template in tokenizer_config.json in place of the file."""

    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        config_file(lambda config: config.update(chat_template=value))(folder)

    return write


LISTED = [{"name": "default", "template": BASE}, {"name": "tool_use", "template": WITH_TOOLS}]
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
    "listed": config_template(LISTED),
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
    "legacy": edited("added_tokens.json", lambda content: content.update({"<s>": 1})),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shape = TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8, chat=True)
    make_tiny_model(directory, shape, seed=0)
    return directory


def own_tokens(folder: Path, tools: list[JSON]) -> list[int] | str:
    """Tokens of the prompt of the messages, or why there are none."""
    row: JSON = {"id": "1", "messages": MESSAGES, "answer": "7"}
    try:
        tokenizer = load_tokenizer(folder)
        rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
        with rules.rendering():
            made = rules.parse_row(1, row | ({"tools": tools} if tools else {}), tokenizer)
    except ConfigError as error:
        return str(error)
    finally:
        template_of.cache_clear()
    return f"{made.reason}: {made.detail}" if isinstance(made, BadLine) else list(made.token_ids)


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
    """Or they are refused: of a template that shows no tools, and where transformers refuses them
    too."""
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(model, folder)
    for name in names:
        CHANGES[name](folder)
    tools = [TOOL] if has_tools else []
    tokens = own_tokens(folder, tools)
    if isinstance(tokens, str) and "the chat template shows no tools" in tokens:
        tools = []
        tokens = own_tokens(folder, [])
    if isinstance(tokens, str):
        assert "allowed: one named default" in tokens
        with pytest.raises(ValueError, match="multiple chat templates"):
            their_tokens(folder, tools)
        return
    assert tokens == their_tokens(folder, tools)


@pytest.mark.parametrize(
    ("change", "says"),
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
def test_what_cannot_be_read_as_transformers_reads_it_is_refused(
    model: Path, tmp_path: Path, change: Change, says: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    tokens = own_tokens(folder, [])
    assert isinstance(tokens, str) and says in tokens


def test_a_negative_id_of_padding_is_not_used(model: Path, tmp_path: Path) -> None:
    """Conversions of LLaMA have `pad_token_id: -1`, which no embedding has."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config_file(lambda config: config.pop("pad_token"))(folder)
    generation_ids(pad_token_id=-1)(folder)
    assert load_tokenizer(folder).pad_id >= 0


def test_an_added_word_that_ends_a_response_must_not_stand_in_a_message(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)

    def as_words(content: JSON) -> None:
        content["added_tokens"] = [token | {"special": False} for token in content["added_tokens"]]

    tokenizer_file(as_words)(folder)
    tokenizer = load_tokenizer(folder)
    name = tokenizer.name_of(tokenizer.eos_ids[0])
    rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
    with rules.rendering():
        made = rules.parse_row(1, {"prompt": f"3+4{name}", "answer": "7"}, tokenizer)
    assert isinstance(made, BadLine) and made.reason == "special_token"


def test_contents_in_parts_are_joined_for_templates_that_take_texts_alone() -> None:
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "3+4?"}]
    with closing(
        ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", {})
    ) as template:
        assert template.render([{"role": "user", "content": parts}]) == "user:what is 3+4?"
    own = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
        "m.content %}"
    )
    own += "{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    with closing(ChatTemplate(own, {})) as template:
        assert template.render([{"role": "user", "content": parts}]) == "what is 3+4?"


def test_a_template_reads_one_date_in_a_run_whenever_it_is_asked(model: Path) -> None:
    text = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{{ messages[0].content }}"
    with closing(ChatTemplate(text, {}, day="2026-11-26")) as template:
        assert template.render([{"role": "user", "content": "!"}]) == "2026-11-26 00:00:00!"
    dated, other = (ChatTemplate(text, {}, day=day) for day in ("2026-11-26", "2026-11-27"))
    assert dated.key != other.key, "prompts of another day are other prompts"
    plain, same = (
        ChatTemplate("{{ messages }}", {}, day=day) for day in ("2026-11-26", "2026-11-27")
    )
    assert plain.key == same.key


def test_templates_are_found_by_name(model: Path, tmp_path: Path) -> None:
    template_files(default=BASE, rag="r")(tmp_path)
    assert find_templates("model", tmp_path) == {"default": BASE, "rag": "r"}
    (tmp_path / "own.jinja").write_text("x")
    assert find_templates(str(tmp_path / "own.jinja"), model) == {"default": "x"}


# -- texts that continue others --------------------------------------------------------------------

LINES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""As Zephyr's and TinyLlama's: the assistant speaks behind a line break, and not behind a token."""
SPOKEN = [
    {"role": "user", "content": "add 3 and 4"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "seven again"},
]


def sentence_pieces(normalizer: JSON | None, splitter: JSON | None) -> Change:
    """A tokenizer.json like Llama 2's: characters, with `▁` for a blank and two tokens that begin
    with it."""

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
            "pre_tokenizer": splitter,
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
        (folder / "chat_template.jinja").write_text(LINES)

    return write


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, BLANKS]}


def metaspace(scheme: str) -> JSON:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


@pytest.mark.parametrize(
    "change",
    [
        sentence_pieces(PREPENDED, None),
        sentence_pieces(None, metaspace("first")),
        sentence_pieces(None, metaspace("always")),
        sentence_pieces(None, metaspace("never")),
    ],
)
def test_an_answer_begins_without_a_blank_that_nobody_wrote(
    model: Path, tmp_path: Path, change: Change
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    tokenizer = load_tokenizer(folder)
    rules = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer)
    their = transformers_tokenizer(folder)
    theirs = their.apply_chat_template(SPOKEN, return_dict=False)
    with rules.rendering():
        made = demonstration_of({"messages": SPOKEN}, tokenizer, rules)
        assert rules.template
        first = their.apply_chat_template(SPOKEN[:1], add_generation_prompt=True, return_dict=False)
        turn = theirs[len(first) : theirs.index(1, len(first)) + 1]
        _, heard = TurnTokenizer(tokenizer, rules.template).tokens(
            [*first, *turn], [Message("user", ("again",))], False
        )
        assert [*first, *turn, *heard] == theirs[: len(first + turn + heard)]
        between = Renderer(rules.template, tokenizer).between(SPOKEN[:3], 1, [], 1)
        assert between == heard
    assert [*made.token_ids] == theirs[: len(made.token_ids)]
    pairs = zip(made.token_ids, made.loss_mask, strict=True)
    learned = "".join(tokenizer.name_of(token) for token, mask in pairs if mask)
    assert learned == "seven</s>seven▁again</s>"
    plain = PromptRules.from_config(DataConfig(), tokenizer)
    text = demonstration_of({"prompt": "add\n", "answer": "seven"}, tokenizer, plain)
    assert [*text.token_ids[:-1]] == their("add\nseven")["input_ids"]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_blank_before_a_text_is_left_out_where_the_settings_say_so(
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


def test_a_tokenizer_that_drops_merges_by_chance_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    sentence_pieces(None, metaspace("first"))(folder)
    tokenizer_file(lambda content: content["model"].update(dropout=0.1))(folder)
    with pytest.raises(ConfigError, match=r"dropout: found 0\.1, allowed: null"):
        load_tokenizer(folder)
