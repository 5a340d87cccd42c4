"""Coloured digits: scikit-learn's, drawn on images of 32 x 32 and kept in the files of CIFAR-10, which parsim then reads.

Each is enlarged three times, at a place of its own, in one random colour before another: the colour says nothing of the class.
Those drawn for training come from the digits of the training split alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from parsim.app.learners import problem_for
from parsim.data.cifar import LAYOUTS
from parsim.model.spec import ModelSpec
from parsim.relaxed.problems import LearningProblem, load_problem

SIDE, ENLARGED = 32, 3
LAYOUT = LAYOUTS["cifar10"]


def records(pixels: np.ndarray, classes: np.ndarray, count: int, seed: int) -> np.ndarray:
    """uint8 [count, 1 + 3 * 32 * 32] of CIFAR-10's binary files, from digits [n, 64] in [0, 1] and their classes [n]."""
    rng = np.random.default_rng([seed, count])
    which = np.arange(count) % len(pixels)
    drawn = np.zeros((count, SIDE, SIDE), dtype=np.float32)
    side = 8 * ENLARGED
    large = pixels[which].reshape(-1, 8, 8).repeat(ENLARGED, 1).repeat(ENLARGED, 2)
    for image, digit, (top, left) in zip(drawn, large, rng.integers(0, SIDE - side + 1, (count, 2)), strict=True):
        image[top : top + side, left : left + side] = digit
    dark, bright = (rng.uniform(*ends, (count, 3, 1, 1)) for ends in ((0, 120), (136, 255)))
    coloured = (dark + (bright - dark) * drawn[:, None]).astype(np.uint8)
    return np.concatenate([classes[which].astype(np.uint8)[:, None], coloured.reshape(count, -1)], axis=1)


def write_files(root: Path) -> None:
    """The six binary files of CIFAR-10 under `root`: 50,000 drawings of the training digits, 10,000 of the others."""
    digits = load_problem("digits")
    folder = root / LAYOUT.binary_folder
    folder.mkdir(parents=True)
    sources = ((LAYOUT.train, digits.inputs, digits.targets), (LAYOUT.test, digits.test_inputs, digits.test_targets))
    for (names, inputs, targets), samples in zip(sources, LAYOUT.samples, strict=True):
        for number, name in enumerate(names):
            made = records(inputs.numpy(), targets.numpy(), samples // len(names), number)
            (folder / f"{name}.bin").write_bytes(made.tobytes())


@cache
def coloured_digits(samples: int, test_samples: int) -> LearningProblem:
    """The first samples of the files as parsim reads them: float32 [n, 3, 32, 32]."""
    spec = ModelSpec(name="resnet_small", input_shape=(3, SIDE, SIDE))
    with tempfile.TemporaryDirectory() as root:
        write_files(Path(root))
        whole = problem_for(spec, "cifar10", root)
    return replace(
        whole,
        name="coloured digits",
        inputs=whole.inputs[:samples].clone(),
        targets=whole.targets[:samples].clone(),
        test_inputs=whole.test_inputs[:test_samples].clone(),
        test_targets=whole.test_targets[:test_samples].clone(),
    )
