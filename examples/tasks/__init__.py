"""Small verifiable tasks that a tiny model learns on two CPU cores; the files in configs/runs use
them."""
