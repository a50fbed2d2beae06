"""One module for each role: what its processes do until the run is finished."""
