"""Datasets (real digits, CIFAR's own file formats, generated samples) and the order batches are read in."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.data import cifar, load_dataset
from parsim.data.samples import BatchOrder, Dataset, Samples, Target, part, resize
from parsim.data.shards import ShardedOrder, training_order
from parsim.errors import DataError, ParsimError
from parsim.model.inputs import IGNORED

TEN = Target(classes=10)


@st.composite
def orders(draw: st.DrawFn) -> BatchOrder:
    n = draw(st.integers(1, 200))
    return BatchOrder(n=n, global_batch=draw(st.integers(1, n)), seed=draw(st.integers(0, 2**32)))


class TestBatchOrder:
    @given(order=orders(), epoch=st.integers(0, 5))
    def test_an_epoch_reads_every_sample_at_most_once_and_drops_only_the_rest(self, order: BatchOrder, epoch: int) -> None:
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        read = np.concatenate([order.indices(step) for step in steps])
        assert len(set(read.tolist())) == len(read) == order.n // order.global_batch * order.global_batch
        assert read.min() >= 0
        assert read.max() < order.n

    def test_epochs_and_seeds_differ(self) -> None:
        order = BatchOrder(n=100, global_batch=100, seed=1)
        other = BatchOrder(n=100, global_batch=100, seed=2)
        assert not np.array_equal(order.indices(0), order.indices(1))
        assert not np.array_equal(order.indices(0), other.indices(0))
        assert not np.array_equal(order.indices(1), other.indices(0))

    def test_the_order_is_fixed_for_good(self) -> None:
        """A changed stream would silently break the resumption of old checkpoints."""
        assert BatchOrder(n=12, global_batch=6, seed=7).indices(0).tolist() == GOLDEN_ORDER

    @given(dp=st.integers(1, 6), microbatches=st.integers(1, 6), size=st.integers(1, 5))
    def test_parts_tile_the_batch_in_replica_major_order(self, dp: int, microbatches: int, size: int) -> None:
        batch = np.arange(dp * microbatches * size, dtype=np.int64)
        parts = [
            part(batch, replica=replica, dp=dp, microbatch=microbatch, microbatches=microbatches)
            for replica in range(dp)
            for microbatch in range(microbatches)
        ]
        assert all(len(piece) == size for piece in parts)
        assert np.array_equal(np.concatenate(parts), batch)

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: BatchOrder(n=10, global_batch=11), "between 1 and the samples of the dataset (10)"),
            (lambda: BatchOrder(n=10, global_batch=0), "global_batch (0)"),
            (lambda: BatchOrder(n=10, global_batch=2, seed=-1), "seed"),
            (lambda: BatchOrder(n=10, global_batch=2).indices(-1), "counted from 0"),
            (lambda: part(np.arange(10), replica=0, dp=3), "divisible by dp (3) * microbatches (1) = 3"),
            (lambda: part(np.arange(10), replica=2, dp=2), "replica 2 of 2"),
        ],
    )
    def test_bad_input(self, make: object, says: str) -> None:
        with pytest.raises(DataError) as caught:
            make()  # type: ignore[operator]
        assert says in str(caught.value)


GOLDEN_ORDER = [6, 3, 11, 4, 10, 9]


class TestDigits:
    def test_images_are_the_bundled_ones_upsampled_exactly(self) -> None:
        from sklearn.datasets import load_digits

        train = load_dataset("digits", input_shape=(1, 32, 32), target=TEN)
        test = load_dataset("digits", input_shape=(1, 32, 32), target=TEN, split="test")
        assert (len(train), len(test)) == (1500, 297)
        inputs = np.concatenate([train.inputs, test.inputs])
        assert inputs.dtype == np.float32
        assert inputs.shape == (1797, 1, 32, 32)
        small = inputs[:, 0, ::4, ::4]
        assert np.array_equal(np.kron(small, np.ones((4, 4), dtype=np.float32)), inputs[:, 0])
        raw = np.rint((small - train.offset) / train.scale).astype(int).reshape(1797, 64)
        original = load_digits()
        expected = sorted(zip(map(tuple, original.data.astype(int).tolist()), original.target.tolist(), strict=True))
        labels = np.concatenate([train.targets, test.targets]).tolist()
        assert sorted(zip(map(tuple, raw.tolist()), labels, strict=True)) == expected

    def test_the_training_split_is_standardised_and_every_class_is_in_both(self) -> None:
        train, test = (load_dataset("digits", input_shape=(1, 8, 8), target=TEN, split=split) for split in ("train", "test"))
        assert abs(float(train.inputs.mean(dtype=np.float64))) < 1e-6
        assert abs(float(train.inputs.std(dtype=np.float64)) - 1) < 1e-6
        for data in (train, test):
            assert set(data.targets.tolist()) == set(range(10))
            assert data.targets.dtype == np.int64

    @pytest.mark.parametrize("shape", [(1, 32, 32), (3, 32, 32), (3, 224, 224), (1, 7, 5), (64,), (784,), (3072,)])
    def test_any_image_shape(self, shape: tuple[int, ...]) -> None:
        dataset = load_dataset("digits", input_shape=shape, target=TEN)
        inputs, targets = dataset.batch(np.array([5, 3, 3]))
        assert inputs.shape == (3, *shape)
        assert inputs.flags.c_contiguous
        assert np.array_equal(inputs[1], inputs[2])
        assert np.array_equal(targets, dataset.targets[[5, 3, 3]])

    @pytest.mark.parametrize(
        ("shape", "target"),
        [((1, 32, 32), Target(classes=9)), ((16,), Target(task="next_token", classes=50)), ((65,), TEN), ((8, 8), TEN)],
    )
    def test_what_does_not_fit_is_refused(self, shape: tuple[int, ...], target: Target) -> None:
        with pytest.raises(DataError):
            load_dataset("digits", input_shape=shape, target=target)


@given(
    n=st.integers(1, 3),
    stored=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    factor=st.integers(1, 4),
)
@settings(max_examples=50)
def test_resizing_by_a_whole_factor_repeats_every_pixel(n: int, stored: tuple[int, int, int], factor: int) -> None:
    images = np.random.default_rng(0).standard_normal((n, *stored), dtype=np.float32)
    large = resize(images, (stored[0], stored[1] * factor, stored[2] * factor))
    assert np.array_equal(large, images.repeat(factor, axis=2).repeat(factor, axis=3))
    assert np.array_equal(large[:, :, ::factor, ::factor], images)


def test_channels_are_averaged_into_one() -> None:
    images = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    assert np.allclose(resize(images, (1, 2, 2)), images.mean(axis=1, keepdims=True))


def _python2_string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def _python2_batch(pixels: np.ndarray, labels: list[int], label_key: bytes) -> bytes:
    """The bytes Python 2 wrote for {"data": ndarray, label_key: [int], ...}: protocol 2, byte strings, numpy.core names."""
    rows, columns = pixels.shape
    shape = b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _python2_string(b"b") + b"\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\n" + _python2_string(b"u1") + b"K\x00K\x01\x87R(K\x03" + _python2_string(b"|")
    array += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + _python2_string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    content = _python2_string(b"data") + array + _python2_string(label_key) + numbers
    content += _python2_string(b"batch_label") + _python2_string(b"training batch 1 of 5")
    return b"\x80\x02}(" + content + b"u."


def _images(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3072), dtype=np.uint8)


def _write_cifar10(root: Path, layout: str) -> tuple[np.ndarray, list[int]]:
    """Tiny files in the published layout; returns the training pixels and labels."""
    pixels, labels = [], []
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    folder = root / ("cifar-10-batches-bin" if layout == "binary" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    for seed, name in enumerate(names):
        data, classes = _images(4, seed), [(seed + number) % 10 for number in range(4)]
        if layout == "binary":
            records = np.concatenate([np.array(classes, dtype=np.uint8)[:, None], data], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        elif layout == "python2":
            (folder / name).write_bytes(_python2_batch(data, classes, b"labels"))
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": classes}, protocol=int(layout)))
        if name != "test_batch":
            pixels.append(data)
            labels += classes
    return np.concatenate(pixels), labels


def _cifar100(root: Path, content: bytes, file: str = "python/train", *, side: int = 32) -> Dataset:
    """CIFAR-100 from one file of this content."""
    path = root / f"cifar-100-{file}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return load_dataset("cifar100", input_shape=(3, side, side), target=Target(classes=100), root=root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny files are whole: five of 4 samples for CIFAR-10, one of 5 for CIFAR-100."""
    for name, samples in (("cifar10", (20, 4)), ("cifar100", (5, 5))):
        monkeypatch.setitem(cifar.LAYOUTS, name, dataclasses.replace(cifar.LAYOUTS[name], samples=samples))


