"""CIFAR-10 and CIFAR-100 from their own files, as their authors publish them; never downloaded.

Both published layouts are read: Python pickles (folders `cifar-10-batches-py`, `cifar-100-python`) and plain binary records
(`cifar-10-batches-bin`, `cifar-100-binary`: label byte(s), then 3,072 bytes red, green, blue, row by row).
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from parsim.data.samples import Dataset, Target, check_images
from parsim.errors import DataError

ROOT_VARIABLE = "PARSIM_DATA_DIR"
PIXELS = 3 * 32 * 32
SCALE, OFFSET = 4.0 / 255.0, -2.0  # (x / 255 - 0.5) / 0.25: about unit deviation, the same for both splits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where one dataset's files are and what they hold; label_bytes precede a binary record, the last one is the label."""

    classes: int
    pickle_folder: str
    binary_folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_key: bytes
    label_bytes: int
    samples: tuple[int, int] = (50_000, 10_000)

    @property
    def title(self) -> str:
        return f"CIFAR-{self.classes}"


LAYOUTS = {
    "cifar10": _Layout(
        classes=10,
        pickle_folder="cifar-10-batches-py",
        binary_folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        label_key=b"labels",
        label_bytes=1,
    ),
    "cifar100": _Layout(
        classes=100,
        pickle_folder="cifar-100-python",
        binary_folder="cifar-100-binary",
        train=("train",),
        test=("test",),
        label_key=b"fine_labels",
        label_bytes=2,
    ),
}


def load_cifar(name: str, input_shape: tuple[int, ...], target: Target, split: str, root: Path | None = None) -> Dataset:
    """Read `name` ("cifar10", "cifar100") under `root`, else under the folder named by PARSIM_DATA_DIR. Raises DataError: no
    such files (says which, where, how large), a damaged file, or a model with too few classes."""
    layout = LAYOUTS[name]
    check_images(name, target)
    if target.task != "classify" or target.classes < layout.classes:
        raise DataError(
            f"{name} has {layout.classes} classes of images; the model predicts {target.classes} with task {target.task!r}; "
            f"use a model with num_classes >= {layout.classes}"
        )
    files, binary = _find(layout, name, split, root)
    parts = [_read_binary(path, layout) if binary else _read_pickle(path, layout) for path in files]
    images = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    return Dataset(
        name=name,
        source=f"{layout.title} {split} files in {files[0].parent}, (x/255 - 0.5)/0.25, pixels repeated to the model's size",
        split=split,
        stored=images,
        targets=labels,
        input_shape=input_shape,
        classes=layout.classes,
        scale=SCALE,
        offset=OFFSET,
    )


def _find(layout: _Layout, name: str, split: str, root: Path | None) -> tuple[list[Path], bool]:
    """The files of a split, and whether they are binary records."""
    if root is None and os.environ.get(ROOT_VARIABLE):
        root = Path(os.environ[ROOT_VARIABLE])
    names = layout.train if split == "train" else layout.test
    size = (PIXELS + layout.label_bytes) * layout.samples[0 if split == "train" else 1] // len(names)
    archives = [f"cifar-{layout.classes}-{form}.tar.gz" for form in ("python", "binary")]
    listings = [" .. ".join(dict.fromkeys((f"{names[0]}{suffix}", f"{names[-1]}{suffix}"))) for suffix in ("", ".bin")]
    advice = (
        f"parsim downloads nothing: unpack {archives[0]} (or {archives[1]}) so that "
        f"DIR/{layout.pickle_folder}/ holds {listings[0]} (about {size / 1e6:.0f} MB each), or "
        f"DIR/{layout.binary_folder}/ holds {listings[1]} ({size:,} bytes each), and set {ROOT_VARIABLE}=DIR"
    )
    if root is None:
        raise DataError(f"{name}: no data folder was given; {advice}")
    if not root.is_dir():
        raise DataError(f"{name}: the data folder {root} does not exist; {advice}")
    for folder, suffix in ((layout.pickle_folder, ""), (layout.binary_folder, ".bin")):
        for place in (root / folder, root):
            files = [place / f"{file}{suffix}" for file in names]
            present = [file for file in files if file.is_file()]
            if len(present) == len(files):
                return files, suffix == ".bin"
            if present and place != root:
                missing = next(file for file in files if not file.is_file())
                raise DataError(f"{name}: {missing} is missing although {present[0].name} is there; {advice}")
    packed = [archive for archive in archives if (root / archive).is_file()]
    if packed:
        raise DataError(f"{name}: {root / packed[0]} is still packed; run `tar -xzf {packed[0]}` in {root}")
    raise DataError(f"{name}: no {layout.title} {split} files under {root}; {advice}")


