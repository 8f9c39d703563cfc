"""The benchmarks run and say what they promise to say; their figures are in docs/benchmarks.md."""

import gzip
import json
import struct
import sys
from functools import partial

import pytest
import torch

import structvi as vi
from benchmarks import (
    around_steps,
    bayesian_head,
    classification,
    function_space,
    gaussian_fit,
    gaussian_hundred,
    large_densities,
    multimodal,
    nets,
    peers,
    posteriordb,
    predictor,
    scaling,
    step_cost,
    step_profile,
    timing,
)
from structvi.studies.paper.optima import best_kl

METHODS = [method.name for method in classification.METHODS]


@pytest.fixture
def small(monkeypatch):
    """The benchmark's way, with a small network and few draws."""
    monkeypatch.setattr(classification, "HIDDEN", 8)
    for method in classification.METHODS:
        monkeypatch.setattr(method, "draws", min(method.draws, 4))


def test_classification_on_digits(small, tmp_path):
    classification.main(["--quick", "--out", str(tmp_path / "results.json")])
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["data"], results["sizes"]["test"], results["seeds"]) == ("digits", 500, 1)
    assert results["versions"]["torch"] == torch.__version__
    assert [row["method"] for row in results["rows"]] == METHODS
    assert len(results["runs"]) == len(METHODS)
    for row in results["rows"]:
        for column in ("accuracy", "nll", "ece", "auroc permuted", "auroc turned"):
            assert set(row[column]) == {"mean", "sd"}
        # chance is 0.1: even twelve epochs of eight hidden units are far from it
        assert row["accuracy"]["mean"] > 0.3
        # what makes the methods comparable
        assert row["evaluations"]["mean"] == 12
        assert ("elbo" in row) == (row["method"] not in ("MAP", "MC dropout", "deep ensemble of 3"))


def write_idx(path, array):
    path.parent.mkdir(exist_ok=True)
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.numpy().tobytes()))


