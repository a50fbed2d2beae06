"""Commands that show what a run does and did: status, report, samples, logs."""
