"""A role that scores rows: it gives each row a field that says where a token is new."""

import numpy as np

from relax_hpc.base.fields import FieldSpec
from relax_hpc.config.roles import Role

ROLE = Role("relax_hpc.examples.role", needs=("token_ids",))
FIELD = FieldSpec("novelty", "token", "float32", "1 where a token is new", by="novelty", loss=True)
MAX_TOKENS = 1 << 20
"""Tokens of the rows of one claim, at most."""


def run(context):
    """Score rows until the run is finished."""
    client = context.client
    # A claim waits for rows. It is empty when the run is finished.
    while claim := client.claim("novelty", MAX_TOKENS):
        rows = client.rows(claim)
        scores = [{"row_id": row["row_id"], "novelty": novelty(row["token_ids"])} for row in rows]
        client.put(scores, ("novelty",), claim)


def novelty(tokens: np.ndarray) -> np.ndarray:
    """1.0 where a token has not occurred before, else 0.0: [tokens], float32."""
    is_new = np.zeros(len(tokens), np.float32)
    is_new[np.unique(tokens, return_index=True)[1]] = 1.0
    return is_new
