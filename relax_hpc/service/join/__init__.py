"""`relax-hpc join`: a member process next to an engine that the run cannot reach itself.

It makes only outgoing connections: to the service of the run and to the engine. It sends the run's
requests to the engine, fetches versions of the weights, and lets the engine load them by path.
"""
