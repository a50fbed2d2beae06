"""Transport planes between processes, the rendezvous of ranks and groups, and worker processes."""