@pytest.mark.usefixtures("small")
class TestCifar:
    @pytest.mark.parametrize("layout", ["binary", "4"])
    def test_a_file_cut_at_a_record_is_refused(self, tmp_path: Path, layout: str) -> None:
        _write_cifar10(tmp_path, layout)
        path = next(tmp_path.glob("*/data_batch_2*"))
        if layout == "binary":
            path.write_bytes(path.read_bytes()[: 3 * 3073])
        else:
            path.write_bytes(pickle.dumps({b"data": _images(3, 0), b"labels": [1, 2, 3]}))
        with pytest.raises(DataError, match=rf"{path.name} holds 3 samples of 4: it was cut short"):
            load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)

    def test_no_changed_byte_of_what_surrounds_the_pixels_is_believed(self, tmp_path: Path) -> None:
        """Four other values of every byte, dtype and shape included: refused, or as many samples as before."""
        content = pickle.dumps({b"data": _images(5, 1), b"labels": [3, 99, 0, 42, 7]}, protocol=2)
        pixels = content.index(b"data") + 200
        for place in range(pixels):
            for change in (1, 8, 128, 255):
                damaged = bytearray(content)
                damaged[place] ^= change
                with contextlib.suppress(DataError):
                    found = _cifar100(tmp_path, bytes(damaged))
                    assert found.stored.shape == (5, 3, 32, 32)
                    assert found.stored.dtype == np.uint8

    @pytest.mark.parametrize("layout", ["binary", "python2", "2", "4"])
    def test_cifar10_reads_its_published_formats(self, tmp_path: Path, layout: str) -> None:
        pixels, labels = _write_cifar10(tmp_path, layout)
        dataset = load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)
        assert np.array_equal(dataset.stored.reshape(-1, 3072), pixels)
        assert dataset.targets.tolist() == labels
        expected = (pixels.reshape(-1, 3, 32, 32) / 255 - 0.5) / 0.25
        assert np.allclose(dataset.inputs, expected, atol=1e-6)
        assert len(load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path, split="test")) == 4

    @pytest.mark.parametrize("layout", ["binary", "python2"])
    def test_cifar100_takes_the_fine_label(self, tmp_path: Path, layout: str) -> None:
        data, fine = _images(5, 1), [3, 99, 0, 42, 7]
        records = np.concatenate([np.full((5, 1), 11, np.uint8), np.array(fine, np.uint8)[:, None], data], axis=1)
        content = records.tobytes() if layout == "binary" else _python2_batch(data, fine, b"fine_labels")
        dataset = _cifar100(tmp_path, content, "binary/train.bin" if layout == "binary" else "python/train", side=64)
        assert dataset.targets.tolist() == fine
        assert np.array_equal(dataset.stored.reshape(5, 3072), data)
        assert dataset.batch(np.array([0]))[0].shape == (1, 3, 64, 64)

    def test_the_folder_may_come_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _write_cifar10(tmp_path, "binary")
        monkeypatch.setenv("PARSIM_DATA_DIR", str(tmp_path))
        assert len(load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN)) == 20

    def test_a_missing_folder_says_what_to_put_where(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()  # files of the published size
        monkeypatch.delenv("PARSIM_DATA_DIR", raising=False)
        for root in (None, tmp_path, tmp_path / "nowhere"):
            with pytest.raises(DataError) as caught:
                load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=root)
            message = str(caught.value)
            assert "cifar-10-batches-py" in message
            assert "data_batch_1.bin .. data_batch_5.bin (30,730,000 bytes each)" in message
            assert "PARSIM_DATA_DIR=DIR" in message

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        _write_cifar10(tmp_path, "python2")
        (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
        with pytest.raises(DataError, match="data_batch_3 is missing"):
            load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)

    def test_a_packed_archive_is_recognised(self, tmp_path: Path) -> None:
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
        with pytest.raises(DataError, match=r"tar -xzf cifar-10-python\.tar\.gz"):
            load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)

    @pytest.mark.parametrize("layout", ["binary", "python2", "4"])
    @pytest.mark.parametrize("keep", [0, 1, 100, 3000, -1])
    def test_a_file_cut_short_is_refused(self, tmp_path: Path, layout: str, keep: int) -> None:
        _write_cifar10(tmp_path, layout)
        path = next(tmp_path.glob("*/data_batch_2*"))
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=path.name):
            load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)

    def test_a_pickle_cannot_run_code(self, tmp_path: Path) -> None:
        class Attack:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return (print, ("code ran",))

        import os

        for content in (
            pickle.dumps({b"data": Attack(), b"labels": []}),
            pickle.dumps({b"data": os.system, b"labels": []}),
            b"cos\nsystem\n(S'touch ran'\ntR.",
            b"cbuiltins\neval\n(S'1'\ntR.",
        ):
            with pytest.raises(DataError, match="refused to load"):
                _cifar100(tmp_path, content)

    def test_labels_out_of_range_are_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir()
        for name in [f"data_batch_{number}" for number in range(1, 6)]:
            (folder / name).write_bytes(_python2_batch(_images(2, 0), [1, 10], b"labels"))
        with pytest.raises(DataError, match=r"labels must be 0\.\.9, got 1\.\.10"):
            load_dataset("cifar10", input_shape=(3, 32, 32), target=TEN, root=tmp_path)

    def test_a_model_with_too_few_classes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="num_classes >= 100"):
            load_dataset("cifar100", input_shape=(3, 32, 32), target=TEN, root=tmp_path)


