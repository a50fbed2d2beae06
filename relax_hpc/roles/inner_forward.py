"""Forward roles inside the actor: its processes score the rows of each window before they train on
it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, ModelConfig
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.swap_weights import SwappedWeights


class InnerRoles:
    """The roles of `actor.forward` in one rank. Every rank creates it and makes the same calls.

    The reference has a copy of its weights. actor_fwd scores with the weights before the step: the
    present weights during the first mini-batch, and a copy of them during later ones. If the loss
    does not use old log-probabilities, actor_fwd scores nothing. It also scores nothing if the step
    has one update, because the trainer's own log-probabilities are then the old ones.
    """

    def __init__(self, model: PolicyModel, config: Config, policy: Path) -> None:
        """`model` has the weights of the Hugging Face directory `policy`, and keeps them.

        ConfigError: the reference has another architecture.
        """
        self.model, self.temperature = model, config.rollout.temperature
        algorithm = config.algorithm
        self._passes, self._mini_batches = algorithm.passes, algorithm.mini_batches
        needs_old = algorithm.uses_old and algorithm.updates > 1
        self.roles = {role for role in config.actor.forward if role != "actor_fwd" or needs_old}
        """Roles that score rows."""
        self._weights = SwappedWeights(model.module)
        if "reference" in self.roles:
            self._keep_reference(config.model, policy)

    def _keep_reference(self, settings: ModelConfig, policy: Path) -> None:
        path = settings.reference_path
        if path:
            check_same(read_config(Path(path)), self.model.hf_config, settings.ignore_keys)
            self.model.load_hf(Path(path))
        self._weights.store("reference")
        if path:
            self.model.load_hf(policy)

    def begin_step(self) -> None:
        """Copy the weights before the first update of a step, if later mini-batches need them."""
        if "actor_fwd" in self.roles and self._mini_batches > 1:
            self._weights.store("old")

    def score(self, number: int, batches: Sequence[Batch]) -> None:
        """Add the log-probabilities of these roles to `batches`, of mini-batch `number` in its
        first pass.

        The call is collective over the tensor and pipeline ranks of a replica, which pass the same
        batches. No other code may read the weights during the call.
        """
        # The first mini-batch of a single pass needs no old log-probabilities, see the class.
        if "actor_fwd" in self.roles and (number > 0 or self._passes > 1):
            self._fill("old_logprobs", batches, "old" if number > 0 else "")
        if "reference" in self.roles:
            self._fill("ref_logprobs", batches, "reference")

    def _fill(self, field: str, batches: Sequence[Batch], weights: str) -> None:
        with self._weights.in_place(weights) if weights else nullcontext():
            # Only the policy has the routes of the engine.
            scores = self.model.batch_logprobs(
                batches, self.temperature, routed=field != "ref_logprobs"
            )
        # Only the last pipeline stage has scores, and only it needs them.
        for batch, values in zip(batches, scores, strict=False):
            batch.fields[field] = values


def check_same(
    reference: dict[str, Any], policy: dict[str, Any], ignore_keys: Sequence[str] = ()
) -> None:
    """ConfigError: config.json of the reference has another architecture than the policy's."""
    if spec_from_config(reference, ignore_keys) != spec_from_config(policy, ignore_keys):
        raise ConfigError(
            "model.reference_path: found another architecture than the policy's, allowed with "
            "reference in actor.forward, or with held-out pairs (eval.every): the same; run the "
            "reference in its own group, or set eval.every: 0"
        )
