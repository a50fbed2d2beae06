"""Episodes of several turns, played against an environment."""
