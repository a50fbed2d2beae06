"""Commands that look into the processes of a running run: their stacks, and a shell beside them."""
