"""The report of a check: problems with remedies, and lists of the comparisons made and skipped."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

ITSELF = "(the model itself)"
LOSS_FN = "loss_fn"
LOSS_REMEDY = (
    "return one loss per sample that depends on that sample alone: dpflash.losses.cross_entropy "
    "(mse, binary_cross_entropy_with_logits; of_criterion for a criterion of torch, with class "
    "weights too), or reduction='none' and a mean over each sample's own elements, in the order "
    "of the batch"
)

_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """One finding of a check.

    Attributes:
        kind: "unsupported", "run", "loss", "coupling", "reduction", "state", "first_dimension",
            "outside_use", "no_gradient", "random" or "batch_size".
        where: dotted name of the module or parameter, or "loss_fn"; for "no_gradient" the names
            of all parameters without a gradient, joined by ", ".
        message: description of the problem.
        remedy: how to fix the problem.
        severity: "error" if private training would be refused, or its guarantee would not hold;
            else "warning".
    """

    kind: str
    where: str
    message: str
    remedy: str
    severity: str = "error"


@dataclass(frozen=True)
class CheckReport:
    """The result of a check: a test on one batch, not a proof.

    Attributes:
        problems: the problems found, errors first.
        checked: the comparisons that were made.
        not_checked: the comparisons that were not made, with the reason.
    """

    problems: list[Problem]
    checked: list[str]
    not_checked: list[str]

    @property
    def ok(self) -> bool:
        """Whether no problem is an error; there may be warnings."""
        return all(problem.severity != "error" for problem in self.problems)

    def __str__(self) -> str:
        lines = []
        for problem in self.problems:
            where = listed(problem.where.split(", "))
            lines.append(f"{problem.severity:<8} {problem.kind:<16} {where}")
            lines += (
                _wrapped(problem.message, "  ") + _wrapped(f"-> {problem.remedy}", "  ") + [""]
            )
        errors = sum(problem.severity == "error" for problem in self.problems)
        count = f"{errors} error(s), {len(self.problems) - errors} warning(s)"
        lines += [count if self.problems else "no problem found", ""]
        for title, entries in (("checked", self.checked), ("not checked", self.not_checked)):
            if entries:
                lines.append(title)
                lines += [line for entry in entries for line in _wrapped(f"- {entry}", "  ")]
        return "\n".join([*lines, "", "A test on this one batch, not a proof."])


@dataclass
class Findings:
    """Collects the entries of a `CheckReport`."""

    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def add(
        self, kind: str, where: str, message: str, remedy: str, severity: str = "error"
    ) -> None:
        self.problems.append(Problem(kind, where, message, remedy, severity))

    def leave_out(self, entry: str) -> None:
        if entry not in self.not_checked:
            self.not_checked.append(entry)

    def unsupported(self) -> set[str]:
        """Names of the modules that make_private would refuse."""
        return {problem.where for problem in self.problems if problem.kind == "unsupported"}

    def errors(self) -> bool:
        return any(problem.severity == "error" for problem in self.problems)

    def report(self) -> CheckReport:
        problems = sorted(self.problems, key=lambda problem: problem.severity != "error")
        return CheckReport(problems, self.checked, self.not_checked)


def listed(names: list[str]) -> str:
    """Return the first names and the number of the others, such as "a, b, c and 2 more"."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def message_and_remedy(error: Exception) -> tuple[str, str]:
    """Split an error message of this library into the problem and the remedy at its end."""
    text = str(error)
    message, _, remedy = text.rpartition(". " if ". " in text else "; ")
    return (message, remedy) if message else (error_text(error), "see the message")


def error_text(error: Exception) -> str:
    """Return the type and first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 96, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
