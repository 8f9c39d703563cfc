"""Which cases a loader has, whatever their order and the size of its batches: to see that two loaders share none.

A case is a row of a batch: input and target of one image, not of a pixel. It is known by a hash of at most `ELEMENTS`
numbers of each of its tensors, and a loader by the `KEPT` smallest of these hashes: two loaders with the same cases
have the same, and how many cases they share can be told from them. Data that are made anew at each reading, by
augmentation, are not known again.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..models.bayesian_model import plain, rows

#: numbers of a tensor that count, evenly spread
ELEMENTS = 1024
#: hashes that a fingerprint has
KEPT = 512
#: a share of common cases above this means that two loaders have the same data; a few may be equal by chance
COMMON = 0.1


def case_hashes(batch: Any) -> list[str]:
    """Of each row of a batch, 8 digits.

    Example:
        >>> len(set(case_hashes((torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0])))))
        2
    """
    B = rows(batch)
    parts = []
    for leaf in tree_leaves(plain(batch)):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            leaf = torch.as_tensor(leaf)
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != B or leaf.numel() == 0:
            continue
        flat = leaf.detach().reshape(B, -1)
        if flat.shape[1] > ELEMENTS:
            chosen = torch.linspace(0, flat.shape[1] - 1, ELEMENTS, dtype=torch.float64).long()
            flat = flat[:, chosen.to(flat.device)]
        parts.append(flat.cpu().contiguous().view(torch.uint8).numpy())
    return [blake2b(b"|".join(part[b].tobytes() for part in parts), digest_size=4).hexdigest() for b in range(B)]


def fingerprint(loader: Iterable[Any]) -> str:
    """Of the cases of a loader; it is read once.

    Example:
        >>> x, t = torch.arange(6.0).reshape(6, 1), torch.arange(6)
        >>> fingerprint([(x, t)]) == fingerprint([(x[3:], t[3:]), (x[:3], t[:3])])
        True
    """
    return ",".join(sorted({code for batch in loader for code in case_hashes(batch)})[:KEPT])


def share_in(one: str, other: str) -> float:
    """The share of the first fingerprint's cases that are in the second's too, estimated from what both know.

    Example:
        >>> x, t = torch.arange(6.0).reshape(6, 1), torch.arange(6)
        >>> share_in(fingerprint([(x[:2], t[:2])]), fingerprint([(x, t)]))
        1.0
    """
    a, b = one.split(","), other.split(",")
    # up to here both know all of their cases
    bound = min([codes[-1] for codes in (a, b) if len(codes) >= KEPT], default="g")
    known = [code for code in a if code and code <= bound]
    return len(set(known) & set(b)) / len(known) if known else 0.0
