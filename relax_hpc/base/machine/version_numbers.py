"""Versions as numbers."""


def parse_version(text: str) -> "tuple[int, ...]":
    """Numbers of a version; everything after the last number is ignored."""
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