def _read_binary(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    record = PIXELS + layout.label_bytes
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % record:
        raise DataError(
            f"{path} has {len(content):,} bytes, not a multiple of its record of {record:,}: it was cut short; unpack it again"
        )
    rows = content.reshape(-1, record)
    return _checked(path, layout, rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].astype(np.int64))


def _read_pickle(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        content = _DataUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is damaged or not a {layout.title} file ({error}); unpack it again") from error
    if not isinstance(content, dict) or b"data" not in content or layout.label_key not in content:
        raise DataError(f"{path} is not a {layout.title} file: it has no {layout.label_key.decode()!r} beside 'data'")
    data, labels = content[b"data"], content[layout.label_key]
    if not isinstance(data, _PickledBytes) or data.array is None:
        raise DataError(f"{path} is not a {layout.title} file: data must be an array")
    if not isinstance(labels, list) or not all(type(n) is int and abs(n) < 2**31 for n in labels):
        raise DataError(f"{path} is not a {layout.title} file: labels must be a list of integers")
    return _checked(path, layout, data.array, np.array(labels, dtype=np.int64))


def _checked(
    path: Path, layout: _Layout, pixels: NDArray[Any], labels: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or not len(labels):
        raise DataError(
            f"{path}: expected uint8 pixels of shape ({len(labels)}, {PIXELS}), got {pixels.dtype} {pixels.shape}; unpack it "
            "again"
        )
    if labels.min() < 0 or labels.max() >= layout.classes:
        raise DataError(f"{path}: labels must be 0..{layout.classes - 1}, got {labels.min()}..{labels.max()}")
    is_train = path.name.removesuffix(".bin") in layout.train
    expected = layout.samples[0] // len(layout.train) if is_train else layout.samples[1] // len(layout.test)
    if len(labels) != expected:
        raise DataError(f"{path} holds {len(labels):,} samples of {expected:,}: it was cut short; unpack it again")
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32)), labels


_OTHER_OPCODES = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    *(pickle.PERSID, pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
"""What no CIFAR file needs: ways to make objects."""


class _DataUnpickler(pickle._Unpickler):
    """Builds arrays of bytes, texts, numbers, lists and dicts, and refuses every other name: a pickle runs no code through it.
    Nothing of numpy takes part: it believes what a pickle says of a dtype, and a changed byte there reads foreign memory. The
    reader is the one written in Python: that in C takes gigabytes for a changed byte in the number of a memo."""

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _OTHER_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return _PickledBytes
        if (module, name) == ("numpy", "dtype"):
            return _PickledDtype
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise DataError(f"refused to load {module}.{name}: a CIFAR file holds arrays, texts and lists only")


class _PickledDtype:
    """The type of bytes without a sign; any other is refused."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise DataError(f"expected pixels of type u1 (one byte each), got {code!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which a byte does not have."""


class _PickledBytes:
    """An array of bytes as a pickle describes it: `(version, shape, dtype, is_fortran, content)`."""

    def __init__(self) -> None:
        self.array: NDArray[np.uint8] | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), (int(rows), int(columns)), _PickledDtype(), by_columns, bytes() | str() as content):
                raw = content.encode("latin1") if isinstance(content, str) else content
                if rows < 0 or columns != PIXELS or len(raw) != rows * columns:
                    raise DataError(f"its array of shape ({rows}, {columns}) has {len(raw):,} bytes")
                order: Literal["C", "F"] = "F" if by_columns else "C"
                self.array = np.frombuffer(raw, dtype=np.uint8).reshape(rows, columns, order=order)
            case _:
                raise DataError("its array is not one of bytes with two dims")


def _reconstruct(kind: object, *_: object) -> _PickledBytes:
    """An empty array, which the pickle then fills; what numpy's own function does."""
    if kind is not _PickledBytes:
        raise DataError(f"refused to build {kind!r}: only numpy.ndarray is expected")
    return _PickledBytes()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """How Python 3 writes bytes into protocol-2 pickles."""
    if encoding not in ("latin1", b"latin1") or not isinstance(text, str):
        raise DataError(f"refused to encode with {encoding!r}: only texts in latin1 are expected")
    return text.encode("latin1")
