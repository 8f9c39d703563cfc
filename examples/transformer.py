"""A Hugging Face transformer with random LoRA adapters on a frozen base. Under two minutes on a CPU.

pip install "structvi[transformers]" && python examples/transformer.py [--smoke]

A small BERT of random weights learns, the ordinary way, whether token A occurs more often than token B in a sequence.
Then a few sequences of another task come: A against C. Adapters of rank 4 in the attention and a new head are random,
with a low-rank posterior; the base is frozen. The example prints the accuracy, the entropy of right and wrong answers,
and the memory beside that of a posterior over all weights.
"""

import argparse
import os

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import structvi as vi

A, B, C = 1, 2, 3
VOCABULARY, LENGTH = 30, 24


def sequences(n, other, generator):
    """Dicts as a tokenizer's collator makes them: does A occur more often than `other`? Ties are left out."""
    ids = torch.randint(1, VOCABULARY, (4 * n, LENGTH), generator=generator)
    marked = torch.rand(ids.shape, generator=generator) < 0.3
    ids = torch.where(marked, torch.tensor([A, other])[torch.randint(2, ids.shape, generator=generator)], ids)
    more = (ids == A).sum(1) - (ids == other).sum(1)
    ids, more = ids[more != 0][:n], more[more != 0][:n]
    return [{"input_ids": row, "labels": (m > 0).long()} for row, m in zip(ids, more, strict=True)]


def bert(hidden=64, layers=2):
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * hidden, max_position_embeddings=LENGTH, num_labels=2, attn_implementation="sdpa",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def train(net, data, epochs):
    """Ordinary training of the base."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net.train()
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
    return net.eval()


def adapted(base, rank=4):
    """The base frozen, with adapters in the attention; peft trains the classifier beside them."""
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=rank, target_modules=["query", "value"])
    return get_peft_model(base, lora)


def posterior(net, num_data, rank):
    """Return a posterior over all tensors that train: in an adapted network the adapters and the classifier."""
    prior = vi.priors.NormalPrior(1.0, by_fan_in=True)
    return vi.variationalize(net, vi.likelihoods.Categorical(), vi.LowRankNormal(rank=rank), prior, num_data=num_data)


def state_bytes(bayes):
    """Return the memory of a fit: the variational parameters, their gradients and Adam's two moments."""
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in bayes.parameters())


def report(bayes, data):
    batch = next(iter(DataLoader(data, batch_size=len(data))))
    pred = bayes.predict({"input_ids": batch["input_ids"]}, draws=32, generator=torch.Generator().manual_seed(0))
    right = pred.mean.argmax(1) == batch["labels"]
    print(f"accuracy {right.float().mean():.3f}, nats per sequence {-pred.log_prob(batch['labels']).mean():.3f}")
    if bool(right.any()) and not bool(right.all()):
        print(
            f"entropy where right {pred.entropy[right].mean():.3f}, where wrong {pred.entropy[~right].mean():.3f} nats"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--rank", type=int, default=8, help="K of the posterior's covariance")
    parser.add_argument("--out", default="adapter.safetensors", help="where the posterior over the adapters is kept")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with matrices as small as these, threads mostly wait for each other
    generator = torch.Generator().manual_seed(0)
    n, epochs = (64, 1) if arguments.smoke else (2000, 15)

    base = train(bert(), sequences(n, B, generator), epochs)
    few, test = sequences(n // 4, C, generator), sequences(n // 2, C, generator)
    every = posterior(base, len(few), arguments.rank)
    full, P = state_bytes(every), every.space.size
    del every

    bayes = posterior(adapted(base), len(few), arguments.rank)
    print(bayes.extra_repr())
    result = bayes.fit(DataLoader(few, batch_size=64, shuffle=True), epochs=4 * epochs, progress=not arguments.smoke)
    print(result)
    report(bayes, test)

    bayes.save(arguments.out, network="hash")
    print(f"state of a fit, rank {arguments.rank}: adapters P = {bayes.space.size}, {state_bytes(bayes) / 1e6:.2f} MB")
    print(f"    all weights P = {P}, {full / 1e6:.2f} MB: {full / state_bytes(bayes):.1f} times as much")
    print(f"kept in {arguments.out}: {os.path.getsize(arguments.out) / 1e6:.2f} MB, without the base")


if __name__ == "__main__":
    main()
