"""AuditReport: the result of an audit, as text, JSON and a plot. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .._json import finite

if TYPE_CHECKING:
    from .bounds import Assessment
    from .checks import Check

AUDIT = "audit.json"
_ABOVE_CLAIM = (
    "A bound is above the claim, which does not refute it: each bound of a correct run may exceed "
    "the claim with a probability of 1 - confidence."
)
WHITE_BOX, BLACK_BOX = "white_box", "black_box"
# False-alarm rate of the verdict on the scores; the checks have rates of their own.
SCORE_FALSE_ALARMS = 1e-3
_BLUE, _GREY, _RED = "#1f5fa8", "#666666", "#c0392b"


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    A pass is no proof: an audit finds only violations that its canaries show, and its bounds are
    lower bounds. `epsilon_lower_gaussian` is an estimate, since it assumes a Gaussian mechanism.

    Attributes:
        claimed_epsilon: epsilon of one canary's membership at delta, by the accountant.
        delta: the delta of the claim and of both bounds.
        claim: description of the claimed mechanism.
        epsilon_lower: lower bound that assumes nothing about the mechanism.
        epsilon_lower_gaussian: lower bound that assumes Gaussian noise on contributions that are
            drawn at the claimed rate (white-box mode, see `dpflash.audit.strength`), or a Gaussian
            trade-off curve (black-box mode).
        confidence: the confidence of each of the two bounds.
        canaries: number of canaries.
        steps: number of releases.
        scores: number of scores; each is for one membership that a coin decided.
        mode: "white_box" (scores from products of the releases with the canaries' gradients) or
            "black_box" (scores from losses of canary documents).
        checks: results of the named checks; empty in black-box mode.
        assessment: errors at each score threshold, guesses, and why the claim is refuted, if so.
        curve: points (false positives, least false negatives) of the claimed trade-off curve.
        seeded: whether keys and coins came from a seed.
        privacy_unit: the privacy unit of the audited settings; a canary represents one unit.
    """

    claimed_epsilon: float
    delta: float
    claim: str
    epsilon_lower: float
    epsilon_lower_gaussian: float
    confidence: float
    canaries: int
    steps: int
    scores: int
    mode: str
    checks: tuple[Check, ...]
    assessment: Assessment
    curve: tuple[tuple[float, float], ...]
    seeded: bool
    privacy_unit: str

    @property
    def ok(self) -> bool:
        """Whether neither the scores nor a named check refute the claim."""
        return not self.assessment.refuted and all(check.ok for check in self.checks)

    @property
    def false_alarm_rate(self) -> float:
        """Upper bound of the rate at which scores or checks refute an honest run."""
        return SCORE_FALSE_ALARMS + sum(check.false_alarm_rate for check in self.checks)

    @property
    def note(self) -> str:
        """An explanation if the audit passed but a bound is above the claimed epsilon, else ""."""
        is_above = max(self.epsilon_lower, self.epsilon_lower_gaussian) > self.claimed_epsilon
        return _ABOVE_CLAIM if self.ok and is_above else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values; numbers that are not finite become None."""
        plain = {"ok": self.ok, **asdict(self), "false_alarm_rate": self.false_alarm_rate}
        plain["note"] = self.note
        found: dict[str, Any] = finite(plain)
        return found

    def __str__(self) -> str:
        mode = self.mode.replace("_", " ")
        rows = [
            ("claim", self.claim),
            ("privacy unit", self.privacy_unit),
            ("claimed epsilon", f"{self.claimed_epsilon:.4g} at delta {self.delta:g}"),
            ("scores", f"{self.scores} of {self.canaries} canaries, {mode}"),
            (
                "epsilon, assumes Gaussian",
                f"at least {self.epsilon_lower_gaussian:.4g}, confidence {self.confidence:.0%}",
            ),
            (
                "epsilon, assumption-free",
                f"at least {self.epsilon_lower:.4g}, confidence {self.confidence:.0%} "
                f"({self.assessment.correct} of {self.assessment.guesses} guesses right)",
            ),
            *(
                (check.name, f"{'ok' if check.ok else 'FAILED'}: {check.found}")
                for check in self.checks
            ),
            ("verdict", self._verdict()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _verdict(self) -> str:
        failed = [check.name for check in self.checks if not check.ok]
        if self.ok:
            return (
                "nothing refutes the claim (a correct run is refuted with a probability of at "
                f"most {self.false_alarm_rate:.2g}); an audit is a test, not a proof"
                + (f". {self.note}" if self.note else "")
            )
        reasons = [self.assessment.refuted] if self.assessment.refuted else []
        if failed:
            reasons.append(f"failed: {', '.join(failed)}")
        return f"REFUTED: {'; '.join(reasons)}"

    def figure(self) -> Any:
        """Return a matplotlib Figure of the claimed trade-off curve and the measured errors."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(
            {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
        ):
            figure = Figure(figsize=(5.5, 5), layout="constrained")
            axes = figure.subplots()
        axes.plot(*zip(*self.curve, strict=True), color=_BLUE, linewidth=1.8, label="claimed")
        axes.plot([0, 1], [1, 0], color=_GREY, linestyle="--", linewidth=1, label="chance")
        for number, cut in enumerate(self.assessment.cuts):
            broken = self.mode == WHITE_BOX and cut.breaks_claim
            axes.errorbar(
                [cut.false_positives],
                [cut.false_negatives],
                xerr=_upwards(cut.most_false_positives - cut.false_positives),
                yerr=_upwards(cut.most_false_negatives - cut.false_negatives),
                color=_RED if broken else "black",
                fmt=".",
                linewidth=1,
                label="found, upper confidence limits" if not number else None,
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("false positive rate: out of the data, guessed in")
        axes.set_ylabel("false negative rate: in the data, guessed out")
        axes.set_title(f"{self.mode.replace('_', ' ')}, {self.scores} scores", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        return figure


def _upwards(length: float) -> list[list[float]]:
    return [[0.0], [length]]
