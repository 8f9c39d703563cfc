"""Whether values are looked at: to read one from a GPU is to wait for it, and not possible inside a captured step."""

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

_READS: ContextVar[bool] = ContextVar("reads", default=True)


def reads() -> bool:
    """Whether checks may look at values; where they may not, what they would refuse becomes nan."""
    return _READS.get()


def unread() -> AbstractContextManager[None]:
    """Inside, no value is looked at: the caller finds that a result is not finite, and asks again outside."""
    return _Unread()


class _Unread:  # at every step: a generator's context takes four times as long
    token: Token[bool]

    def __enter__(self) -> None:
        self.token = _READS.set(False)

    def __exit__(self, *_: Any) -> None:
        _READS.reset(self.token)
