"""What a Hugging Face directory says about its model, without importing torch or transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import ModelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.families import problems, understood


@dataclass(kw_only=True, slots=True)
class Model:
    """The sizes that parallel layouts and lengths depend on; 0 where the model does not say."""

    problems: list[str] = field(default_factory=list)
    """Findings about its files; with any of them the sizes mean nothing."""
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    hidden: int = 0
    inner: int = 0
    positions: int = 0

    def tensor_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by their names in config.json."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
        }


def find_model(config: ModelConfig, field_name: str = "path") -> Model:
    """The model in the directory `config.<field_name>`, or the tiny one if that is empty."""
    key, name = f"model.{field_name}", getattr(config, field_name)
    try:
        if not name:
            from relax_hpc.data.tiny_model import qwen3_config

            return _sizes(qwen3_config(config.tiny))
        path = Path(name)
        if not path.is_dir():
            return Model(problems=[f"{key}: found {name!r}, which is not a directory; name a Hugging Face directory"])
        files = [f"{key}: found {problem}" for problem in (*_weights(path), *_tokenizer(path))]
        found = _read_json(path / "config.json")
        unknown = [f"{key}: {path / 'config.json'}: {one}" for one in problems(found, config.ignore_keys)]
        model = Model() if unknown else _sizes(understood(found, config.ignore_keys))
        model.problems = [*unknown, *files]
        return model
    except ConfigError as error:
        message = str(error)
        return Model(problems=[message if message.startswith("model.") else f"{key}: {message}"])


def _sizes(known: dict[str, Any]) -> Model:
    return Model(
        layers=known["num_hidden_layers"],
        heads=known["num_attention_heads"],
        kv_heads=known.get("num_key_value_heads", known["num_attention_heads"]),
        hidden=known["hidden_size"],
        inner=known["intermediate_size"],
        positions=known.get("max_position_embeddings", 0),
    )


def _weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map")
        files = sorted({str(name) for name in names.values()}) if isinstance(names, dict) else []
        missing = [name for name in files if not (path / name).is_file()]
        return [f"no {missing[0]} in {path}, which its index names; download it again"] if missing else []
    if any(path.glob("*.safetensors")):
        return []
    return [f"no *.safetensors in {path}; convert the weights, pickled ones are not read"]


def _tokenizer(path: Path) -> list[str]:
    if (path / "tokenizer.json").is_file():
        return []
    return [f"no tokenizer.json in {path}; save the fast tokenizer there"]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"found no {path.name} in {path.parent}; name a Hugging Face directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"found an unreadable {path}: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"found no JSON object in {path}; download it again")
    return found