class TestSynthetic:
    @pytest.mark.parametrize("shape", [(3, 32, 32), (1, 5, 7), (3, 224, 224), (64,), (10,)])
    def test_images_have_the_shape_and_unit_size(self, shape: tuple[int, ...]) -> None:
        dataset = load_dataset("synthetic", input_shape=shape, target=TEN, samples=200)
        inputs, targets = dataset.batch(np.arange(200))
        assert inputs.shape == (200, *shape)
        assert abs(float(inputs.std()) - 1) < 0.15
        assert set(targets.tolist()) <= set(range(10))

    def test_a_nearest_mean_classifier_learns_it(self) -> None:
        """Class means differ by 2 * 768 in squared distance under unit noise: separable almost surely."""
        train = load_dataset("synthetic", input_shape=(3, 16, 16), target=TEN, samples=500)
        test = load_dataset("synthetic", input_shape=(3, 16, 16), target=TEN, samples=200, split="test")
        flat = train.inputs.reshape(500, -1)
        means = np.stack([flat[train.targets == number].mean(axis=0) for number in range(10)])
        distance = ((test.inputs.reshape(200, 1, -1) - means) ** 2).sum(axis=2)
        assert float((distance.argmin(axis=1) == test.targets).mean()) > 0.99

    def test_the_same_seed_gives_the_same_and_another_another(self) -> None:
        def load(seed: int, split: str = "train") -> Dataset:
            return load_dataset("synthetic", input_shape=(8,), target=TEN, samples=20, seed=seed, split=split)

        assert np.array_equal(load(1).inputs, load(1).inputs)
        assert not np.array_equal(load(1).inputs, load(2).inputs)
        assert not np.array_equal(load(1).inputs, load(1, "test").inputs)

    def test_next_token_targets_are_the_inputs_shifted(self) -> None:
        dataset = load_dataset("synthetic", input_shape=(16,), target=Target(task="next_token", classes=50), samples=100)
        inputs, targets = dataset.batch(np.arange(100))
        assert inputs.shape == targets.shape == (100, 16)
        assert inputs.dtype == targets.dtype == np.int64
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.min() >= 0
        assert max(inputs.max(), targets.max()) < 50

    def test_the_next_token_can_be_predicted_nine_times_of_ten(self) -> None:
        dataset = load_dataset("synthetic", input_shape=(64,), target=Target(task="next_token", classes=20), samples=500)
        pairs = np.zeros((20, 20), dtype=np.int64)
        np.add.at(pairs, (dataset.inputs.ravel(), dataset.targets.ravel()), 1)
        assert abs(pairs.max(axis=1).sum() / pairs.sum() - (0.9 + 0.1 / 20)) < 0.01

    def test_masked_targets_hold_exactly_what_was_hidden(self) -> None:
        target = Target(task="masked_token", classes=50)
        dataset = load_dataset("synthetic", input_shape=(32,), target=target, samples=300)
        inputs, targets = dataset.batch(np.arange(300))
        hidden = inputs == 49
        assert np.array_equal(hidden, targets != IGNORED)
        assert hidden.any(axis=1).all()
        assert abs(hidden.mean() - 0.15) < 0.02
        assert set(targets[hidden].tolist()) <= set(range(49))

    @pytest.mark.parametrize(
        ("shape", "target"),
        [((4, 4), TEN), ((), TEN), ((3, 0, 4), TEN), ((3, 4, 4), Target(task="next_token", classes=5))],
    )
    def test_impossible_shapes_are_refused(self, shape: tuple[int, ...], target: Target) -> None:
        with pytest.raises(DataError):
            load_dataset("synthetic", input_shape=shape, target=target)


