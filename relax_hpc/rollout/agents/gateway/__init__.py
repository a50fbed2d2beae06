"""An endpoint as OpenAI's that existing agent programs talk to, on the loopback address of each
node that has some.

    agent program --HTTP--> front (gateway, or forwarder of its node) --> broker (gateway, in the
    hub) --> rollout

Rollout processes open sessions and answer what comes in them; here nobody knows of tokens. The
bearer of a session is made by who opens it, and only its digest is sent: whoever listens between
the nodes learns nothing that opens anything.
"""
