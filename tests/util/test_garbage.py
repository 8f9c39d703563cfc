"""The collector of garbage is off inside, and afterwards as it was."""

import gc
import weakref

import pytest

from structvi.util.garbage import uncollected


class Cycle:
    def __init__(self):
        self.own = self


def test_cycles_stay_until_the_end():
    with uncollected():
        cycle = weakref.ref(Cycle())
        kept = [[] for _ in range(100_000)]  # what would bring the collector
        assert cycle() is not None
    assert len(kept) == 100_000
    gc.collect()
    assert cycle() is None


def test_it_is_on_again_after_an_error_and_stays_off_where_it_was():
    with pytest.raises(ZeroDivisionError), uncollected(), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
