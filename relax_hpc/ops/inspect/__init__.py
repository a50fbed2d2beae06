"""Commands that look into the processes of a run: their stacks, and a shell on their nodes."""
