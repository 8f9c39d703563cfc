"""The result of a placement around a trained network."""

from dataclasses import dataclass, field

from ..result import Result


@dataclass(repr=False, kw_only=True)
class LaplaceResult(Result):
    """A posterior placed around a trained network, and what the validation set says of it.

    Log densities are in nats for each observed number of the validation set. That of a candidate with a temperature
    or a noise is cross-fitted: each row at the value that the rows of other folds ask for.

    Attributes:
        selected: the candidate that was selected; without a validation set the default.
        candidates: the held-out log density of every candidate that was tried, by name.
        network: that of the network as it is; None without a validation set, and so below.
        network_tempered: that of the network with its own temperature, or noise.
        held_out: that of the selected candidate.
        gain: how much higher that is than `network_tempered`, and its paired standard error over rows.
        passes: what it took, in passes over the training data: a forward pass of a row counts a third.
        seconds: what it took.
        doubt: why the network looks untrained; empty if it does not.
        bound: whether the ELBO is a lower bound on the evidence: False with point masses.
    """

    selected: str
    candidates: dict[str, float] = field(default_factory=dict[str, float])
    network: float | None = None
    network_tempered: float | None = None
    held_out: float | None = None
    gain: tuple[float, float] | None = None
    passes: float = 0.0
    seconds: float = 0.0
    doubt: str = ""
    bound: bool = True

    def headlines(self) -> list[str]:
        lines = [self.verdict, self.doubt] if self.doubt else [self.verdict]
        if self.held_out is not None and self.gain is not None:
            gain, error = self.gain
            lines.append(
                f"held-out log density: {self.held_out:.4f} nats; network {self.network:.4f}, with its own temperature "
                f"or noise {self.network_tempered:.4f} (difference {gain:+.4f} ± {error:.4f})"
            )
        return [*lines, f"took {self.passes:.2g} passes over the training data, {self.seconds:.1f} s"]

    @property
    def details(self) -> str:
        tried = [f"{name}: {density:.4f} nats" for name, density in self.candidates.items()]
        return "\n".join([*self.headlines(), f"ELBO: {self.elbo}, not maximised", *tried, *self.notes])

    @property
    def next_step(self) -> str:
        if self.held_out is None:
            return "give validation=held_out_loader, which selects the prior's width; or bayes.fit(loader, epochs=..)"
        return "bayes.predict(x), bayes.evaluate(test_loader); bayes.save(file)"
