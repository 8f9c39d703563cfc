"""Whether values are looked at: to read one from a GPU is to wait for it, and not possible inside a captured step."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_READS: ContextVar[bool] = ContextVar("reads", default=True)


def reads() -> bool:
    """Whether checks may look at values; where they may not, what they would refuse becomes nan."""
    return _READS.get()


@contextmanager
def unread() -> Iterator[None]:
    """Inside, no value is looked at: the caller finds that a result is not finite, and asks again outside."""
    token = _READS.set(False)
    try:
        yield
    finally:
        _READS.reset(token)
