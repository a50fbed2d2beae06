"""Endpoints, life signs and messages by which the processes of a run find each other."""
