"""A role with its own group. It watches the rows of each step, writes statistics of each prompt
group to RUN_DIR/watch/step-N.json, and adds a field to each row."""

import numpy as np

from relax_hpc.base.rundir import read_map, write_json
from relax_hpc.queue.client.claims import claim_valid

MAX_TOKENS = 1 << 20
"""Tokens of the rows of one claim, at most."""


def run(context):
    """Watch rows until the run is finished."""
    client, folder = context.client, context.run.root / "watch"
    folder.mkdir(exist_ok=True)
    context.report_phase("")
    # A claim waits for rows. It is None when the run is finished.
    while claim := claim_valid(client, "watch", MAX_TOKENS):
        with context.spans("queue", step=claim.step):
            rows = client.rows(claim)
            shares = {row["row_id"]: repeated_share(row) for row in rows}
            # First the file, then the put: after the put, no later incarnation gets these rows.
            write_statistics(folder / f"step-{claim.step:06d}.json", claim, rows, shares)
            fields = [{"row_id": row_id, "repeated": share} for row_id, share in shares.items()]
            client.put(fields, ("repeated",), claim)
        context.report(claim.step, {"watch/repeated": float(np.mean(list(shares.values())))})


def write_statistics(path, claim, rows, shares):
    """Write the claim's prompt groups to the file of the step. A group that is in the file already
    is replaced: its claim was released after a kill, or its rows were generated again."""
    statistics = read_map(path)
    for ticket in claim.tickets:
        group = [row for row in rows if row["ticket"] == ticket]
        statistics[str(ticket)] = {
            "rows": len(group),
            "reward": float(np.mean([row["reward"] for row in group])),
            "repeated": float(np.mean([shares[row["row_id"]] for row in group])),
        }
    write_json(path, statistics)


def repeated_share(row):
    """Share of the response's tokens that occur in it before, 0 to 1."""
    response = row["token_ids"][row["prompt_len"] :]
    return (len(response) - len(np.unique(response))) / max(len(response), 1)