def test_classification_on_idx_files(small, tmp_path):
    """Files of MNIST's form: images whose label is the row that is lit, and of letters as noise."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 5060), ("t10k", 50)):
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        images = torch.zeros(count, 10, 10, dtype=torch.uint8)
        images[torch.arange(count), labels.long()] = 255
        write_idx(tmp_path / f"mnist/{split}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"mnist/{split}-labels-idx1-ubyte.gz", labels)
    letters = torch.randint(256, (50, 10, 10), generator=generator, dtype=torch.uint8)
    write_idx(tmp_path / "notmnist/t10k-images-idx3-ubyte.gz", letters)
    assert torch.equal(classification.read_idx(tmp_path / "notmnist/t10k-images-idx3-ubyte.gz"), letters)
    results = classification.main(["--data", str(tmp_path), "--train", "60", "--quick"])
    assert results["sizes"] == {"train": 60, "validation": 5000, "test": 50}
    assert all("auroc notMNIST" in row for row in results["rows"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04", "no idx file"), (b"\0\0\x08\x01\0\0\0\x05abc", r"says \[5\] and holds 3 bytes")],
)
def test_damaged_idx_files_are_refused(tmp_path, content, message):
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=message):
        classification.read_idx(tmp_path / "x.gz")


def test_gaussian_fit(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    # the optima of all ranks take half a minute; any point of a family bounds its best from above
    monkeypatch.setattr(gaussian_fit, "best_kl", partial(best_kl, starts=2, steps=10))
    gaussian_fit.main(["--quick", "--out", str(out)])
    rows = [row for row in json.loads(out.read_text())["rows"] if row["family"] != "Pyro"]
    assert [(row["family"], row["rank"]) for row in rows][:2] == [("mean field", 0), ("covariance", 1)]
    assert len(rows) == 10
    assert all(row["excess_median"] >= 0 for row in rows)
    for row in rows:
        assert [point["evaluations"] * 10 // row["evaluations"] for point in row["curve"]] == [1, 2, 5, 10]
        assert row["curve"][-1]["kl_q_p"] == row["kl_q_p"]


def test_bayesian_head(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bayesian_head", "--repeats", "1"])
    monkeypatch.setattr(bayesian_head, "BATCH", 2)
    monkeypatch.setattr(bayesian_head, "DRAWS", 2)
    bayesian_head.main()
    assert "all weights (the faster way) / Bayesian head = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "size"), [("mlp", 269322), ("resnet18", 11169162), ("transformer", 867328), ("unet", 471652)]
)
def test_networks_have_the_weights_they_promise_and_gradients_for_all(name, size):
    problem = nets.problem(name, batch=2)
    assert problem.size == size
    nets.loss(problem).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in problem.net.parameters())


@pytest.fixture
def tiny(monkeypatch):
    """A step of a network of no size."""
    monkeypatch.setattr(nets, "mlp", lambda *widths: nets.Network(torch.nn.Linear(784, 4), torch.nn.Linear(4, 10)))


def test_step_cost(tiny, tmp_path, monkeypatch):
    def broken(problem, draws):
        raise NotImplementedError("no such layer")

    rows = (peers.Peer("absent", "no_such_package", broken), peers.Peer("broken", "torch", broken))
    monkeypatch.setattr(peers, "PEERS", rows)
    out = tmp_path / "results.json"
    step_cost.main(["--quick", "--net", "mlp", "--threads", "1", "--out", str(out)])
    results = json.loads(out.read_text())
    assert results["machine"]["versions"]["torch"] == torch.__version__
    found = {(row["method"], row["rank"], row["draws"]): row for row in results["rows"]}
    assert found["absent", None, 1]["status"] == "not installed"
    assert found["broken", None, 1]["status"] == "failed: NotImplementedError: no such layer"
    assert found["deterministic", None, 1]["ratio"] == 1
    ours = [found["MeanField", 0, S] for S in (1, 2)] + [found["StructuredNormal", 4, S] for S in (1, 2)]
    ours += [found["StructuredPrecision", 4, S] for S in (1, 2)]
    passes, P = found["forward and backward", None, 1]["seconds"], 784 * 4 + 4 + 50
    for row in ours:
        assert row["status"] == "ok"
        # ten passes over P(K + 2) numbers of four bytes, and a network pass for each draw
        expected = row["draws"] * passes + 40 * P * (row["rank"] + 2) / results["rates"]["bandwidth"]
        assert row["floor"] == pytest.approx(expected)
        # Adam's two moments and the parameters themselves are kept from step to step
        assert row["live"] >= 3 * 4 * P * (row["rank"] + 2)
    assert found["StructuredNormal, stepper", 4, 1]["status"] == "ok"
    assert found["Bayesian head on MAP", 4, 2]["live"] < found["StructuredNormal", 4, 2]["live"]
    assert "not installed" in results["table"]
    assert "broken: failed: NotImplementedError: no such layer." in results["table"]


def test_step_profile(tiny, capsys):
    results = step_profile.main(["--quick", "--net", "mlp", "--rank", "2", "--threads", "1", "--top", "3"])
    counts = {row["name"]: row["count"] for row in results["operations"]}
    assert counts["aten::randn"] == 1  # one call of the generator a step
    assert f"{len(results['operations']) - 3} more" in capsys.readouterr().out


def test_function_space():
    head, _, row = function_space.main(["--quick"]).splitlines()
    drawn, exact = (float(cell) for cell in row.split("|")[-3:-1])
    assert "error of draws" in head
    assert exact < 0.1 * drawn


def test_predictor(tiny):
    results = predictor.main(["--quick", "--net", "mlp", "--threads", "1"])
    found = {row["way"]: row for row in results["rows"]}
    assert found["plain passes"]["of_plain"] == 1
    assert found["predictor, mean"]["throughput"] == pytest.approx(16 / found["predictor, mean"]["seconds"])
    P = 784 * 4 + 4 + 50
    for way in ("deep ensemble", "predictor, outputs"):  # four networks are held
        assert found[way]["live"] >= 4 * 4 * P
    assert "of captured" not in results["table"]


def test_a_graph_needs_a_gpu():
    with pytest.raises(ValueError, match="--captured needs --device cuda"):
        step_cost.main(["--captured"])


def test_a_missing_folder_of_peers_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--peers expects a folder of packages, got .*nowhere"):
        step_cost.main(["--peers", str(tmp_path / "nowhere")])


def test_peers_come_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "carried_peer.py").write_text("")
    assert not peers.installed("carried_peer")
    timing.start(timing.parser("").parse_args(["--peers", str(tmp_path), "--threads", "1"]))
    assert peers.installed("carried_peer")


def test_scaling(tmp_path, monkeypatch):
    small = scaling.Centre(100, 2, 2, (100, 1000, 10_000), (1, 10, 100), (1, 10, 100))
    monkeypatch.setitem(scaling.CENTRES, "quick", small)
    results = scaling.main(["--quick", "--threads", "1", "--seconds", "0", "--out", str(tmp_path / "results.json")])
    assert len(results["rows"]) == 18
    fits = {(fit["kind"], fit["letter"]): fit for fit in results["fits"]}
    # memory is counted, not measured: what holds for it holds on any machine
    assert 0.9 < fits["parameters", "P"]["memory_exponent"] <= 1.05
    assert fits["parameters", "P"]["peak_over_square"] < 0.01
    assert fits["parameters", "K"]["memory_exponent"] <= 1.05
    assert fits["parameters", "K"]["time_fit"]["a"] >= 0


def test_fits_of_known_curves():
    K = [1, 3, 10, 30, 100]
    assert scaling.exponent(K, [5 * k**1.5 for k in K]) == pytest.approx(1.5)
    columns = [[1.0] * 5, K, [k**2 for k in K]]
    coefficients, error = scaling.non_negative(columns, [7 + 2 * k + 0.5 * k**2 for k in K])
    assert coefficients == pytest.approx([7, 2, 0.5])
    assert error < 1e-9
    # the best line of a falling curve has a negative slope: the best that is allowed has none
    assert scaling.non_negative(columns, [5.0, 4.0, 3.0, 2.0, 1.0])[0][1:] == [0, 0]


def test_memory_of_a_function_is_what_it_allocates():
    kept, (live, peak) = timing.allocated(lambda: torch.zeros(1000) + torch.ones(1000))
    assert (len(kept), live, peak) == (1000, 4000, 12000)


def test_ratios_are_taken_within_a_repeat():
    # the machine is ten times slower in the second repeat: the ratio is two all the same
    assert timing.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == {"ratio": 2, "ratio_low": 2, "ratio_high": 2}


def test_tables_are_filled_from_results(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "step_cost_cpu.json"
    page.write_text("before\n<!-- table step_cost_cpu -->\nold\n<!-- end -->\nafter\n")
    results.write_text(json.dumps({"table": "new"}))
    timing.main([str(page), str(results)])
    assert page.read_text() == "before\n<!-- table step_cost_cpu -->\n\nnew\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="no place for other"):
        timing.fill("", {"other": ""})


def test_posteriordb(tmp_path, monkeypatch):
    """A regression of its form, with the posterior's moments in closed form in place of reference draws."""
    # one mode: no mass beside it to look for
    monkeypatch.setattr("structvi.diagnostics.importance_weights.beside", lambda *_, **__: [])
    generator = torch.Generator().manual_seed(0)
    x = 100 + 15 * torch.randn(100, generator=generator, dtype=torch.float64)
    y = 25 + 0.6 * x + 18 * torch.randn(100, generator=generator, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x], dim=-1)
    beta = torch.linalg.lstsq(X, y).solution
    # the prior of σ, half a Cauchy(2.5), is σ⁻² out here: SSE/σ² is χ² with 99 degrees of freedom
    squares, half = (y - X @ beta).square().sum(), torch.tensor(99 / 2).double()
    log_noise = 0.5 * ((squares / 2).log() - torch.special.digamma(half))
    of_log_noise = 0.25 * torch.special.polygamma(1, half).reshape(1, 1)
    covariance = torch.block_diag(squares / 97 * torch.linalg.inv(X.mT @ X), of_log_noise)
    name = "kidiq-kidscore_momiq"
    folder = tmp_path / "posteriordb" / name
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps({"mom_iq": x.tolist(), "kid_score": y.tolist()}))
    reference = {
        "unconstrained_mean": [*beta.tolist(), log_noise.item()],
        "unconstrained_cov": covariance.tolist(),
    }
    (folder / "summary.json").write_text(json.dumps(reference))
    out = tmp_path / "results.json"
    posteriordb.main(["--data", str(tmp_path), "--only", name, "--out", str(out)])
    results = json.loads(out.read_text())
    assert [row["method"] for row in results["rows"]] == ["mean field", "full", "structured 5", "precision 5"]
    for row in results["rows"][1:]:
        assert row["converged"]
        assert row["k"] < 0.7
        assert row["mean max"] < 0.05
        assert row["sd max"] < 0.05
    # intercept and slope are all but collinear: independent normals are far too narrow, and it is said
    assert results["rows"][0]["sd max"] > 1
    assert results["rows"][0]["flagged"]
    assert [line["method"] for line in results["summary"]] == [row["method"] for row in results["rows"]]


