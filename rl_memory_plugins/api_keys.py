"""Keys of servers, as files and secrets hold them."""

from __future__ import annotations

from rl_memory_plugins.errors import InvalidRequestError


def usable_key(key: str | None) -> str:
    """A key as the header `Authorization` can hold it: without the spaces and the line break around it.

    A secret that was made by `echo`, or a file that was read as a whole, ends with a line break.

    Args:
        key: `None`, as of a variable that is not set, is no key.

    Returns: the key; empty for none.

    Raises:
        InvalidRequestError: it has other characters than those of ASCII that can be printed. The error does not name
            the key.
    """
    found = (key or "").strip()
    if not (found.isascii() and found.isprintable()):
        raise InvalidRequestError("the API key has characters that no HTTP header can hold", field="api_key")
    return found
