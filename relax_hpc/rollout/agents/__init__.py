"""Episodes of existing agent programs. A program is a process that uses the run's endpoint like
OpenAI's. Its requests and their answers become rows, token by token; `gateway` shows the whole way
of a request.
"""
