"""What may lie about in a run directory: an editor's copies, notes, files that are half written."""

from __future__ import annotations

from pathlib import Path

ODD = [
    b"",
    b"{",
    b"{}",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"op": 3, "group": []}',
    None,
]
"""Contents of files; None: a folder of that name."""
WRONG = (
    b'{"incarnation": 1, "group": "actor", "time": "now", "code": "0", "status": "done", '
    b'"attempt": [], "ranks": 3}'
)


def leave(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)


def scatter(root: Path) -> int:
    """Leave all of it wherever a living run reads; how many files look like requests."""
    for number, content in enumerate(ODD, 1):
        leave(root / "requests" / f"{number:06d}.json", content)
        leave(root / "requests" / f"notes-{number}.json", content)
        leave(root / "rendezvous" / f"notes-{number}", content)
        leave(root / "submit" / "jobs" / f"{number:06d}.json", content)
        leave(root / "checkpoints" / f"i-step-{number}", content)
        for group in ("hub", "actor", "rollout", "supervisor"):
            leave(root / "rendezvous" / group / f"beat-notes-{number}.json", content)
            leave(root / "rendezvous" / group / f"inc-{900_000 + number}.json", content)
    leave(root / "stop.json", b"{")
    leave(root / "changes" / "000001-rollout.yaml", b"nonsense: [")
    with (root / "metrics.jsonl").open("ab") as file:
        file.write(b'[]\n{"reward/mean": "x"}\n7\n{\n')
    return len(ODD)
