"""Pure functions of reinforcement learning: rewards to advantages (numpy), log-probabilities to a loss (torch).

Import the module you need: `advantages` runs in the hub, which must not load torch; `losses` and `kl` need it.
"""
