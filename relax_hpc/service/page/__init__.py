"""The page of a run for people, made from a run directory or from the state of the service.

`take_snapshot` reads everything from a run directory, `render_document` makes the page of it.
"""
