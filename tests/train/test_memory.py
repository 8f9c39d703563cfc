"""A step that does not fit into memory: what is said, and that nothing is lost."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.optim.adam import adam_groups
from structvi.train import step
from structvi.train.memory import SHARE, Need, activation_bytes, explain, need_of, there_is
from structvi.train.step import Step

N, D = 24, 3
CPU = torch.device("cpu")


def loader():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, shuffle=True)


def make(family=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.3), family or vi.LowRankNormal(4), num_data=N)


def test_the_parts_of_a_need():
    """4·P·(4(K + 2) + 2 + 4·S) bytes, and activations of draws that wait and of those on their way back."""
    bayes = make()
    P = bayes.space.size
    found = need_of(bayes, next(iter(loader())), vi.Estimator())
    assert (found.P, found.K, found.S, found.B, found.V) == (P, 4, 2, 8, P * 6)
    assert found._replace(activation=None).total() == 4 * P * (4 * (4 + 2) + 2 + 4 * 2)
    assert found.with_rank(2)._replace(activation=None).total() == 4 * P * (4 * (2 + 2) + 2 + 4 * 2)
    assert need().total() - need(activation=0).total() == 400 * (8 + 2 * 8) * 64


def test_activations_are_those_kept_for_the_gradient():
    """Input 3, tanh 16 and output 1 numbers of four bytes are needed by the backward pass of each observation."""
    g = torch.Generator().manual_seed(0)
    counted = activation_bytes(make(), (torch.randn(1000, D, generator=g), torch.randn(1000, 1, generator=g)))
    assert counted is not None
    assert 4 * (3 + 16 + 1) <= counted <= 2 * 4 * (3 + 16 + 1)
    assert activation_bytes(make(), object()) is None  # a batch that nothing is known of


def need(**changed):
    return Need(V=6000, P=1000, K=4, S=8, B=64, at_once=8, number=4, activation=400)._replace(**changed)


@pytest.mark.parametrize("there", [250_000, 400_000, 700_000])
def test_what_would_fit_fits_and_one_more_does_not(there):
    text = explain(need(), there, CPU)
    assert need().total() > there
    fitting = text.split("What would fit: ")[1].split(".")[0].split(", or ")
    ways = {"batches": lambda n: need()._replace(B=n), "draws": need().with_draws, "rank": need().with_rank}
    assert fitting
    for one in fitting:
        name = next(way for way in ways if way in one)
        n = int(one.split("batches of ")[1]) if name == "batches" else int(one.replace("rank ", "").split()[0])
        assert ways[name](n).total() <= SHARE * there < ways[name](n + 1).total()


def test_what_is_said_where_nothing_alone_fits():
    assert "none of a smaller batch, fewer draws or rank" in explain(need(), 1000, CPU)
    assert "What would fit" not in explain(need(), None, CPU)


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def test_nothing_is_lost(tmp_path, monkeypatch):
    """The posterior is that of the last step, and a fit resumed from the checkpoint ends as one never stopped."""
    options = {"steps": 12, "progress": False, "schedule": vi.Schedule(stop=False)}
    whole = make()
    whole.fit(loader(), **options)
    bayes, seen = make(), {}

    def fail_later(history):
        if len(history) == 7:
            seen.update({name: p.detach().clone() for name, p in bayes.named_parameters()})
            monkeypatch.setattr(step.Step, "gradients", no_memory)

    monkeypatch.setattr(step, "there_is", lambda device, held: 12_000)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"a step does not fit into the memory.*would fit.*torch said"
    ) as caught:
        bayes.fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, every=5), callback=fail_later)
    assert any("after step 7" in note and str(tmp_path) in note for note in caught.value.__notes__)
    assert all(torch.equal(seen[name], p) for name, p in bayes.named_parameters())
    assert all(p.grad is None for p in bayes.parameters())
    monkeypatch.undo()
    again = make()
    result = again.fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 7" in note for note in result.notes)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_tensors_of_a_failed_step_are_free_when_what_would_fit_is_worked_out(monkeypatch):
    """The frames of the error hold its draws, and so do the functions of cleared frames that close over them."""
    drawn, alive = [], []

    class Layer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if type(self.weight) is torch.Tensor and self.weight.grad_fn is not None:  # a draw of the step
                drawn.append(weakref.ref(self.weight))
                no_memory()
            return out

    def there_is(device, held):
        alive.extend(one() is not None for one in drawn)
        return 10**9

    monkeypatch.setattr(step, "there_is", there_is)
    bayes = vi.variationalize(Layer(3, 1), vi.likelihoods.Gaussian(noise=1.0), vi.MeanField(), evaluation="loop")
    with pytest.raises(torch.OutOfMemoryError, match="a step does not fit"):
        bayes.fit(loader(), steps=2, progress=False)
    assert alive
    assert not any(alive)


def test_nothing_moves_where_there_is_no_memory_for_all_moments(monkeypatch):
    """Memory for the moments of mean and scale and none for the factor's second: the next step begins as the first."""
    bayes, other = make(), make()
    made, zeros_like = [], torch.zeros_like

    def last_fails(x, **options):
        if x.ndim == 2:
            made.append(x)
        return no_memory() if len(made) == 2 else zeros_like(x, **options)

    before = [p.detach().clone() for p in bayes.parameters()]
    other.load_state_dict(bayes.state_dict())
    batch = next(iter(loader()))
    for one in (bayes, other):
        adam, generator = torch.optim.Adam(adam_groups(one, 0.1), fused=True), torch.Generator().manual_seed(0)
        make_step = Step(one, adam, generator)
        told = make_step.gradients([batch], (1.0,), 1.0, generator)
        if one is bayes:
            monkeypatch.setattr(torch, "zeros_like", last_fails)
            with pytest.raises(torch.OutOfMemoryError):
                make_step.move(*told)
            monkeypatch.undo()
            assert all(torch.equal(a, b) for a, b in zip(before, bayes.parameters(), strict=True))
        make_step.move(*told)
    assert not any(torch.equal(a, b) for a, b in zip(before, bayes.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), bayes.parameters(), strict=True))


def test_what_a_step_can_have_is_less_by_the_tensors_of_others(monkeypatch):
    """Of 1000 bytes this process may have 800, and holds 500, of which 120 are the step's own."""

    class Held:
        is_cuda = True

        def untyped_storage(self):
            return self

        def data_ptr(self):
            return id(self)

        def nbytes(self):
            return 60

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.8, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    first, second = Held(), Held()
    assert there_is(torch.device("cuda"), [first, second, first]) == 800 - 500 + 120
    assert there_is(CPU, []) is None
