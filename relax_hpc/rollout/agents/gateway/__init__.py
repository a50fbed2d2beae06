"""An endpoint with OpenAI's interface for existing agent programs, on the loopback address of each
node with programs.

    agent program --HTTP--> front (gateway, or forwarder of its node) --> broker (gateway, in the
    hub) --> rollout

Rollout processes open sessions and answer the requests in them. The gateway does not handle tokens.
A rollout process creates the bearer of a session and sends only its digest, so that a listener
between the nodes gets nothing with which it could use a session.
"""
