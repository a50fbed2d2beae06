"""Files of the queue: shards of rows, HDF5 files of gathered steps, and media."""
