"""Sizes of memory in words."""


def in_words(size: float) -> str:
    """Bytes, in the unit that suits them.

    Example:
        >>> in_words(17.2e9)
        '17.2 GB'
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
