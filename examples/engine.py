"""An engine that repeats the prompt: one file, and no other change."""

import asyncio

import numpy as np

from relax_hpc.base.fields import FieldSpec
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation, checked, refuse_media


class ParrotEngine:
    """Responds with the first tokens of the prompt, up to the budget."""

    name, phase, pause_s = "parrot", "the parrot wakes up", 0.0
    fields = (FieldSpec("position", "token", "int32", "position in the prompt", loss=True),)

    def __init__(self, config, number, model_dir, version, log_dir, local_number):
        self._version = version

    async def start(self): ...

    async def generate(self, request: GenerateRequest) -> Generation:
        refuse_media(request)
        tokens = list(request.prompt_ids)[: request.budget]
        # Each token has the log-probability and the version of the weights that sampled it.
        logprobs = [-1.0] * len(tokens)
        versions = np.full(len(tokens), self._version.encode(), np.int32)
        extras = {"position": np.arange(len(tokens), dtype=np.int32)}
        generation = Generation(tokens, logprobs, versions, "length", extras)
        return checked(generation, request.budget)

    async def update_weights(self, directory, version):
        self._version = version

    async def release(self): ...

    async def wait_dead(self):
        # This engine has no server process that could end.
        return await asyncio.get_running_loop().create_future()

    async def close(self): ...
