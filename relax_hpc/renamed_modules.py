"""Import paths of release 0.1: each name leads to the same module at its present place.

`relax_hpc.transfer_queue`, `.fields` and `.engines.engine` stay for files of users. The other old
names are accepted for one release, with a warning that has the present name.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "relax_hpc."
RENAMED = {
    "algorithms.gae": "algorithms.ppo",
    "background": "base.background",
    "checkpoint": "training.checkpoint",
    "checks": "ops.checks",
    "checks.agents": "ops.checks.environment",
    "cli": "commands",
    "cli.living": "commands.run_commands",
    "config.clean": "config.layer_validation",
    "config.read": "config.yaml_files",
    "content_id": "base.content_id",
    "convert.passengers": "convert.frozen_tensors",
    "copies": "base.parallel_copies",
    "cuda_allocator": "base.cuda_allocator",
    "cuda_context": "base.cuda_context",
    "disk": "base.disk_waits",
    "doctor": "ops.doctor",
    "engines": "rollout.engines",
    "engines.draws": "rollout.engines.seeded_draws",
    "engines.gate": "rollout.engines.update_gate",
    "engines.places": "rollout.engines.simulated_slots",
    "engines.sglang.cpu": "rollout.engines.sglang.cpu.stand_ins",
    "engines.sglang.kernel_cpu": "rollout.engines.sglang.cpu.kernel",
    "engines.together": "rollout.engines.engine",
    "environments.plain": "environments.plain_values",
    "error_origin": "base.error_origin",
    "errors": "base.errors",
    "fields": "base.fields",
    "foreign_files": "base.foreign_files",
    "gateway": "rollout.agents.gateway",
    "gateway.place": "rollout.agents.gateway.address",
    "host_memory": "base.host_memory",
    "imports": "base.imports",
    "last_error": "base.last_error",
    "lifecycle": "commands",
    "lifecycle.establish": "commands.run_setup",
    "lifecycle.without": "commands.scale",
    "local_dir": "base.local_dir",
    "metrics": "base.metrics",
    "models": "training.models",
    "models.grouped_experts": "training.models.expert_layer",
    "models.rotary": "training.models.stage_model",
    "models.sizes": "base.model_sizes",
    "multimodal": "data.multimodal",
    "multimodal.bad": "data.multimodal.bad_media",
    "named": "base.plugins",
    "observe": "ops.observe",
    "observe.hours": "ops.observe.gpu_hours",
    "observe.states": "ops.observe.run_state",
    "orphaned_memory": "base.orphaned_memory",
    "parts": "base.log_rotation",
    "path_errors": "base.path_errors",
    "plan": "ops.plan",
    "plan.peaks": "ops.plan.view",
    "processes": "base.processes",
    "protocol": "base.protocol",
    "rendezvous": "net.rendezvous",
    "rendezvous.signs": "net.rendezvous.life_signs",
    "reward_settings": "base.reward_settings",
    "rewards.ask": "rewards.scoring",
    "rewards.form": "rewards.format",
    "rewards.of_environment": "rewards.environment_reward",
    "rewards.of_run": "rewards.run_settings",
    "rewards.where": "rewards.placement",
    "rewards.while_away": "rewards.outage",
    "roles.ahead": "roles.start_ahead",
    "roles.context": "queue.process_context",
    "roles.inner": "roles.inner_forward",
    "roles.membership": "rollout.membership",
    "roles.node_files": "net.node_files",
    "roles.replica": "rollout.replica",
    "roles.ticket_worker": "rollout.ticket_worker",
    "rollout.activity": "rollout.engine_activity",
    "rollout.agents.recorded": "rollout.agents.recorded_turns",
    "rollout.bad_lines": "rollout.bad_row_reports",
    "rollout.bridge": "rollout.episodes.turn_tokens",
    "rollout.chat_tokens": "rollout.episodes.chat_tokens",
    "rollout.history": "rollout.episodes.history",
    "rollout.judge": "rollout.group_rewards",
    "rollout.observed_media": "rollout.episodes.observed_media",
    "rollout.player": "rollout.episodes.player",
    "rollout.readable": "rollout.readable_rows",
    "rollout.recording": "rollout.episodes.recording",
    "rollout.replay": "rollout.episodes.replay",
    "rollout.room": "rollout.episodes.turn_budget",
    "rollout.samples": "rollout.rows",
    "rollout.tape": "rollout.episodes.recorded_episode",
    "rollout.turns": "rollout.episodes.turns",
    "routes": "base.routes",
    "rundir": "base.rundir",
    "sandbox": "cluster.sandbox",
    "server_devices": "base.server_devices",
    "settings": "base.settings",
    "signatures": "base.signatures",
    "slurm": "cluster.slurm",
    "slurm.ask": "cluster.slurm.program_output",
    "slurm.endings": "cluster.slurm.job_endings",
    "slurm.inherited": "cluster.slurm.het_options",
    "slurm.moved": "cluster.slurm.detached_groups",
    "slurm.silence": "cluster.slurm.silent_groups",
    "supervise": "cluster.supervise",
    "supervise.ahead": "cluster.supervise.start_ahead",
    "supervise.leftovers": "cluster.supervise.processes",
    "supervise.roll": "cluster.supervise.group_table",
    "supervise.unsaved": "cluster.supervise.unsaved_work",
    "terminal_text": "base.terminal_text",
    "training.agreement": "training.route_agreement",
    "tasks.avi": "examples.tasks.avi",
    "tasks.arithmetic": "examples.tasks.arithmetic",
    "tasks.beeps": "examples.tasks.beeps",
    "tasks.coloured_shapes": "examples.tasks.coloured_shapes",
    "tasks.fine_stripes": "examples.tasks.fine_stripes",
    "tasks.mixed_media": "examples.tasks.mixed_media",
    "tasks.moving_squares": "examples.tasks.moving_squares",
    "tasks.one_medium": "examples.tasks.one_medium",
    "tasks.sort_digits": "examples.tasks.sort_digits",
    "training.alone": "training.cpu.single_process",
    "training.away": "training.device_offload",
    "training.batches": "training.models.batches",
    "training.gathered": "training.gather_text",
    "training.meeting": "training.authenticated_store",
    "training.swapped": "training.swap_weights",
    "training.upstream_fixes": "training.cpu.upstream_fixes",
    "transfer_queue": "queue",
    "transfer_queue.client.line": "queue.client.controller_link",
    "transfer_queue.client.ways": "queue.storage.shard_store",
    "transfer_queue.controller.beats": "queue.controller.service",
    "transfer_queue.controller.changes": "queue.controller.state",
    "transfer_queue.controller.changes.admission": "queue.controller.state.tickets",
    "transfer_queue.controller.changes.media": "queue.controller.state.media_holders",
    "transfer_queue.controller.changes.training": "queue.controller.state.progress",
    "transfer_queue.controller.forked": "queue.controller.forked_work",
    "transfer_queue.controller.state.counts": "queue.controller.state.queue_state",
    "transfer_queue.controller.state.order": "queue.controller.state.progress",
    "transformers_hook": "base.transformers_hook",
    "transport": "net.transport",
    "versions": "base.versions",
    "weight_files": "base.weight_files",
    "weights": "training.weights",
    "weights.untrained": "training.weights.untrained_tensors",
    "workers": "net.workers",
}
"""Module or package of release 0.1 -> its present name, both below relax_hpc."""
KEPT = frozenset({"engines", "engines.engine", "fields", "transfer_queue"})
"""Old names that files of users have. They stay, without a warning."""


def present_name(name: str) -> str:
    """Present name of the module that had ``name``, both whole; empty if it was not renamed.

    >>> present_name("relax_hpc.multimodal.image"), present_name("relax_hpc.config.load")
    ('relax_hpc.data.multimodal.image', '')
    """
    if not name.startswith(_PACKAGE):
        return ""
    parts = name.removeprefix(_PACKAGE).split(".")
    for count in range(len(parts), 0, -1):
        if present := RENAMED.get(".".join(parts[:count])):
            return _PACKAGE + ".".join([present, *parts[count:]])
    return ""


class _Redirect(Loader):
    """Puts the module with the present name in the place of the one that is imported."""

    def __init__(self, present: str) -> None:
        self._present = present

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        sys.modules[old] = importlib.import_module(self._present)
        if old.removeprefix(_PACKAGE) not in KEPT:
            warnings.warn(f"{old} is {self._present} now", FutureWarning, stacklevel=2)


class RenamedModules(MetaPathFinder):
    """Finds modules by the names that they had in release 0.1."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if present := present_name(name):
            return ModuleSpec(name, _Redirect(present), is_package=True)
        return None


def install() -> None:
    """Let this process import modules by their old names."""
    # Before the finder of files, which would load a second copy from the folder of the package.
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())
