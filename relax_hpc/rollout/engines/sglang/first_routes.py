"""Patches of SGLang 0.5.21 that keep the first expert routes of each token.

SGLang reports routes when a response ends. It reads them from buffers that are indexed like the
cache of keys and values. If SGLang has evicted keys and values in between, for new weights or for
lack of memory, it has processed all tokens again, possibly with other routes than those with which
tokens and log-probabilities were computed.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_hpc.rollout.engines.sglang.import_patches import patch_on_import

if TYPE_CHECKING:
    import torch

_MANAGERS = "sglang.srt.managers."
_pools: list[Any] = []
"""In a scheduler process: the pool with the cache positions of each request's tokens."""


def install(as_drawn: bool) -> None:
    """Patch SGLang in a process that has not imported it yet.

    ``as_drawn``: a piece of an unfinished response has the routes since the piece before, without
    that of the last token. They may be several texts with commas in between. The last piece has all
    routes in any case.
    """
    patches = {
        f"{_MANAGERS}schedule_batch": _save_routes_at_retraction,
        f"{_MANAGERS}scheduler_components.batch_result_processor": _report_first_routes,
    }
    if as_drawn:
        patches[f"{_MANAGERS}scheduler_components.output_streamer"] = _stream_routes
        patches[f"{_MANAGERS}tokenizer_manager"] = _join_routes_of_pieces
    patch_on_import(patches)


def _first_routes(request: Any, pool: Any) -> torch.Tensor:
    """First routes of all tokens that were processed so far: int32 [tokens, layers, chosen]."""
    import torch
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    saved = getattr(request, "first_routes", None)
    start = 0 if saved is None else len(saved)
    tokens = len(request.origin_input_ids) + len(request.output_ids)
    # The last token is not processed yet. With chunked prefill, later chunks of the prompt are not
    # processed either.
    stop = max(start, min(request.kv.kv_committed_len, tokens - 1))
    # get_topk of SGLang 0.5.21 takes a length and reads the routes of all tokens but the last one.
    new = get_global_experts_capturer().get_topk(request.kv.req_pool_idx, stop + 1, pool, start)
    request.first_routes = new if saved is None else torch.cat([saved, new])
    return request.first_routes


def _save_routes_at_retraction(module: ModuleType) -> None:
    # SGLang 0.5.21 calls release_req when it retracts a request. This frees the request's cache
    # positions, and other requests overwrite the routes at these positions.
    patched: Any = module
    release = patched.release_req

    def release_req(*, req: Any, req_to_token_pool: Any, **arguments: Any) -> Any:
        if req.return_routed_experts and req.kv.holds_kv:
            _first_routes(req, req_to_token_pool)
        return release(req=req, req_to_token_pool=req_to_token_pool, **arguments)

    patched.release_req = release_req


def _report_first_routes(module: ModuleType) -> None:
    # At the end of a response, SGLang 0.5.21 collects the routes of the last processing. The saved
    # ones replace them.
    processor = module.SchedulerBatchResultProcessor
    initialize, collect = processor.__init__, processor._maybe_collect_routed_experts

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        _pools[:] = [self.req_to_token_pool]

    def maybe_collect_routed_experts(self: Any, req: Any) -> None:
        collect(self, req)
        saved = getattr(req, "first_routes", None)
        if saved is not None and req.routed_experts is not None:
            count = min(len(saved), len(req.routed_experts))
            req.routed_experts[:count] = saved[:count]

    processor.__init__, processor._maybe_collect_routed_experts = init, maybe_collect_routed_experts


def _stream_routes(module: ModuleType) -> None:
    # SGLang 0.5.21 puts routes into the last piece of a response only.
    accumulator = module._GenerationStreamAccumulator
    original_accept = accumulator.accept

    def accept(self: Any, *, req: Any) -> None:
        count = len(self.rids)
        original_accept(self, req=req)
        was_added = len(self.rids) > count
        if was_added and req.stream and req.return_routed_experts and not req.finished():
            routes = _first_routes(req, *_pools)
            self.routed_experts[-1] = routes[getattr(req, "sent_routes", 0) :].clone()
            req.sent_routes = len(routes)

    accumulator.accept = accept


def _join_routes_of_pieces(module: ModuleType) -> None:
    # SGLang 0.5.21 joins the queued pieces of a stream and takes meta_info from the last one, so
    # that the routes of the others would be lost.
    manager = module.TokenizerManager
    join = manager._coalesce_streaming_chunks

    def coalesce_streaming_chunks(
        self: Any, out_list: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        out = join(self, out_list, *args, **kwargs)
        if "meta_info" in out and not out["meta_info"].get("finish_reason"):
            texts = (piece["meta_info"].get("routed_experts") for piece in out_list)
            out["meta_info"]["routed_experts"] = ",".join(filter(None, texts))
        return out

    manager._coalesce_streaming_chunks = coalesce_streaming_chunks
