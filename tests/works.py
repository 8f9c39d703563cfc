"""The table of what works: every architecture with every family, taken the whole way at a small size.

python -m tests.works --out docs/works.md                                on a CPU, a minute or two
python -m tests.works --device cuda --json docs/works_cuda.json          on a GPU; the page takes its table from there

`STRUCTVI_TEST_WORKS=docs/works_cuda.json make test-gpu` writes that file too, and prints the table of the GPU's tests,
which is kept on the page between its two marks.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import structvi as vi

PAGE = Path(__file__).parents[1] / "docs" / "works.md"
CUDA = PAGE.with_name("works_cuda.json")
MARKS = "<!-- make test-gpu -->", "<!-- end -->"
NO_GPU = "Every cell of the table above holds on an H200."
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
        self.fitted(self.fresh(), precision=torch.bfloat16)

    def resume(self):
        """Interrupted after two of four steps and resumed: the bits of a fit never stopped, on a GPU to 1e-3."""
        whole, first, again = (self.fresh() for _ in range(3))
        self.fitted(whole, steps=4)

        def interrupt(history):
            if len(history) == 2:
                raise KeyboardInterrupt

        self.fitted(first, steps=4, checkpoint=self.directory, callback=interrupt)
        self.fitted(again, steps=4, resume=self.directory)
        tolerance = 0.0 if self.device.type == "cpu" else 1e-3
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), "a resumed fit ends elsewhere"


FEATURES = ("fit", "predict", "save", "bfloat16", "resume")


def run(architecture, family, device="cpu"):
    """{"draws": "vmap" or "loop", feature: "" where it holds, else why not}."""
    with tempfile.TemporaryDirectory() as directory:
        case = Case(architecture, family, device, directory)
        reasons = {}
        for feature in FEATURES:
            try:
                getattr(case, feature)()
                reasons[feature] = ""
            except ERRORS as error:
                reasons[feature] = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"draws": case.posterior.model.evaluation.choice or "loop", **reasons}


def everything(device):
    return {name: {family: run(name, family, device) for family in FAMILIES} for name in ARCHITECTURES}


# -------------------------------------------------------------------------------------------------------------- page


def cell(result):
    """What a table says of one result."""
    missing = [feature for feature in FEATURES if result[feature]]
    if "fit" in missing:
        return "does not fit"
    return result["draws"] + (f", no {', '.join(missing)}" if missing else "")


def table(results):
    lines = [f"| | {' | '.join(FAMILIES)} |", f"| --- |{' --- |' * len(FAMILIES)}"]
    for name, row in results.items():
        lines.append(f"| {name} | {' | '.join(cell(row[family]) for family in FAMILIES)} |")
    notes = [
        f"- {name}, {family}, {feature}: {row[family][feature]}"
        for name, row in results.items()
        for family in FAMILIES
        for feature in FEATURES
        if row[family][feature]
    ]
    return "\n".join(lines + (["", *notes] if notes else []))


def gpu_tests():
    """What the page says of `make test-gpu`: kept as it is."""
    text = PAGE.read_text()
    return text.split(MARKS[0])[1].split(MARKS[1])[0].strip() if MARKS[0] in text else "Not run here."


def page(cpu, cuda=None):
    """The documentation's page: `cuda` is {"device", "results"} of another run, or None."""
    gpu = f"Run on: {cuda['device']}.\n\n{table(cuda['results'])}" if cuda else NO_GPU
    return f"""# What works

This page is written by `python -m tests.works`, which takes every architecture with every family the whole way at a
small size, and a test compares it with what the code does. A cell says how draws of the weights are evaluated: `vmap`,
all at once, or in a `loop`. It stands for all of these:

- **fit**: `bayes.fit` moves the variational parameters and every ELBO is finite;
- **predict**: `bayes.predict` gives probabilities;
- **save**: `bayes.save` and `vi.load` give a posterior with the same predictions;
- **bfloat16**: `bayes.fit(.., precision=torch.bfloat16)`;
- **resume**: a fit interrupted and resumed ends in the same bits as one never stopped (on a GPU within 1e-3).

What does not hold is named in the cell, with the reason below the table. On a CPU a rule without a clock chooses the
loop for random convolutions and for large draws; vmap would be right there too. `FullNormal` holds P² numbers: it is
for small networks and small parts of large ones. `PerLayer` is a random head on a backbone that is learned as a point:
all draws share one pass of the backbone, so that vmap is for the head alone.

## On a CPU

{table(cpu)}

## On a GPU

{gpu}

### The tests of a GPU

`make test-gpu` (`pytest -m gpu tests/gpu`) runs on a machine with a CUDA device, and ends with the table below. Groups:

- **architectures**: the cells of the table above;
- **capture**: a step captured as a CUDA graph gives the bits of the eager one, for every kind of family, clipped,
  tempered, in stages, in float64, bfloat16 and float16. What is not finite changes nothing in a graph. A network that
  cannot be captured is fitted eagerly, with a note;
- **fits**: every kind of family in float32, bfloat16 and float16 learns and predicts. A resumed fit ends in the bits of
  one never stopped; a fit goes on on another device. Files go from the GPU to the CPU and back. Outputs and ELBO are
  those of the CPU. Tried too: fits around a trained network, evaluation, calibration, diagnosis, growth, log densities;
- **kernels**: draws and gradients of the Triton kernels against the plain path in float64 at P = 101 and 100,003,
  ranks 1, 3, 16, 17, 64 and 128, with 1, 2, 7 and 40 draws, Adam against torch's, partial sums and numbers of draws;
- **laws**: every law of every family (`structvi.testing`) in float32 and float64;
- **many_fits**: fits at once are those one by one, captured; the noise of all generators in one launch is that of each;
- **memory**: a step that does not fit says what would, and nothing is lost;
- **products**: batched products of linear layers on tensor cores against float64, in any layout; a captured step has
  their bits;
- **ranks**: NCCL with one rank, gloo with two on one device: data parallel, draws, sharded, DDP.

{MARKS[0]}
{gpu_tests()}
{MARKS[1]}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="write the page")
    parser.add_argument("--json", help="write what was found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = everything(arguments.device)
    if arguments.json:
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        Path(arguments.json).write_text(json.dumps({"device": name, "results": results}, indent=1) + "\n")
    if arguments.out:
        if arguments.device != "cpu":
            parser.error("the page is written by a run on a CPU; give --json on other devices")
        Path(arguments.out).write_text(page(results, json.loads(CUDA.read_text()) if CUDA.exists() else None))


if __name__ == "__main__":
    main()
