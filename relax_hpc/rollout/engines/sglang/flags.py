"""SGLang's server arguments: which there are, which are ours to set, and what is wrong with those
that a user gives."""

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

OWN_FLAGS = {
    "model_path": "model.path",
    "dtype": "rollout.engine.dtype",
    "device": "model.device",
    "random_seed": "seed",
    "host": "",
    "port": "rollout.engine.port",
    "api_key": "",
    "admin_api_key": "",
    "weight_version": "",
    # Other ways to serve: these open sockets of their own, and some of them ask nobody for a key.
    **dict.fromkeys(
        ("enable_http2", "grpc_mode", "grpc_port", "smg_grpc_mode", "encoder_only", "use_ray"), ""
    ),
    **dict.fromkeys(("tokenizer_worker_num", "sidecar", "ssl_certfile", "ssl_keyfile"), ""),
}
"""Arguments that the engine sets itself -> our key for them, empty if there is none."""
_DRAWS_OTHERWISE = {
    # tokenizer_manager.py of SGLang 0.5.21 lays these under the parameters of each request.
    "preferred_sampling_params": (
        None,
        "set rollout.temperature, top_p, top_k, min_p and stop instead",
    ),
    # Below 1 a drafted token is accepted more often than the policy would draw it.
    "speculative_accept_threshold_single": (1.0, "leave it out"),
    "speculative_accept_threshold_acc": (1.0, "leave it out"),
    # Masks tokens while the model thinks.
    "enable_strict_thinking": (False, "leave it out"),
    "enable_custom_logit_processor": (False, "leave it out"),
    # The engine would draw after another prompt than the one in the row.
    "allow_auto_truncate": (False, "lower data.max_prompt_tokens, or set data.truncate"),
}
"""Arguments by which tokens are drawn from another distribution than the one whose
log-probabilities are reported -> the value that changes nothing, and what to do instead. No metric
shows the difference."""
_VLLM_NAMES = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "enable_prefix_caching": "disable_radix_cache (with the opposite value)",
    "enable_chunked_prefill": "chunked_prefill_size (-1: off)",
}
"""Names of engine arguments in vLLM -> SGLang's."""
ROUTES_FLAG = "enable_return_routed_experts"
ROUTES_RELEASE = "0.5.21"
"""Release of SGLang whose scheduler `first_routes` changes."""
MOST_CUT = 4096
"""Tokens of a distribution that SGLang tells, by default."""