def test_unknown_names_come_with_near_matches() -> None:
    with pytest.raises(ParsimError, match="did you mean cifar10"):
        load_dataset("cifar1O", input_shape=(3, 32, 32), target=TEN)
    with pytest.raises(DataError, match="known: train, validation, test"):
        load_dataset("digits", input_shape=(1, 8, 8), target=TEN, split="valid")
    with pytest.raises(DataError, match="known: classify"):
        Target(task="regress")


def test_reading_data_needs_no_torch() -> None:
    code = (
        "import sys; from parsim.data import *; "
        "load_dataset('synthetic', input_shape=(8,), target=Target(classes=4)); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def digits() -> Samples:
    return load_dataset("digits", input_shape=(1, 8, 8), target=TEN)


def dealt_by_parity(targets: np.ndarray, replicas: int, seed: int) -> list[np.ndarray]:
    """A sharding of one's own: sample number modulo replicas."""
    return [np.arange(replica, len(targets), replicas) for replica in range(replicas)]


def dealt_twice(targets: np.ndarray, replicas: int, seed: int) -> list[np.ndarray]:
    return [np.arange(len(targets))] * replicas


def dealt_between_samples(targets: np.ndarray, replicas: int, seed: int) -> list[np.ndarray]:
    return [np.arange(replica, len(targets), replicas) + 0.25 for replica in range(replicas)]


def dealt_by_other_arguments(labels: np.ndarray) -> list[np.ndarray]:
    return [labels]


SHARDS = ("iid", "label_sorted", "dirichlet:0.3", "sizes:900,500,60,40", f"{__name__}:dealt_by_parity")


@pytest.mark.parametrize("shards", SHARDS)
def test_every_replica_passes_over_its_own_shard(shards: str) -> None:
    """Its part of the batches of a pass is its whole shard, each sample once; the next pass has another order."""
    data = digits()
    order = training_order(data, 16, 3, shards=shards, replicas=4)
    assert isinstance(order, ShardedOrder)
    assert order.steps_per_epoch == len(data) // 16
    assert sorted(np.concatenate(order.shards).tolist()) == list(range(len(data)))
    steps = 2 * max(map(len, order.shards)) // 4 + 1
    batches = np.array([order.indices(step) for step in range(steps)])
    for replica, shard in enumerate(order.shards):
        read = np.concatenate([part(batch, replica=replica, dp=4) for batch in batches])
        first, second = read[: len(shard)], read[len(shard) : 2 * len(shard)]
        assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(shard.tolist())
        assert first.tolist() != second.tolist()
    again = training_order(data, 16, 3, shards=shards, replicas=4)
    assert np.array_equal(again.indices(7), order.indices(7))


@pytest.mark.parametrize(
    ("shards", "replicas", "words"),
    [
        ("sizes:900,400", 2, r"2 sizes that sum to 1300, and 2 replicas share 1500 samples"),
        ("sizes:900,600", 4, r"one size per replica"),
        ("iid", 2000, r"2000 replicas cannot share 1500 samples"),
        (f"{__name__}:dealt_twice", 2, r"3000 numbers over all shards are not each of the 1500 samples once"),
        (f"{__name__}:dealt_between_samples", 2, r"1500 numbers over all shards are not each of the 1500 samples once"),
        (f"{__name__}:dealt_by_other_arguments", 2, r"raised TypeError: .*; it is called with \(targets, replicas, seed\)"),
    ],
)
def test_shards_that_do_not_hold_every_sample_once_are_refused(shards: str, replicas: int, words: str) -> None:
    with pytest.raises(ParsimError, match=words):
        training_order(digits(), replicas, 0, shards=shards, replicas=replicas)
