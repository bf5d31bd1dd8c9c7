"""Replacements of private strings. They are deterministic, and replacing a string again does not change it."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import urlsplit, urlunsplit

_DIGEST = re.compile(r"(\w+: )?#[0-9a-f]{12}")
_REMOVED = re.compile(r"removed=[0-9a-f]{12}")
_KIND = re.compile(r"(\w+): ")


def text_without(text: str) -> str:
    """Return a digest of an error message. If the message begins with the name of a class, the name is kept."""
    if not text or _DIGEST.fullmatch(text):
        return text
    kind = _KIND.match(text)
    return f"{kind[0] if kind else ''}#{_digest(text)}"


def url_without(url: str) -> str:
    """Return a URL without its user, password and query."""
    parts = urlsplit(url)
    if "://" not in url or not (parts.query or "@" in parts.netloc) or _REMOVED.fullmatch(parts.query):
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, f"removed={_digest(url)}", ""))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()


def value_without(value: object) -> str:
    """Return a digest of a value from a data record."""
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) else text_without(repr(value))
