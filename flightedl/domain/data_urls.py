"""URLs and patterns of data files. Pure.

In http(s) URLs, ``?`` begins the query, which is never part of a file's identity. In other URLs, ``?`` is a wildcard.
``*``, ``?`` and ``[...]`` match within a component, and a component ``**`` matches any number of folders. ``[*]``,
``[?]`` and ``[[]`` stand for the character itself. A component that a wildcard matches does not begin with ``_`` or
``.``, unless the component of the pattern does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit, urlunsplit

_QUERY = re.compile(r"((?:^|::)https?://[^?]*)\?(?:(?!::).)*")
#: Caches of fsspec, each in front of the URL whose files it caches.
_CACHES = re.compile(r"^(?:(?:filecache|simplecache|blockcache)::)*")
_WILDCARD = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\[([*?\[])\]")
_ITEM = re.compile(r"\[(?:!.|[^!])[^\]]*\]|.", re.DOTALL)
_VISIBLE = "(?![_.])"


def without_query(url: str) -> str:
    """Return the URL without the query that an http(s) URL may have."""
    return _QUERY.sub(r"\1", url)


def cache_and_target(url: str) -> tuple[str, str]:
    """Divide a URL such as ``filecache::s3://bucket/name`` into its caches and the URL of the target."""
    target = _CACHES.sub("", url, count=1)
    return url[: len(url) - len(target)], target


def path_of(url: str) -> str:
    """Return the part of a URL that names the file, for its format: without caches, archives and query."""
    return without_query(cache_and_target(url)[1].partition("::")[0])


def has_wildcard(text: str) -> bool:
    """True if a URL without its query, or a component of it, is a pattern."""
    return _WILDCARD.search(_ESCAPED.sub("", text)) is not None


def literal(text: str) -> str:
    """Return a component without wildcards as the name that it stands for."""
    return _ESCAPED.sub(r"\1", text)


def escaped(path: str) -> str:
    """Return the pattern that matches only this path."""
    return _WILDCARD.sub(r"[\g<0>]", path)


def fixed_parts(pattern: str) -> list[str]:
    """Return the components of a pattern before the first one with a wildcard, or of the file's folder."""
    parts = pattern.split("/")
    end = next((number for number, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    return [literal(part) for part in parts[:end]]


@lru_cache(maxsize=256)
def matcher(pattern: str, *, is_hidden_matched: bool = False) -> re.Pattern[str]:
    """Return the expression that paths must match completely."""
    visible = "" if is_hidden_matched else _VISIBLE
    parts = pattern.split("/")
    found = [f"(?:{visible}[^/]+/)*" if part == "**" else _translated(part, visible) + "/" for part in parts[:-1]]
    last = f"(?:{visible}[^/]+/)*{visible}[^/]+" if parts[-1] == "**" else _translated(parts[-1], visible)
    return re.compile("".join(found) + last, re.DOTALL)


def _translated(part: str, visible: str) -> str:
    def translate(item: str) -> str:
        if item == "*":
            return "[^/]*"
        if item == "?":
            return "[^/]"
        if len(item) == 1:
            return re.escape(item)
        inside = re.sub(r"[\\\[\]^&~|]", r"\\\g<0>", item[1:-1])
        return f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"

    text = "".join(translate(item) for item in _ITEM.findall(part))
    return (visible if part[:1] in ("*", "?", "[") else "") + text


def normalized(url: str) -> str:
    """Return a URL with ``//``, ``/./`` and ``..`` in its path resolved."""
    scheme, slashes, path = url.rpartition("://")
    found: list[str] = []
    for part in path.split("/"):
        if part == ".." and found:
            found.pop()
        elif part not in ("", ".", ".."):
            found.append(part)
    return scheme + slashes + "/".join(found)


def moved(url: str, folders: Mapping[str, str]) -> str:
    """Return the URL with the first of these folders that contains it replaced by the folder's value."""
    for old, new in folders.items():
        if is_below(url, old):
            return new + url.removeprefix("file://")[len(old) :]
    return url


def as_declared(url: str, folders: Mapping[str, str]) -> str:
    """Return the identity of a URL: without query, and below the folder where its files were first declared."""
    return moved(without_query(url), {new: old for old, new in folders.items()})


def is_below(url: str, folder: str) -> bool:
    """True if a URL or pattern is in the folder, whose name does not end with a slash."""
    return url.removeprefix("file://").startswith(f"{folder}/")


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment. Return a plain path unchanged."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
