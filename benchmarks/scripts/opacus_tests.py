"""Runs Opacus' own tests of its engine on dpflash, changed as docs/opacus.md says.

    python benchmarks/scripts/opacus_tests.py --out benchmarks/results/opacus-tests.json

Changed are the loop (it counts releases, and takes one microbatch at a time) and the arguments
(`loss_reduction="mean"`, one bound for per_layer, no `wrap_model`). `failed` counts the tests of
each reason; the first pattern that occurs in an error gives it. Random examples of hypothesis are
cut to `--examples`. torchvision is not needed: its random images are made here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import types
import unittest
import warnings
from pathlib import Path

import hypothesis
import torch
from torch.utils.data import TensorDataset

import dpflash

# Reasons, by what their errors contain.
REASONS = {
    "reads `grad_sample` or `summed_grad`, which do not exist": r"'(grad_sample|summed_grad)'",
    "needs torchvision's models": "torchvision",
    "the model's data is batch-second, [T, B]": "batch_second|batch-second|first dimension",
    "expects the class of Opacus' error": "UnsupportedModuleError|different than optimizer",
    "a gradient given to loss.backward": "loss_reduction",
}


class Engine(dpflash.PrivacyEngine):
    """The engine with the changes of arguments."""

    def make_private(self, *, max_grad_norm, wrap_model=True, **options):
        """As docs/opacus.md says."""
        if isinstance(max_grad_norm, list):
            max_grad_norm = math.hypot(*max_grad_norm)
        options.setdefault("loss_reduction", "mean")
        return super().make_private(max_grad_norm=max_grad_norm, **options)

    def make_private_with_epsilon(self, *, wrap_model=True, **options):
        """As docs/opacus.md says."""
        options.setdefault("loss_reduction", "mean")
        return super().make_private_with_epsilon(**options)


def train(case, model, optimizer, loader, max_steps=None, *, closure=False):
    """The tests' loop, in which a step is a release."""
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
            if max_steps and steps >= max_steps:
                return
        if max_steps is None:
            return


def torchvision_of_random_images():
    """Stands in for torchvision where the tests make random images."""

    def fake(*, size, image_size, num_classes, transform=None):
        return TensorDataset(torch.randn(size, *image_size), torch.randint(num_classes, (size,)))

    def absent(*_, **__):
        raise ModuleNotFoundError("torchvision")

    names = ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.datasets")
    vision, models, transforms, datasets = (types.ModuleType(name) for name in names)
    datasets.FakeData = fake
    models.resnet18 = models.densenet121 = absent
    transforms.Compose = transforms.Normalize = lambda *_: None
    transforms.ToTensor = lambda: None
    vision.models, vision.transforms, vision.datasets = models, transforms, datasets
    sys.modules |= dict(zip(names, (vision, models, transforms, datasets), strict=True))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=4)
    options = parser.parse_args()
    torchvision_of_random_images()
    hypothesis.settings.register_profile("few", max_examples=options.examples, database=None)
    hypothesis.settings.load_profile("few")
    import opacus.tests.privacy_engine_test as tests

    tests.PrivacyEngine = Engine
    base = tests.BasePrivacyEngineTest
    base._train_steps = train
    base._train_steps_with_closure = lambda *args, **kw: train(*args, **kw, closure=True)
    warnings.simplefilter("ignore")
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(result)
    Path(options.out).write_text(json.dumps(len(result.failures + result.errors)))
    for case, text in result.failures + result.errors:
        print(case, text[-300:].replace("\n", " | "))
    print(result.testsRun, len(result.failures), len(result.errors), len(result.skipped))


if __name__ == "__main__":
    main()
