"""Has SGLang 0.5.21 tell of each token the routes by which it was first read, and if that is wanted
as it draws.

Left alone, it tells of them when a response has ended, by what then lies where its keys and values
are. Where it has given these up meanwhile, for new weights or for want of room, it has read
everything once more, by other routes than those that the tokens and their log-probabilities came
from.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_hpc.rollout.engines.sglang.after_import import change

if TYPE_CHECKING:
    import torch

_MANAGERS = "sglang.srt.managers."
_pools: list[Any] = []
"""Pools that hold the places of each request's tokens, in a process that schedules."""


def install(as_drawn: bool) -> None:
    """Change SGLang in a process that has not imported it yet. ``as_drawn``: a piece of a response
    that goes on has the routes that came since the last one, up to its last token but one, perhaps
    several texts with commas in between; the last piece has all in any case."""
    changes = {
        f"{_MANAGERS}schedule_batch": _keep_what_is_retracted,
        f"{_MANAGERS}scheduler_components.batch_result_processor": _put_the_first_before_the_rest,
    }
    if as_drawn:
        changes[f"{_MANAGERS}scheduler_components.output_streamer"] = _tell_as_drawn
        changes[f"{_MANAGERS}tokenizer_manager"] = _lose_nothing_on_the_way
    change(changes)


def _first(request: Any, pool: Any) -> torch.Tensor:
    """First routes of all tokens that were read so far: int32 [tokens, layers, chosen]."""
    import torch
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    known = getattr(request, "first_routes", None)
    start = 0 if known is None else len(known)
    tokens = len(request.origin_input_ids) + len(request.output_ids)
    # Nothing was fed with the last one; of a prompt that is read in parts, the rest was not either.
    stop = max(start, min(request.kv.kv_committed_len, tokens - 1))
    where = request.kv.req_pool_idx, stop + 1, pool, start
    news = get_global_experts_capturer().get_topk(*where)
    request.first_routes = news if known is None else torch.cat([known, news])
    return request.first_routes


def _keep_what_is_retracted(module: ModuleType) -> None:
    release = module.release_req

    def release_req(*, req: Any, req_to_token_pool: Any, **rest: Any) -> Any:
        if req.return_routed_experts and req.kv.holds_kv:
            _first(req, req_to_token_pool)
        return release(req=req, req_to_token_pool=req_to_token_pool, **rest)

    module.release_req = release_req


def _put_the_first_before_the_rest(module: ModuleType) -> None:
    processor = module.SchedulerBatchResultProcessor
    begin, collect = processor.__init__, processor._maybe_collect_routed_experts

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _pools[:] = [self.req_to_token_pool]

    def maybe_collect_routed_experts(self: Any, req: Any) -> None:
        collect(self, req)
        if (
            known := getattr(req, "first_routes", None)
        ) is not None and req.routed_experts is not None:
            both = min(len(known), len(req.routed_experts))
            req.routed_experts[:both] = known[:both]

    processor.__init__, processor._maybe_collect_routed_experts = init, maybe_collect_routed_experts


def _tell_as_drawn(module: ModuleType) -> None:
    stream = module._GenerationStreamAccumulator
    take = stream.accept

    def accept(self: Any, *, req: Any) -> None:
        before = len(self.rids)
        take(self, req=req)
        if (
            len(self.rids) > before
            and req.stream
            and req.return_routed_experts
            and not req.finished()
        ):
            whole = _first(req, *_pools)
            self.routed_experts[-1] = whole[getattr(req, "told_routes", 0) :].clone()
            req.told_routes = len(whole)

    stream.accept = accept


def _lose_nothing_on_the_way(module: ModuleType) -> None:
    manager = module.TokenizerManager
    join = manager._coalesce_streaming_chunks

    def coalesce_streaming_chunks(
        self: Any, out_list: list[dict[str, Any]], *about: Any, **named: Any
    ) -> dict[str, Any]:
        out = join(self, out_list, *about, **named)
        # Of pieces that go out as one it takes what is said of the last.
        if "meta_info" in out and not out["meta_info"].get("finish_reason"):
            texts = (piece["meta_info"].get("routed_experts") for piece in out_list)
            out["meta_info"]["routed_experts"] = ",".join(filter(None, texts))
        return out

    manager._coalesce_streaming_chunks = coalesce_streaming_chunks