def test_gaussian_hundred(monkeypatch):
    monkeypatch.setattr(gaussian_hundred, "P", 6)
    monkeypatch.setattr(gaussian_hundred, "RANKS", (2,))
    rows = gaussian_hundred.run(targets=1, evaluations=20_000, peers=False, starts=4, steps=50)
    cases = [("mean field", 0), ("covariance", 2), ("precision", 2), ("full", 6)]
    assert [(row["family"], row["rank"]) for row in rows] == cases
    for row in rows:
        assert row["evaluations"] <= 20_000
        assert row["verdict"].startswith("converged")
        assert 0 <= row["excess"] < 0.01


def test_large_densities(monkeypatch):
    monkeypatch.setattr("structvi.searching.large_member.LARGE", 39)
    target = large_densities.Exact(40, 2, True, 0)
    result, cost = large_densities.run(target, vi.StructuredPrecision(2), 0)
    assert target.kl(result.family) < 0.01 * target.mean_field()
    assert len(cost.split()) == 5
    for other in (large_densities.logistic(40, 0), large_densities.Student(40, 2, True, 0)):
        assert other.log_joint(torch.zeros(3, 40, dtype=torch.float64)).shape == (3,)


def test_multimodal_targets_are_what_they_say():
    targets = multimodal.suite(0)
    assert len(targets) == len({target.name for target in targets}) == 40
    for target in targets:
        theta = target.modes.clone().requires_grad_()
        value = target.log_joint(theta)
        assert value.shape == (len(target.modes),)
        if target.kind == "other":  # at maxima; centres of mixtures of normals are near them
            (gradient,) = torch.autograd.grad(value.sum(), theta)
            assert gradient.abs().max() < 1e-3


def test_multimodal_runs_and_sums_up(capsys):
    (row,) = multimodal.main(["--only", "gaussians-2-3"])
    assert row["found"] == row["true"] == row["parts"]
    assert not row["is_short"]
    out = capsys.readouterr().out
    assert "gaussians: 1 of 1 within 0.02 nats" in out
    assert "short and called converged: 0 of 1" in out


def test_around_steps(monkeypatch, capsys):
    """Two epochs of the digits: a row with steps, fit, diagnosis and their ratio, which is above one."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr("sys.argv", ["around_steps", "--epochs", "2", "--repeats", "1"])
    around_steps.main()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| digits")]
    passes, steps, fit, diagnose, ratio = (float(cell) for cell in row.split("|")[2:-1])
    assert passes == 12  # two epochs of a pair of draws, three for each
    assert fit >= steps
    assert ratio == pytest.approx((fit + diagnose) / steps, abs=0.02 + 0.02 / steps)
