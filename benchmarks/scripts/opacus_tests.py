"""Runs Opacus' own tests of its engine on dpflash, changed as docs/opacus.md describes.

    python benchmarks/scripts/opacus_tests.py --out benchmarks/results/opacus-tests.json

The script changes two things in the tests: their training loop, which now counts releases, and the
arguments of `make_private`. `REASONS` explains failures by regular expressions that match their
errors. A failure without a reason is listed under "unexplained", and the exit status is then 1.
Hypothesis makes only two random examples. The classes "...HooksTest" are left out: they repeat
other tests with `wrap_model=False`, which has no meaning in dpflash. torchvision is not needed:
its random images are made here, and tests of its models count as failed.
"""

import argparse
import functools
import json
import math
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from pathlib import Path

import hypothesis
import torch
from torch.utils.data import TensorDataset

import dpflash
from dpflash.bench.environment import environment

REASONS = {
    "needs torchvision's models": "torchvision",
    "the model's data is batch-second, [T, B]": "PrivacyEngineText",
    "reads grad_sample or summed_grad, which do not exist": "'(grad_sample|summed_grad)'",
    "torch.manual_seed fixes neither draws nor noise": "deterministic run must match",
    "writes a checkpoint into an open file, not to a path": "BytesIO",
    "has a loop of its own, which counts iterations": "test_noise_level",
}


class Engine:
    """A PrivacyEngine whose `make_private` takes the tests' arguments."""

    get_compatible_module = staticmethod(dpflash.PrivacyEngine.get_compatible_module)

    def __init__(self, **options):
        self.engine = dpflash.PrivacyEngine(**options)

    def __getattr__(self, name):
        found = getattr(self.engine, name)
        return functools.partial(_changed, found) if name.startswith("make_private") else found


def _changed(make_private, *, max_grad_norm, wrap_model=True, **options):
    if isinstance(max_grad_norm, list):
        max_grad_norm = math.hypot(*max_grad_norm)
    if options.get("clipping") == "per_layer":
        del options["grad_sample_mode"]
    if max_grad_norm == 1e20:  # no clipping
        max_grad_norm = math.inf if options["noise_multiplier"] == 0 else 1.0
    return make_private(max_grad_norm=max_grad_norm, loss_reduction="mean", **options)


def train(case, model, optimizer, loader, max_steps=None, *, closure=False):
    """Train for one epoch, or for `max_steps` releases."""
    steps = 0
    while max_steps is None or steps < max_steps:
        for x, y in loader:

            def loss(x=x, y=y):
                optimizer.zero_grad()
                found = case.criterion(model(x), y)
                found.backward()
                return found

            optimizer.step(loss) if closure else (loss(), optimizer.step())
            steps += getattr(loader, "is_last", True)
            if steps == max_steps:
                return
        if max_steps is None:
            return


def stand_in_for_torchvision():
    """Provide the tests' random images without torchvision."""

    def absent(*_, **__):
        raise ModuleNotFoundError("torchvision")

    def images(*, size, image_size, num_classes, transform):
        return TensorDataset(torch.randn(size, *image_size), torch.randint(num_classes, (size,)))

    contents = {
        "models": {"resnet18": absent, "densenet121": absent},
        "transforms": dict.fromkeys(("Compose", "ToTensor", "Normalize"), lambda *_: None),
        "datasets": {"FakeData": images},
    }
    sys.modules["torchvision"] = vision = types.ModuleType("torchvision")
    for name, names in contents.items():
        module = types.ModuleType(f"torchvision.{name}")
        vars(module).update(names)
        setattr(vision, name, module)
        sys.modules[module.__name__] = module


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="tests whose names contain it")
    options = parser.parse_args()
    stand_in_for_torchvision()
    hypothesis.settings.register_profile(
        "few", max_examples=2, database=None, phases=[hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("few")
    import opacus.tests.privacy_engine_test as tests

    tests.PrivacyEngine = Engine
    base = tests.BasePrivacyEngineTest
    base._train_steps = train
    base._train_steps_with_closure = functools.partialmethod(train, closure=True)
    warnings.simplefilter("ignore")
    found, unexplained = Counter(), []
    for suite in unittest.defaultTestLoader.loadTestsFromModule(tests):
        for case in suite:
            if options.only not in case.id() or "HooksTest" in case.id():
                continue
            result = unittest.TestResult()
            case.run(result)
            errors = "".join(f"{one.id()} {text}" for one, text in result.failures + result.errors)
            if not errors:
                found["skipped" if result.skipped else "passed"] += 1
                continue
            reasons = [r for r, pattern in REASONS.items() if re.search(pattern, errors)]
            found[reasons[0] if reasons else "unexplained"] += 1
            if not reasons:
                unexplained.append(
                    f"{case.id().removeprefix(tests.__name__ + '.')}: {errors[-300:]}"
                )
            print(case.id(), reasons or errors[-800:], flush=True)
    report = {**environment("cpu", 1), "found": dict(found), "unexplained": unexplained}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(dict(found))
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
