"""Environments for processes of environments."""

from __future__ import annotations

from relax_hpc.environments.base import Environment, Observation, Response, Step

SAID = "ok"


class Thrice(Environment):
    """Answers twice, and is done."""

    def step(self, response: Response) -> Step:
        return Step((Observation(SAID),), response.turn == 2, {"turns": response.turn + 1}, float(response.turn))
