"""Checks that the model's losses are repeatable, and that it accepts batches of other sizes."""

from __future__ import annotations

from torch import nn

from .report import ITSELF, LOSS_FN, Findings, error_text
from .subject import Subject

FIX_FIRST = "fix this first"
_UNPACK = (
    f"{FIX_FIRST}; pad_packed_sequence needs total_length=x.shape[1], or the longest sample of "
    "the batch decides the length"
)
_RANDOM_REMEDY = (
    "to run the skipped checks, draw random numbers such as timesteps and noise before the loss "
    "function and pass them in the batch, or disable the randomness. Dropout inside of another "
    "operation (nn.LSTM) is disabled by dropout=0.0 or model.eval()"
)


def check_state(subject: Subject, findings: Findings) -> bool:
    """Report values that a model stores from a batch, and whether the model is random.

    Return False if the losses are not repeatable with the same seed, or a batch raises an error.
    """
    first = subject.losses(subject.batch).detach()
    left = subject.buffers()
    written: dict[str, None] = {}
    try:
        for index in subject.indices:
            subject.losses(subject.pick([index] * subject.size))
            for name, value in subject.buffers().items():
                if name not in left or not subject.close(left[name], value):
                    written[name] = None
    except Exception as error:
        message = f"a batch of copies of one sample raised {error_text(error)}"
        is_recurrent = any(isinstance(m, nn.RNNBase) for m in subject.model.modules())
        findings.add("run", LOSS_FN, message, _UNPACK if is_recurrent else FIX_FIRST)
        return False
    again = subject.losses(subject.batch)
    changed = subject.changed()
    for name in changed:
        findings.add(
            "state",
            name,
            "the forward changes it, and state_dict() releases it, without noise",
            "let the optimizer alone change parameters, and keep nothing of a batch in "
            "state_dict() (metrics with persistent=False)",
        )
    if not dict(subject.model.named_parameters()).keys().isdisjoint(changed):
        return False
    if not subject.close(first, again):
        findings.add(
            "state",
            ITSELF,
            "a batch has other losses after another batch was processed: "
            "the model keeps state outside of its buffers between calls",
            "do not keep data of a batch between calls",
        )
        return False
    for name in written:
        # Buffers of an unsupported module are not reported, since it must be replaced anyway.
        if (name.rpartition(".")[0] or ITSELF) not in findings.unsupported():
            findings.add(
                "state",
                name,
                "this buffer is computed from the samples of the batch: it affects later batches "
                "and is in the state_dict, without noise",
                "freeze it, or compute it from public data before training",
            )
    findings.checked.append("buffers after two different batches")
    if subject.is_random:
        findings.add(
            "random",
            ITSELF,
            "the losses depend on the seed, even without dropout layers; samples are "
            "compared at the same index in batches of the same size only",
            _RANDOM_REMEDY,
            "warning",
        )
        findings.not_checked.append("samples alone or at another index: the model is random")
    return True


def check_sizes(subject: Subject, findings: Findings) -> list[int]:
    """Return the batch sizes among B, B - 1 and 1 that work; report the others.

    Size 0 does not occur: an empty logical batch has padding rows, also with BatchMemoryManager.
    """
    taken = [subject.size]
    for size in sorted({subject.size - 1, 1}, reverse=True):
        expected = subject.losses_shape(size)
        try:
            shape = tuple(subject.losses(subject.pick(range(size))).shape)
            found = "" if shape == expected else f"have losses of shape {shape}, not {expected}"
        except Exception as error:
            found = f"raise {error_text(error)}"
        if not found:
            taken.append(size)
        else:
            findings.add(
                "batch_size",
                LOSS_FN,
                f"{size} sample(s) alone {found}",
                "private training varies the batch size: make the model independent of it",
            )
    return taken
