"""An endpoint with OpenAI's interface for existing agent programs, on the loopback address of each
node with programs.

    agent program --HTTP--> front (gateway, or forwarder of its node) --> broker (gateway, in the
    hub) --> rollout

The way of a request from the program to the engine, and of the episode into the queue:

    front.Front                      reads the request and checks its bearer
    broker.Broker.answer             calls the rollout process that opened the session
    agents.Agents._serve             finds the session
    session.AgentSession.reply       answers a repeated request again
    dialects                         parse the request, and later write the reply
    session.AgentSession._answer     finds the row of the chat, or opens a new one
    turns.EpisodeStart.draw_turn     asks the engine for a turn

When the program has ended:

    agents._end_episode              ends the episode, without turns that the program did not await
    group_rewards.GroupRewards.rows  computes the rewards of the prompt group
    rows.group_rows                  makes its rows
    outbox.Outbox.put                collects prompt groups
    QueueClient.put_generated        puts them into the queue

Rollout processes open sessions and answer the requests in them. The gateway does not handle tokens.
A rollout process creates the bearer of a session and sends only its digest, so that a listener
between the nodes gets nothing with which it could use a session.
"""
