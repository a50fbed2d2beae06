"""Files of the queue: the journal, snapshots, and shards of rows."""
