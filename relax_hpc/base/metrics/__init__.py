"""Metrics of a run: metrics.jsonl, trackers, progress lines, time spans and plots."""
