"""The autoscaler: observations of a run, a policy as a pure function, and the loop that applies
it."""
