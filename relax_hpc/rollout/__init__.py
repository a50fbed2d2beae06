"""Generation of rows: engines, episodes, agents, and the workers that use them."""
