"""What every machine over a `World` does: random faults while it acts, then, without any more, the
end of the run."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.effort import effort
from tests.helpers.queue_in_memory import contents
from tests.helpers.queue_world import World


class WorldMachine(RuleBasedStateMachine):
    """Sub-classes make `world`, and let its roles act and die."""

    world: World | None = None

    @rule(older=st.integers(1, 3))
    def kill_actor_and_lose_checkpoints(self, older):
        self.world.kill("actor", True)
        self.world.older = older

    @rule()
    def kill_hub(self):
        self.world.service.restart()

    @invariant()
    def replay_is_the_same(self):
        if self.world:
            assert contents(self.world.service.replayed()) == contents(self.world.service.state)

    def teardown(self):
        if self.world:
            self.world.go_to_the_end()


def searched(short: int, whole: int) -> settings:
    """How many runs are made up in a short and in a whole session; nobody waits for smaller ones
    that fail too."""
    return settings(
        max_examples=effort(short, whole),
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
