"""A network is called in a twin: what it does to itself stays there, and what the user does to it is seen."""

import copy
import pickle
import threading
import weakref
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks.module_copy import ModuleCopy
from structvi.networks.twins import Twins
from structvi.util.random_streams import alone

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
T = torch.randn(6, 1, generator=torch.Generator().manual_seed(2))
GLOBAL: list[nn.Module] = []


def posterior(net, **options):
    family = options.pop("family", vi.MeanField(initial_scale=0.1))
    return vi.variationalize(net, vi.likelihoods.Gaussian(0.5), family, num_data=6, **options)


def outputs(bayes, x=X, draws=3):
    return bayes.predict(x, draws=draws, generator=torch.Generator().manual_seed(0)).outputs


def at_the_mean(bayes, x=X):
    """The network's output at the mean of θ, as the posterior calls it."""
    with bayes.network_mode(), torch.no_grad():
        return bayes.model.outputs(bayes.family().mean.unsqueeze(0), x)[0]


# ------------------------------------------------------------------------------------- modules that change themselves


class Changing(nn.Module):
    """A linear layer; how often it was called is added to its output."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 1), change
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("frozen", torch.ones(3))

    def forward(self, x):
        self.change(self, x.detach())
        return self.linear(x * self.frozen) + self.count


def in_place(net, x):
    net.count += 1
    net.mean.mul_(0.9).add_(0.1 * x.mean(0))


def assigned(net, x):
    net.count = net.count + 1
    net.mean = 0.9 * net.mean + 0.1 * x.mean(0)


def by_an_operation(net, x):
    """Running statistics that torch itself moves."""
    nn.functional.batch_norm(x, net.mean, net.frozen.clone(), training=True)
    net.count.add_(1.0)


def written_back(net, x):
    """The values stay: only a look at the tensor's version sees it."""
    net.mean.copy_(torch.maximum(net.mean, net.mean))
    net.count.fill_(1.0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", [in_place, assigned, by_an_operation, written_back])
@pytest.mark.parametrize("evaluation", ["auto", "loop"])
def test_a_network_that_changes_its_buffers_is_not_changed(change, evaluation, training):
    """A fit of 40 steps, and all that follows: every call has found the count at 0 and left it at 1."""
    net = Changing(change).train(training)
    buffers = dict(net.named_buffers())
    before = {name: (buffer.clone(), buffer._version) for name, buffer in buffers.items()}
    bayes = posterior(net, evaluation=evaluation)
    expected = net.linear(X) + 1
    torch.testing.assert_close(at_the_mean(bayes), expected.detach())
    bayes.fit([(X, T)], steps=40, progress=False)
    bayes.evaluate([(X, T)], draws=3)
    seen = outputs(bayes, draws=20) - outputs(bayes, draws=20)
    assert (seen == 0).all()
    bayes.diagnose([(X, T)], draws=200)
    bayes.sample_network()
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    for name, buffer in net.named_buffers():
        value, version = before[name]
        assert torch.equal(buffer, value), name
        assert buffer._version == version, name


def test_attributes_that_a_call_sets_are_the_twins():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls, self.last = nn.Linear(3, 1), 0, None

        def forward(self, x):
            self.calls += 1
            self.last = self.linear(x)
            return self.last

    net = Remembering()
    bayes = posterior(net)
    outputs(bayes)
    bayes.fit([(X, T)], steps=3, progress=False)
    assert (net.calls, net.last) == (0, None)
    copy.deepcopy(net)  # no tensor of vmap's is left in it


def test_only_buffers_that_a_call_changes_are_copied(peak_bytes):
    """The first call copies all, 8 MB; the next ones 4 bytes. What else they make is far below 1 MB."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("table", torch.ones(2**21))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.linear(x) * self.table[0]

    bayes = posterior(Table())
    peaks = []
    for _ in range(2):
        with peak_bytes() as tracker:
            outputs(bayes)
        peaks.append(tracker.peak)
    assert peaks[0] > 2**23
    assert peaks[1] < 2**20
    assert bayes.model.twins.changing == {"count"}
    assert bayes.net.count == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_a_change_that_the_first_call_did_not_make_is_seen(in_place):
    """Large inputs move a buffer. In place that happens once, with a warning; assigned ones stay the twin's."""

    class Largest(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("largest", torch.ones(()))

        def forward(self, x):
            if x.max() > 10:
                self.largest = self.largest.fill_(10.0) if in_place else x.max()
            return self.linear(x)

    bayes = posterior(Largest(), evaluation="loop")
    outputs(bayes)
    assert bayes.model.twins.changing == frozenset()
    if in_place:
        with pytest.warns(UserWarning, match="changed its buffers largest in a call, which its first call did not"):
            outputs(bayes, 100 * X)
        assert bayes.net.largest == 10
        bayes.net.largest.fill_(1.0)
    else:
        outputs(bayes, 100 * X)
    assert bayes.model.twins.changing == {"largest"}
    outputs(bayes, 100 * X)
    assert bayes.net.largest == 1


def test_tied_buffers_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("a", torch.zeros(()))
            self.register_buffer("b", self.a)

        def forward(self, x):
            self.a += 1
            return self.linear(x) + self.b

    bayes = posterior(Tied())
    torch.testing.assert_close(at_the_mean(bayes), (bayes.net.linear(X) + 1).detach())
    assert bayes.net.a == 0


# --------------------------------------------------------------------------------------- what the user does is seen


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
        self.register_buffer("offset", torch.zeros(1))
        self.factor, self.config, self.extra = 1.0, SimpleNamespace(power=1), {"shift": 0.0}
        self.steps = [self.body, self.head]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.factor * x**self.config.power + self.extra["shift"] + self.offset


def set_buffer_data(net):
    net.offset.data.fill_(3.0)  # no version tells of it


def assign_state(net):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state["offset"] += 3.0
    net.load_state_dict(state, assign=True)


def replace_activation(net):
    net.body[1] = nn.ReLU()


def append_module(net):
    net.steps.append(nn.Sigmoid())


def hook(net):
    net.head.register_forward_hook(lambda module, args, output: output + 1)


CHANGES = {
    "attribute": lambda net: setattr(net, "factor", 2.0),
    "attribute of an attribute": lambda net: setattr(net.config, "power", 2),
    "entry of a dict": lambda net: net.extra.update(shift=3.0),
    "buffer in place": lambda net: net.offset.add_(3.0),
    "buffer's data": set_buffer_data,
    "buffer replaced": lambda net: setattr(net, "offset", torch.full((1,), 3.0)),
    "load_state_dict(assign=True)": assign_state,
    "module replaced": replace_activation,
    "module appended to a list": append_module,
    "hook": hook,
    "forward replaced": lambda net: setattr(
        net, "forward", MethodType(lambda self, x: self.head(self.body(x)) + 5, net)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_network_are_seen_at_the_next_call(change):
    torch.manual_seed(0)
    net = Plain()
    bayes = posterior(net)
    first = at_the_mean(bayes)
    torch.testing.assert_close(first, net(X).detach())
    CHANGES[change](net)
    expected = copy.deepcopy(net)(X).detach()
    assert not torch.allclose(expected, first, atol=1e-3)
    torch.testing.assert_close(at_the_mean(bayes), expected)


def test_another_network_in_its_place():
    torch.manual_seed(0)
    bayes = posterior(Plain())
    first = at_the_mean(bayes)
    other = Plain()
    other.factor = 2.0
    bayes.model.net = other
    torch.testing.assert_close(at_the_mean(bayes), 2 * first)


def test_another_precision_and_back():
    bayes = posterior(Plain())
    first = outputs(bayes)
    bayes.to(torch.float64)
    assert at_the_mean(bayes, X.double()).dtype == torch.float64
    bayes.to(torch.float32)
    assert torch.equal(outputs(bayes), first)


def test_held_tensors_have_the_values_that_the_network_has():
    net = Plain()
    bayes = posterior(net, select="head.*")
    first = at_the_mean(bayes)
    with torch.no_grad():
        net.body[0].weight.mul_(2.0)
    assert not torch.allclose(at_the_mean(bayes), first, atol=1e-3)
    torch.testing.assert_close(at_the_mean(bayes), net(X).detach())


def test_a_twin_is_used_again_also_in_another_mode():
    net = Plain()
    twins = Twins(net)
    seen = []
    for training in (True, False, True):
        net.train(training)
        with twins.borrowed() as twin, twins.borrowed() as inside:
            assert inside is twin
            assert twin.modes == (training,) * len(twin.modes)
            seen.append(twin)
    assert seen == [seen[0]] * 3
    with twins.borrowed(lambda module: isinstance(module, nn.Tanh)) as twin:
        assert [type(module) for module, mode in zip(twin.modules, twin.modes, strict=True) if mode] == [nn.Tanh]
        assert all(module.training for module in net.modules())


def test_a_call_that_failed_leaves_nothing_behind():
    bayes = posterior(Plain())
    first = outputs(bayes)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        outputs(bayes, torch.zeros(2, 5))
    assert torch.equal(outputs(bayes), first)


def test_copies_and_pickles_of_a_posterior_have_twins_of_their_own():
    bayes = posterior(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    first = outputs(bayes)
    for other in (copy.deepcopy(bayes), pickle.loads(pickle.dumps(bayes))):
        assert other.model.twins.original is other.net
        assert other.net is not bayes.net
        assert torch.equal(outputs(other), first)
        other.net[1].running_mean.add_(1.0)
        assert not torch.equal(outputs(other), first)
    assert torch.equal(outputs(bayes), first)


def test_checkpointed_activations_in_the_modes_of_the_forward_pass():
    """By the time of the backward pass the network is in another mode, and its twin in another's hands."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1))
    gradients = []
    for checkpointed in (False, True):
        bayes = posterior(net, family=vi.MAP(), dropout="on", checkpoint_activations=checkpointed)
        torch.manual_seed(3)
        loss = bayes.loss((X, T))
        net.eval()
        with bayes.model.twins.borrowed():
            loss.backward()
        net.train()
        gradients.append(next(bayes.family.parameters()).grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), lambda: Referring(closure)]
)
def test_a_backward_pass_that_calls_the_network_again_uses_the_same_twin(make):
    """Autograd ends such a call by an error of its own, once it has what it needs."""
    bayes = posterior(make(), checkpoint_activations=True)
    bayes.loss((X, T)).backward()
    (first,) = bayes.model.twins._free
    for _ in range(3):
        bayes.loss((X, T), estimator=vi.Estimator(groups=2)).backward()
    assert bayes.model.twins._free == [first]


def test_a_thread_of_autograds_does_not_wait_for_the_one_that_waits_for_it():
    """On a GPU the backward pass runs in a thread of autograd's, while this one, inside a step, has the lock."""
    twins = Twins(Referring(closure))
    with twins.borrowed() as twin:
        modes = twin.modes
    done, caller = [], threading.get_ident()

    def again():
        with twins.borrowed(modes, caller) as twin:
            done.append(twin.net is twins.original)

    for free in ([twin], []):
        twins._free[:] = free
        worker = threading.Thread(target=again, daemon=True)
        with alone():
            worker.start()
            worker.join(timeout=60)  # it ends at once, or never
    assert done == [True, True]


def test_a_twin_that_was_left_with_drawn_weights_is_not_used_again():
    net = Plain()
    twins = Twins(net)
    first = []

    def interrupted():
        with twins.borrowed() as twin:
            first.append(twin)
            twin.net.head._parameters["weight"] = torch.zeros(1, 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with twins.borrowed() as second:
        assert second is not first[0]
        assert second.net.head.weight is net.head.weight


# ----------------------------------------------------------------------------------------------- copies of modules


class Referring(nn.Module):
    """Uses its layer by another way than its name."""

    def __init__(self, refer):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        refer(self)

    def forward(self, x):
        return self.way(x)

    def through_self(self, x):
        return self.layer(x)


def closure(net):
    layer = net.layer
    net.way = lambda x: layer(x)


def global_variable(net):
    GLOBAL[:] = [net.layer]
    net.way = lambda x: GLOBAL[0](x)


def weak(net):
    reference = net.reference = weakref.ref(net.layer)
    net.way = lambda x: reference()(x)


def own_object(net):
    class Holder:
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, x):
            return self.layer(x)

    net.way = Holder(net.layer)


def hook_by_module(net):
    names = {net.layer: "layer"}
    net.seen = []
    net.layer.register_forward_hook(lambda module, args, output: net.seen.append(names[module]))
    net.way = net.through_self


def bound(net):
    net.way = net.through_self


def listed(net):
    net.layers = [(net.layer, {"again": net.layer})]
    net.way = MethodType(lambda self, x: self.layers[0][1]["again"](x), net)


def partly(net):
    net.way = partial(lambda layer, x: layer(x), net.layer)


@pytest.mark.parametrize(
    ("refer", "complete"),
    [(bound, True), (listed, True), (partly, True)]
    + [(way, False) for way in (closure, global_variable, weak, own_object, hook_by_module)],
)
def test_drawn_weights_reach_every_way_to_a_layer(refer, complete):
    """A twin around whose layers another way leads would be called with weights that were not drawn."""
    torch.manual_seed(0)
    net = Referring(refer)
    assert ModuleCopy(net).complete == complete
    bayes = posterior(net)
    theta = bayes.family().draw(3, generator=torch.Generator().manual_seed(0)).theta.detach()
    named = bayes.space.unravel(theta)
    expected = torch.einsum("bi,soi->sbo", X, named["layer.weight"]) + named["layer.bias"].unsqueeze(1)
    torch.testing.assert_close(bayes.model.outputs(theta, X), expected)
    torch.testing.assert_close(net(X), net.layer(X))
    assert net.training


def test_names_of_attributes_are_no_global_variables(monkeypatch):
    """`self.layer` in code is not the global variable of that name, which may well be the network's layer."""
    net = Referring(bound)
    monkeypatch.setitem(globals(), "layer", net.layer)
    assert ModuleCopy(net).complete


def test_hooks_of_the_users_own_see_the_calls():
    class Recorder:
        def __init__(self):
            self.shapes = []

        def __call__(self, module, args, output):
            self.shapes.append(tuple(output.shape))

    recorder = Recorder()
    net = Plain()
    net.head.register_forward_hook(recorder)
    assert ModuleCopy(net).complete
    outputs(posterior(net, evaluation="loop"))
    assert recorder.shapes == [(6, 1)] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 2),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.ModuleDict({"a": nn.ParameterList([torch.zeros(2)]), "b": nn.ParameterDict({"c": torch.zeros(1)})}),
    ],
)
def test_layers_of_torch_have_twins(make):
    net = make()
    copied = ModuleCopy(net)
    assert copied.complete
    assert all(a is b for a, b in zip(net.parameters(), copied.net.parameters(), strict=True))
    assert {id(module) for module in net.modules()}.isdisjoint(id(module) for module in copied.net.modules())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in copied.net.named_modules()]


def test_modules_with_more_than_attributes_have_none():
    class Slotted(nn.Linear):
        __slots__ = ("own",)

    assert not ModuleCopy(nn.Sequential(Slotted(3, 1))).complete
    bayes = posterior(nn.Sequential(Slotted(3, 1)))
    assert not torch.equal(*outputs(bayes, draws=2))