def routes_misfit() -> str:
    """Reason why the SGLang that is installed cannot tell of first routes; empty: it can, or there
    is none here."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return ""
    if found.partition("+")[0] == ROUTES_RELEASE:
        return ""
    return (
        f"model.routing_replay: found SGLang {found}, allowed: {ROUTES_RELEASE}, whose "
        "scheduler it changes, or off"
    )


def refuse_own(flags: dict[str, object], key: str = "rollout.engine.flags") -> None:
    """ConfigError if ``flags``, the section ``key``, set what the server's owner must set, or hide
    its devices."""
    for name in flags:
        if name in OWN_FLAGS:
            raise ConfigError(f"{key}.{name}: not allowed; {_instead(name)}")
    for mistake in device_mistakes(key, flags):
        raise ConfigError(mistake)


def check(config: Config) -> Iterator[str]:
    """Mistakes in the settings of an SGLang engine, one line each."""
    yield from check_flags(config, "rollout.engine.flags", config.rollout.engine.flags)
    yield from _other_draws(config.rollout.engine.flags)
    if config.rollout.partial_rollout == "recompute" and not config.rollout.engine.flags.get(
        "disable_radix_cache", True
    ):
        # SGLang 0.5.21 finds the keys and values of older weights there again for the request that
        # left them.
        yield (
            "rollout.partial_rollout: found recompute with "
            "rollout.engine.flags.disable_radix_cache false, allowed: "
            "keep or off; or leave out the flag"
        )
    if config.model.routing_replay != "off" and _is_here(config) and (misfit := routes_misfit()):
        yield misfit
    if (replay := config.model.routing_replay) != "off" and not config.rollout.engine.flags.get(
        ROUTES_FLAG, True
    ):
        yield (
            f"rollout.engine.flags.{ROUTES_FLAG}: found false with model.routing_replay {replay}, "
            "for which engines have to give their routes; leave out the flag"
        )
    yield from _cut(config)
    yield from _ports(config.rollout.engine.port, config.rollout.replicas)


def _other_draws(flags: Mapping[str, object]) -> Iterator[str]:
    """Mistakes in ``flags`` by which tokens are drawn otherwise than their log-probabilities
    say."""
    for flag, value in flags.items():
        harmless, instead = _DRAWS_OTHERWISE.get(_name_of(flag), (value, ""))
        if value != harmless and value is not None:
            yield (
                f"rollout.engine.flags.{flag}: found {value!r}, allowed: {harmless!r}; tokens "
                f"would be drawn otherwise than their log-probabilities say; {instead}"
            )


def _name_of(flag: str) -> str:
    """Name of the server argument that ``flag`` means, as on a command line or not."""
    return flag.lstrip("-").replace("-", "_")


def _cut(config: Config) -> Iterator[str]:
    """SGLang 0.5.21 tells of what tokens are drawn from where it is bounded, and by the target
    model."""
    shape, flags = config.rollout, config.rollout.engine.flags
    if (shape.top_k, shape.top_p, shape.min_p) == (0, 1.0, 0.0):
        return
    most = flags.get("sampling_mask_max_tokens", MOST_CUT)
    if isinstance(most, int) and not 0 < shape.top_k <= most:
        yield (
            f"rollout.top_k: found {shape.top_k} with top_p {shape.top_p:g} and min_p "
            f"{shape.min_p:g}, allowed: 2 to "
            f"{most} (rollout.engine.flags.sampling_mask_max_tokens); of more SGLang does not tell "
            "what it has left"
        )
    if flags.get("speculative_algorithm"):
        yield (
            "rollout.engine.flags.speculative_algorithm: found it beside rollout.top_k, top_p or "
            "min_p, allowed: one of both; SGLang then does not tell what it has left"
        )


def check_flags(config: Config, section: str, flags: Mapping[str, object]) -> Iterator[str]:
    """Mistakes in ``flags``, server arguments that a user gives in a ``section``, one line each."""
    arguments = server_arguments() if _is_here(config) else {}
    mistaken = set()
    for flag, value in flags.items():
        name, key = _name_of(flag), f"{section}.{flag}"
        if name in OWN_FLAGS:
            yield f"{key}: found {value!r}, but this argument is set by the role; {_instead(name)}"
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
    """Hint at the argument that the unknown ``name`` probably means, or empty."""
    for field, argument in arguments.items():
        if name in argument.aliases:
            return f"; did you mean {field}?"
    if name in _VLLM_NAMES:
        return f"; vLLM's {name} is {_VLLM_NAMES[name]} there"
    if f"{name}_size" in arguments:
        return f"; did you mean {name}_size?"
    return near(name, sorted(arguments))


def _is_here(config: Config) -> bool:
    """Whether roles have the packages that are installed here."""
    return not config.site.python and config.site.container.runtime == "none"


def _instead(name: str) -> str:
    """Advice instead of setting ``name``, a key of OWN_FLAGS."""
    return f"set {OWN_FLAGS[name]} instead" if OWN_FLAGS[name] else "it cannot be changed"


def _ports(first: int, replicas: int) -> Iterator[str]:
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
        if reason := _cannot_bind(port):
            yield (
                f"rollout.engine.port: found {first}, but {port} is {reason}; name another, or 0 "
                "for free ones"
            )


def _cannot_bind(port: int) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else f"refused ({error.strerror})"
    return ""
