"""Sessions of browsers: a cookie instead of the token of the service.

The form sends the token once, in the body of a request, so that it is in no address, history,
referrer or log. The cookie opens only the page, until it expires. Scripts cannot read it
(HttpOnly), and no other site can use it (SameSite=Strict). It needs no memory, so that it is valid
after a restart of the service.
"""

from __future__ import annotations

import hashlib
import hmac
import time

SESSION_S = 12 * 3600
"""Seconds for which a session is valid."""
_NAME_DIGITS = 12


def cookie_name(token: bytes) -> str:
    """Name of the cookie. Each run has another one, because a browser sends cookies of `localhost`
    to all ports."""
    return f"relax_hpc_{_sign(token, 'name')[:_NAME_DIGITS]}"


def make_session(token: bytes, now: float | None = None) -> str:
    """Value of the cookie of a new session."""
    expires = str(int((time.time() if now is None else now) + SESSION_S))
    return f"{expires}.{_sign(token, f'session {expires}')}"


def is_session(token: bytes, value: str, now: float | None = None) -> bool:
    """Whether ``value`` is a session that has not expired.

    >>> session = make_session(b"x", now=0.0)
    >>> is_session(b"x", session, now=60.0), is_session(b"x", session, now=1e6)
    (True, False)
    """
    expires, _, signature = value.partition(".")
    expected = _sign(token, f"session {expires}")
    if not hmac.compare_digest(signature.encode(errors="surrogateescape"), expected.encode()):
        return False
    return int(expires) > (time.time() if now is None else now)


def _sign(token: bytes, text: str) -> str:
    message = f"relax_hpc page {text}".encode(errors="surrogateescape")
    return hmac.new(token, message, hashlib.sha256).hexdigest()
