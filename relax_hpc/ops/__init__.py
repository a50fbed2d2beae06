"""Status, reports, samples, logs, the doctor, checks and memory plans, for operators of runs."""
