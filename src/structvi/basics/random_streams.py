"""Code that draws from torch's global streams, run without touching the user's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def borrowed_stream(generator: torch.Generator | None = None, rank: int = 0) -> Iterator[None]:
    """Inside, the global streams are seeded from `generator`; afterwards they are as they were.

    Without a generator the seed comes from the global stream, which advances by that one number. Ranks with a common
    generator get streams of their own: dropout and augmentation differ between them.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    device = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device)) + rank
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
