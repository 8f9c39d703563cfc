"""What `benchmarks.networks` measures of predictions, and how it counts the passes of a network."""

import time
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from .networks_data import Data

BINS = 15
#: of the cases that are not referred, so many of the positive ones are to be found
SENSITIVITY = 0.95
#: inputs → log p(class) [B, C, ..]
Predictor = Callable[[Tensor], Tensor]


def remembered(predictor: Predictor) -> Predictor:
    """What was predicted once is not predicted again: of the same images, known by their bytes."""
    known: dict[bytes, Tensor] = {}

    def predict(x: Tensor) -> Tensor:
        key = blake2b(x.detach().cpu().numpy().tobytes()).digest()
        if key not in known:
            known[key] = predictor(x)
        return known[key]

    return predict


def clock(device: torch.device) -> float:
    """Processor seconds on a CPU, seconds on other devices."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def log_probabilities(predictor: Predictor, x: Tensor, batch: int, device: torch.device) -> Tensor:
    """[N, C, ..] in float64 on the CPU, batch by batch."""
    with torch.no_grad():
        return torch.cat([predictor(part.to(device)).double().cpu() for part in x.split(batch)])


def cases(log_p: Tensor, labels: Tensor) -> Tensor:
    """−log p of every case, the mean over its pixels: [N]."""
    return -log_p.gather(1, labels.unsqueeze(1)).reshape(len(log_p), -1).mean(1)


def measures(log_p: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL, accuracy, calibration error and area under the risk–coverage curve, over labels (of pixels)."""
    top, label = log_p.max(1)
    confidence, right = top.exp().flatten(), (label == labels).flatten().double()
    order = confidence.argsort(descending=True, stable=True)
    risk = (1 - right[order]).cumsum(0) / torch.arange(1, len(right) + 1)
    return {
        "nll": float(cases(log_p, labels).mean()),
        "ece": calibration_error(confidence, right),
        "accuracy": float(right.mean()),
        "aurc": float(risk.mean()),
    }


def referred(log_p: Tensor, labels: Tensor, positive: int) -> float:
    """The share of the least sure cases (pixels) that someone must look at, for a sensitivity of 95 % on the rest."""
    top, label = log_p.max(1)
    order = top.flatten().argsort(descending=True, stable=True)
    is_positive, found = (labels == positive).flatten()[order], ((labels == positive) & (label == labels)).flatten()
    share = found[order].cumsum(0) / is_positive.cumsum(0).clamp(min=1)
    enough = (share >= SENSITIVITY) | (is_positive.cumsum(0) == 0)
    kept = int(enough.nonzero().max()) + 1 if bool(enough.any()) else 0
    return 1 - kept / len(order)


def dice(log_p: Tensor, labels: Tensor, positive: int) -> float:
    """2 |A ∩ B| / (|A| + |B|) of predicted and drawn pixels, the mean over the images that have some."""
    found, drawn = ((one == positive).flatten(1) for one in (log_p.argmax(1), labels))
    some = (found | drawn).any(1)
    return float((2 * (found & drawn).sum(1) / (found.sum(1) + drawn.sum(1)))[some].mean())


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Σ_bins share · |mean confidence − accuracy|, over bins of equal width."""
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    zeros = torch.zeros(BINS, dtype=torch.float64)
    gap = zeros.index_add(0, bins, confidence.double() - right)
    return float(gap.abs().sum() / len(right))


def entropy(log_p: Tensor) -> Tensor:
    """Of every case, the mean over its pixels: [N]."""
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(1).reshape(len(log_p), -1).mean(1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(score of an unfamiliar input > that of a familiar one), ties count one half."""
    values, ranks = torch.cat([inside, outside]).unique(return_inverse=True)
    low = torch.bincount(ranks[: len(inside)], minlength=len(values)).double()
    high = torch.bincount(ranks[len(inside) :], minlength=len(values)).double()
    below = low.cumsum(0) - low / 2
    return float((high * below).sum() / (len(inside) * len(outside)))


def assess(predictor: Predictor, data: Data, batch: int, device: torch.device) -> dict:
    """All measures of one method on one set; of the test data the NLL of every case too."""

    def of(part: TensorDataset) -> Tensor:
        return log_probabilities(predictor, part.tensors[0], batch, device)

    held_out = of(data.validation)  # first: what is tried out once is not the cost of a prediction
    start = clock(device)
    test = of(data.test)
    seconds = clock(device) - start
    labels, count = data.test.tensors[1], len(data.test)
    outside = log_probabilities(predictor, data.unfamiliar, batch, device)
    under = {name: cases(of(part), part.tensors[1]) for name, part in data.shifts.items()}
    shifts = {name: float(values.mean()) for name, values in under.items()}
    return measures(test, labels) | {
        "auroc": auroc(entropy(test[: len(outside)]), entropy(outside)),
        "validation": float(cases(held_out, data.validation.tensors[1]).mean()),
        "shift": sum(shifts.values()) / len(shifts),
        "shifts": shifts,
        "predict_ms": 1000 * seconds / count,
        "cases": [round(value, 5) for value in cases(test, labels).tolist()],
        "referred": None if data.positive is None else referred(test, labels, data.positive),
        "dice": None if labels.ndim == 1 or data.positive is None else dice(test, labels, data.positive),
    }
