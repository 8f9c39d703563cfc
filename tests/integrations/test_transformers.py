"""Hugging Face models: outputs that are objects, tokens, a Trainer, and adapters in a folder that peft reads."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

import structvi as vi
from structvi.integrations.transformers import PosteriorTrainer, causal_lm, load_adapter, save_adapter

SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def bert(kind=BertForSequenceClassification):
    torch.manual_seed(0)
    return kind(BertConfig(**SMALL, num_labels=3, hidden_dropout_prob=0.0)).eval()


def adapted():
    return get_peft_model(
        bert(), LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.0, target_modules=["query", "value"])
    )


def sentences(n=24, tokens=6, labels=()):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (n, tokens), generator=generator)
    mask = (torch.arange(tokens) < torch.randint(3, tokens + 1, (n, 1), generator=generator)).long()
    target = torch.randint(3, (n, *labels), generator=generator)
    return [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, mask, target, strict=True)]


def without_labels(batch):
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def test_tokens_are_observations_and_those_without_a_label_do_not_count():
    net, data = bert(BertForTokenClassification), sentences(labels=(6,))
    for row in data:
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    likelihood = vi.likelihoods.Categorical(ignore_index=-100)
    bayes = vi.variationalize(net, likelihood, vi.MAP(), select="classifier*")
    bayes.model.num_data = 24
    batch = next(iter(DataLoader(data, batch_size=24)))
    with torch.no_grad():
        expected = -24 * net(**batch).loss * (batch["labels"] != -100).sum() / 24
        theta = bayes.family().draw(1).theta
        torch.testing.assert_close(bayes.model.log_likelihood(theta, batch), expected.unsqueeze(0))
    assert bayes.predict(without_labels(batch)).mean.shape == (24, 3, 6)


def test_the_likelihood_of_a_causal_language_model_is_that_of_its_own_loss():
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=8)).eval()
    ids = torch.randint(20, (4, 6))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids < 3, -100)}
    likelihood = vi.likelihoods.Categorical(ignore_index=-100)
    bayes = vi.variationalize(net, likelihood, vi.MAP(), select="transformer.ln_f*", forward=causal_lm, num_data=4)
    with torch.no_grad(), bayes.network_mode():
        log_lik = bayes.model.log_likelihood(bayes.family().draw(1).theta, batch)
        counted = (batch["labels"][:, 1:] != -100).sum()
        torch.testing.assert_close(log_lik, -(net(**batch).loss * counted).unsqueeze(0))


def arguments(folder, **others):
    return TrainingArguments(
        str(folder), per_device_train_batch_size=8, report_to=[], disable_tqdm=True, use_cpu=True, seed=0, **others
    )


def test_a_trainer_fits_evaluates_and_goes_on_from_its_checkpoint(tmp_path):
    net, data = adapted(), sentences()
    held = {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=0.01))
    trainer = PosteriorTrainer(
        bayes, arguments(tmp_path, max_steps=4, learning_rate=0.01), train_dataset=data, eval_dataset=data
    )
    start = bayes.family.mean.detach().clone()
    trainer.train()
    assert bayes.model.num_data == 24
    assert not torch.equal(start, bayes.family.mean)
    assert all(torch.equal(held[name], p) for name, p in net.named_parameters() if name in held)
    batch = next(iter(DataLoader(data, batch_size=24)))
    expected = -bayes.predict(without_labels(batch)).log_prob(batch["labels"]).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    trainer.save_model(str(tmp_path / "checkpoint"))

    again = vi.variationalize(adapted(), vi.likelihoods.Categorical(), vi.MeanField(initial_scale=0.01))
    other = PosteriorTrainer(again, arguments(tmp_path), train_dataset=data)
    other._load_from_checkpoint(str(tmp_path / "checkpoint"))
    assert torch.equal(again.family.mean, bayes.family.mean)


def test_an_adapter_is_read_by_peft_and_with_its_posterior(tmp_path):
    bayes = vi.variationalize(adapted(), vi.likelihoods.Categorical(), vi.MeanField(initial_scale=0.01), num_data=24)
    with torch.no_grad():
        bayes.family.mean.add_(0.1)
    save_adapter(bayes, tmp_path)
    inputs = without_labels(next(iter(DataLoader(sentences(), batch_size=24))))
    with torch.no_grad():
        expected = bayes.mean_network()(**inputs).logits
        by_peft = PeftModel.from_pretrained(bert(), tmp_path).eval()
        torch.testing.assert_close(by_peft(**inputs).logits, expected)
        merged = bayes.mean_network().merge_and_unload()
        torch.testing.assert_close(merged(**inputs).logits, expected)
    loaded = load_adapter(tmp_path, bert())
    assert torch.equal(loaded.family.mean, bayes.family.mean)
    torch.testing.assert_close(loaded.predict(inputs).mean, bayes.predict(inputs).mean)
