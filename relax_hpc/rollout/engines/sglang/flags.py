"""SGLang's server arguments: those that the engine sets itself, and checks of those that users
set."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.server_devices import device_mistakes
from relax_hpc.config.layer_validation import near
from relax_hpc.config.schema import Config
from relax_hpc.rollout.engines.sglang.arguments import (
    ServerArgument,
    range_misfit,
    server_arguments,
)

RESERVED_FLAGS = {
    "model_path": "model.path",
    "dtype": "rollout.engine.dtype",
    "device": "model.device",
    "random_seed": "seed",
    "host": "",
    "port": "rollout.engine.port",
    "api_key": "",
    "admin_api_key": "",
    "weight_version": "",
    # Other server modes of SGLang 0.5.21. They open further sockets, some without a key.
    **dict.fromkeys(
        ("enable_http2", "grpc_mode", "grpc_port", "smg_grpc_mode", "encoder_only", "use_ray"), ""
    ),
    **dict.fromkeys(("tokenizer_worker_num", "sidecar", "ssl_certfile", "ssl_keyfile"), ""),
}
"""Arguments that the engine sets itself -> the configuration key for them; empty: no key."""
_NEUTRAL_VALUES = {
    # tokenizer_manager.py of SGLang 0.5.21 uses these as defaults for the parameters of each
    # request.
    "preferred_sampling_params": (
        None,
        "set rollout.temperature, top_p, top_k, min_p and stop instead",
    ),
    # Below 1, SGLang 0.5.21 accepts a drafted token more often than the policy would sample it.
    "speculative_accept_threshold_single": (1.0, "leave it out"),
    "speculative_accept_threshold_acc": (1.0, "leave it out"),
    # Masks tokens while the model writes its thoughts.
    "enable_strict_thinking": (False, "leave it out"),
    "enable_custom_logit_processor": (False, "leave it out"),
    # SGLang 0.5.21 would truncate the prompt, so that the row has another prompt than the engine.
    "allow_auto_truncate": (False, "lower data.max_prompt_tokens, or set data.truncate"),
}
"""Arguments that make SGLang sample from another distribution than the one whose log-probabilities
it reports -> the value that has no effect, and the advice for users. No metric shows the
difference."""
_VLLM_NAMES = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "enable_prefix_caching": "disable_radix_cache (with the opposite value)",
    "enable_chunked_prefill": "chunked_prefill_size (-1: off)",
}
"""Names of engine arguments in vLLM -> those in SGLang."""
ROUTES_FLAG = "enable_return_routed_experts"
ROUTES_RELEASE = "0.5.21"
"""Release of SGLang whose scheduler `first_routes` patches."""
MAX_SAMPLING_MASK = 4096
"""Default of SGLang's `sampling_mask_max_tokens`: most tokens of a distribution that it reports."""


