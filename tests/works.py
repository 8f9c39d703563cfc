"""Every architecture with every family the whole way at a small size: fitted, predicted, saved, in bfloat16, resumed."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import structvi as vi

N, B, CLASSES = 12, 4, 3
#: what a refusal or a failure may be; anything else ends the script
ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError)


# ------------------------------------------------------------------------------------------------------ architectures


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


class ResNet(nn.Module):
    """One residual block with batch norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, CLASSES)
        nn.init.uniform_(self.norm.running_mean, -0.1, 0.1)  # as if it had seen data
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.second(torch.relu(self.norm(self.first(x))))
        return self.head(x.mean((-2, -1)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.body(self.embed(x)).mean(1))


class UNet(nn.Module):
    """Down, up and a skip connection; a label for every pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.deep(skip))], 1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(2, 6), nn.Linear(6, CLASSES)

    def forward(self, x, z):
        return self.head(torch.tanh(self.a(x) + self.b(z)))


class Data(Dataset):
    """N observations; `shapes` are those of the inputs by name, `pixels` that of the target."""

    def __init__(self, shapes, pixels=(), as_dict=False):
        generator = torch.Generator().manual_seed(0)
        self.inputs = {name: torch.randn(N, *shape, generator=generator) for name, shape in shapes.items()}
        self.target = torch.randint(CLASSES, (N, *pixels), generator=generator)
        self.as_dict = as_dict

    def __len__(self):
        return N

    def __getitem__(self, index):
        inputs = {name: tensor[index] for name, tensor in self.inputs.items()}
        if self.as_dict:
            return {**inputs, "label": self.target[index]}
        return (tuple(inputs.values()) if len(inputs) > 1 else inputs["x"]), self.target[index]

    def all_inputs(self):
        """As `predict` takes them."""
        if self.as_dict:
            return self.inputs
        return tuple(self.inputs.values()) if len(self.inputs) > 1 else self.inputs["x"]


ROWS, IMAGES, SEQUENCES = {"x": (3,)}, {"x": (1, 6, 6)}, {"x": (5, 3)}
#: network, its data, and further arguments of variationalize
ARCHITECTURES = {
    "multilayer perceptron": (MLP, lambda: Data(ROWS), {}),
    "convolutional": (CNN, lambda: Data(IMAGES), {}),
    "residual, batch norm frozen": (ResNet, lambda: Data(IMAGES), {}),
    "residual, batch norm deterministic": (ResNet, lambda: Data(IMAGES), {"batch_norm": "deterministic"}),
    "residual, batch norm re-estimated": (ResNet, lambda: Data(IMAGES), {"batch_norm": "reestimated"}),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: Data(SEQUENCES), {}),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: Data(SEQUENCES), {}),
    "transformer encoder": (Transformer, lambda: Data(SEQUENCES), {}),
    "U-Net": (UNet, lambda: Data(IMAGES, pixels=(6, 6)), {}),
    "two inputs": (TwoInputs, lambda: Data({"x": (3,), "z": (2,)}), {}),
    "dict batches": (TwoInputs, lambda: Data({"x": (3,), "z": (2,)}, as_dict=True), {}),
}
FAMILIES = {
    "MAP": vi.MAP(),
    "MCDropout": vi.MCDropout(keep=0.8),
    "MeanField": vi.MeanField(),
    "LowRankNormal": vi.LowRankNormal(rank=2),
    "LowRankPrecision": vi.LowRankPrecision(rank=2),
    "FullNormal": vi.FullNormal(),
    "Mixture": vi.Mixture(vi.LowRankNormal(rank=1), components=2),
    "PerLayer": vi.PerLayer({"head.*": vi.FullNormal(), "*": vi.MAP()}),
}


# ---------------------------------------------------------------------------------------------------------- features


class Case:
    """One architecture with one family on one device; each feature is a method that raises where it does not hold."""

    def __init__(self, architecture, family, device, directory):
        self.make, data, self.options = ARCHITECTURES[architecture]
        self.family, self.device, self.directory = FAMILIES[family], torch.device(device), Path(directory)
        self.data = data()
        self.posterior = self.fresh()

    def net(self):
        torch.manual_seed(0)
        return self.make()

    def fresh(self, **more):
        likelihood = vi.likelihoods.Categorical()
        generator = torch.Generator().manual_seed(1)
        return vi.variationalize(self.net(), likelihood, self.family, generator=generator, **self.options, **more)

    def fitted(self, posterior, steps=3, **options):
        loader = DataLoader(self.data, batch_size=B, shuffle=True)
        settings = {"schedule": vi.Schedule(stop=False), "progress": False}
        result = posterior.to(self.device).fit(loader, steps=steps, **settings | options)
        assert torch.isfinite(result.history["elbo"]).all(), "the ELBO is not finite"
        return result

    def predicted(self, posterior):
        options = {"reference": self.data.all_inputs()} if posterior.batch_norm == "reestimated" else {}
        generator = torch.Generator().manual_seed(2)
        return posterior.predict(self.data.all_inputs(), draws=3, generator=generator, **options)

    def fit(self):
        before = [parameter.detach().clone() for parameter in self.posterior.parameters()]
        self.fitted(self.posterior)
        after = [parameter.detach().cpu() for parameter in self.posterior.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing was learned"

    def predict(self):
        mean = self.predicted(self.posterior).mean.cpu()
        assert mean.shape[:2] == (N, CLASSES), "the probabilities have another shape"
        assert torch.allclose(mean.sum(1), torch.ones_like(mean[:, 0])), "the probabilities do not sum to one"

    def save(self):
        self.posterior.save(self.directory / "q")
        again = vi.load(self.directory / "q", self.net()).to(self.device)
        same = torch.allclose(self.predicted(again).mean, self.predicted(self.posterior).mean, atol=1e-6)
        assert same, "what was loaded predicts otherwise"

    def bfloat16(self):
        self.fitted(self.fresh(), compute=vi.Compute(precision=torch.bfloat16))

    def resume(self):
        """Interrupted after two of four steps and resumed: the bits of a fit never stopped, on a GPU to 1e-3."""
        whole, first, again = (self.fresh() for _ in range(3))
        self.fitted(whole, steps=4)

        def interrupt(history):
            if len(history) == 2:
                raise KeyboardInterrupt

        self.fitted(first, steps=4, checkpoint=vi.Checkpoint(self.directory), callback=interrupt)
        self.fitted(again, steps=4, checkpoint=vi.Checkpoint(self.directory, resume=True))
        tolerance = 0.0 if self.device.type == "cpu" else 1e-3
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), "a resumed fit ends elsewhere"


FEATURES = ("fit", "predict", "save", "bfloat16", "resume")


def run(architecture, family, device="cpu"):
    """Return {feature: why it does not hold} of the features that do not."""
    with tempfile.TemporaryDirectory() as directory:
        case = Case(architecture, family, device, directory)
        reasons = {}
        for feature in FEATURES:
            try:
                getattr(case, feature)()
            except ERRORS as error:
                reasons[feature] = str(error).splitlines()[0] if str(error) else type(error).__name__
        return reasons
