"""What operators look at: status, reports, samples, logs, the doctor, checks and memory plans."""