def routes_misfit() -> str:
    """Reason why the installed SGLang cannot report first routes; empty: it can, or SGLang is not
    installed."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return ""
    # Without a local version, such as +cpu.
    if installed.partition("+")[0] == ROUTES_RELEASE:
        return ""
    return (
        f"model.routing_replay: found SGLang {installed}, allowed: {ROUTES_RELEASE}, whose "
        "scheduler it patches, or off"
    )


def refuse_reserved_flags(flags: dict[str, object], key: str = "rollout.engine.flags") -> None:
    """ConfigError if ``flags``, the section ``key``, set an argument that the engine sets, or hide
    devices."""
    for name in flags:
        if name in RESERVED_FLAGS:
            raise ConfigError(f"{key}.{name}: not allowed; {_advice(name)}")
    for mistake in device_mistakes(key, flags):
        raise ConfigError(mistake)


def check(config: Config) -> Iterator[str]:
    """Mistakes in the settings of an SGLang engine, one line each."""
    flags = config.rollout.engine.flags
    yield from check_flags(config, "rollout.engine.flags", flags)
    yield from _check_distribution(flags)
    yield from _check_updates(flags)
    uses_radix_cache = not flags.get("disable_radix_cache", True)
    if config.rollout.partial_rollout == "recompute" and uses_radix_cache:
        # A retracted request of SGLang 0.5.21 finds its own keys and values of older weights in the
        # radix cache.
        yield (
            "rollout.partial_rollout: found recompute with "
            "rollout.engine.flags.disable_radix_cache false, allowed: "
            "keep or off; or leave out the flag"
        )
    replay = config.model.routing_replay
    if replay != "off" and _uses_this_installation(config):
        misfit = routes_misfit()
        if misfit:
            yield misfit
    if replay != "off" and not flags.get(ROUTES_FLAG, True):
        yield (
            f"rollout.engine.flags.{ROUTES_FLAG}: found false with model.routing_replay {replay}, "
            "which needs the routes of engines; leave out the flag"
        )
    yield from _check_sampling_mask(config)
    yield from _check_ports(config.rollout.engine.port, config.rollout.replicas)


def _check_distribution(flags: Mapping[str, object]) -> Iterator[str]:
    """Mistakes in ``flags`` with which tokens are sampled from another distribution than their
    log-probabilities say."""
    for flag, value in flags.items():
        neutral, advice = _NEUTRAL_VALUES.get(_argument_name(flag), (value, ""))
        if value != neutral and value is not None:
            yield (
                f"rollout.engine.flags.{flag}: found {value!r}, allowed: {neutral!r}; tokens "
                f"would be drawn otherwise than their log-probabilities say; {advice}"
            )


def _check_updates(flags: Mapping[str, object]) -> Iterator[str]:
    """Mistakes in ``flags`` with which new weights would not arrive."""
    values = {_argument_name(flag): value for flag, value in flags.items()}
    if values.get("quantization") and not values.get("load_format"):
        # SGLang 0.5.21 packs the parameters of a quantized model once, when it starts, and does
        # not restore their shapes before it loads an update.
        yield (
            f"rollout.engine.flags.quantization: found {values['quantization']!r}, allowed: none; "
            "SGLang cannot load updated weights into quantized parameters"
        )


def _argument_name(flag: str) -> str:
    """Name of the server argument for a ``flag``, which may be written as on a command line."""
    return flag.lstrip("-").replace("-", "_")


def _check_sampling_mask(config: Config) -> Iterator[str]:
    """Mistakes in settings that exclude a part of the vocabulary."""
    # SGLang 0.5.21 reports the tokens that top_k, top_p and min_p keep only up to a number, and
    # only without speculative decoding.
    rollout, flags = config.rollout, config.rollout.engine.flags
    if (rollout.top_k, rollout.top_p, rollout.min_p) == (0, 1.0, 0.0):
        return
    max_kept = flags.get("sampling_mask_max_tokens", MAX_SAMPLING_MASK)
    if isinstance(max_kept, int) and not 0 < rollout.top_k <= max_kept:
        yield (
            f"rollout.top_k: found {rollout.top_k} with top_p {rollout.top_p:g} and min_p "
            f"{rollout.min_p:g}, allowed: 2 to {max_kept} "
            "(rollout.engine.flags.sampling_mask_max_tokens); SGLang does not report the kept "
            "tokens of a larger number"
        )
    if flags.get("speculative_algorithm"):
        yield (
            "rollout.engine.flags.speculative_algorithm: found it together with rollout.top_k, "
            "top_p or min_p, allowed: one of both; SGLang does not report the kept tokens then"
        )


def check_flags(config: Config, section: str, flags: Mapping[str, object]) -> Iterator[str]:
    """Mistakes in ``flags``, the server arguments that a user sets in a ``section``, one line
    each."""
    arguments = server_arguments() if _uses_this_installation(config) else {}
    mistaken = set()
    for flag, value in flags.items():
        name, key = _argument_name(flag), f"{section}.{flag}"
        if name in RESERVED_FLAGS:
            yield f"{key}: found {value!r}, but the role sets this argument; {_advice(name)}"
        elif name != flag:
            yield f"{key}: found a flag with dashes, allowed: underscores ({name})"
        elif arguments and name not in arguments:
            yield f"{key}: SGLang has no such server argument{_nearest(name, arguments)}"
        elif arguments:
            allowed = arguments[name].misfit(value) or range_misfit(name, value)
            if allowed:
                mistaken.add(flag)
                yield f"{key}: found {value!r}, allowed by SGLang: {allowed}"
    yield from device_mistakes(
        section, {flag: flags[flag] for flag in flags if flag not in mistaken}
    )


def _nearest(name: str, arguments: Mapping[str, ServerArgument]) -> str:
    """Hint at the argument that an unknown ``name`` probably means, or empty."""
    for field, argument in arguments.items():
        if name in argument.aliases:
            return f"; did you mean {field}?"
    if name in _VLLM_NAMES:
        return f"; vLLM's {name} is {_VLLM_NAMES[name]} in SGLang"
    if f"{name}_size" in arguments:
        return f"; did you mean {name}_size?"
    return near(name, sorted(arguments))


def _uses_this_installation(config: Config) -> bool:
    """Whether the roles use the packages that are installed on this node."""
    return not config.site.python and config.site.container.runtime == "none"


def _advice(name: str) -> str:
    """Advice for a user who sets ``name``, a key of RESERVED_FLAGS."""
    return f"set {RESERVED_FLAGS[name]} instead" if RESERVED_FLAGS[name] else "it cannot be changed"


def _check_ports(first: int, replicas: int) -> Iterator[str]:
    if not first:
        return
    last = first + replicas - 1
    if last > 65535:
        yield (
            f"rollout.engine.port: found {first}, with {replicas} replicas up to {last}; "
            f"allowed: at most {65536 - replicas}, or 0 for free ports"
        )
        return
    for port in range(first, last + 1):
        reason = _bind_error(port)
        if reason:
            yield (
                f"rollout.engine.port: found {first}, but {port} is {reason}; name another, or 0 "
                "for free ones"
            )


def _bind_error(port: int) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else f"refused ({error.strerror})"
    return ""
