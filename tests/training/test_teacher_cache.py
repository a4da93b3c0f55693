"""The cache of a teacher's embeddings, in bootstrapping."""

import json

import datasets
import numpy as np
import pytest
from accelerate.state import AcceleratorState

from frugalvit.modeling.hosts import Anatomy
from frugalvit.training import bootstrap
from frugalvit.training.components.teacher_cache import fingerprint_images


SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"


@pytest.fixture
def asked(monkeypatch):
    """Sizes of the training batches that the teacher was asked about; those of evaluation have 64 images."""
    sizes, embed = [], Anatomy.embed

    def note(anatomy, pixel_values):
        # Not those of two images, with which the reading is checked.
        sizes.extend([len(pixel_values)] * (len(pixel_values) not in (2, 64)))
        return embed(anatomy, pixel_values)

    monkeypatch.setattr(Anatomy, "embed", note)
    return sizes


def run(teacher, output_dir, *arguments, epochs=2):
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(output_dir), "--epochs", str(epochs)),
            *("--train-split", "train[:128]", "--eval-split", "test[:64]", "--eval-batch-size", "64"),
            *("--recipe", "paper", "--batch-size", "32", "--config-overrides", SMALL, "--no-compare", *arguments),
        ]
    )
    AcceleratorState._reset_state(True)
    return [epoch["train_loss"] for epoch in json.loads((output_dir / "results.json").read_text())["epochs"]]


def test_a_second_run_asks_no_teacher_and_has_the_same_losses(teacher, tmp_path, asked):
    cache = ("--teacher-cache", str(tmp_path / "cache"))
    without = run(teacher, tmp_path / "without")
    first = run(teacher, tmp_path / "first", *cache)
    assert asked == [32] * 16
    asked.clear()
    assert run(teacher, tmp_path / "second", *cache) == first == without
    assert asked == []
    # Another student, at other pixels and with another learning rate, sees the same parts of the images.
    run(teacher, tmp_path / "other", *cache, "--image-size", "48", "--learning-rate", "1e-3")
    assert asked == []
    # Epochs beyond the known ones are embedded.
    run(teacher, tmp_path / "longer", *cache, epochs=3)
    assert asked == [32] * 4


def test_what_is_damaged_or_missing_is_embedded_again(teacher, tmp_path, asked):
    cache = tmp_path / "cache"
    expected = run(teacher, tmp_path / "first", "--teacher-cache", str(cache), epochs=1)
    asked.clear()
    embeddings = np.load(cache / "epoch-00000-embeddings.npy", mmap_mode="r+")
    whole = embeddings.copy()
    embeddings[17, 30:] = 0
    embeddings.flush()
    assert run(teacher, tmp_path / "second", "--teacher-cache", str(cache), epochs=1) == expected
    assert asked == [32]
    assert (np.load(cache / "epoch-00000-embeddings.npy") == whole).all()
    (cache / "epoch-00000-checksums.npy").unlink()
    assert run(teacher, tmp_path / "third", "--teacher-cache", str(cache), epochs=1) == expected
    assert asked == [32] * 5


def test_files_are_the_same_wherever_they_were_unpacked(tmp_path):
    """But others are others, and so is a choice of them."""

    def images(folder, names):
        paths = [str(tmp_path / folder / name) for name in names]
        return datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image(decode=False))

    names = ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert fingerprint_images(images("a", names)) == fingerprint_images(images("b", names))
    others = [images("a", names[::-1]), images("a", names).select([0, 1])]
    assert len({fingerprint_images(each) for each in (images("a", names), *others)}) == 3


def test_views_that_come_again_are_embedded_once(teacher, tmp_path, asked):
    cache = ("--teacher-cache", str(tmp_path / "cache"))
    losses = run(teacher, tmp_path / "again", *cache, "--view-epochs", "1", epochs=3)
    assert asked == [32] * 4
    assert losses == run(teacher, tmp_path / "uncached", "--view-epochs", "1", epochs=3)
    assert losses[1:] != run(teacher, tmp_path / "fresh", epochs=3)[1:]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seed", "1"], "embeddings for other seed; give another folder"),
        (["--flip", "0"], "embeddings for other views"),
        (["--mixed-precision", "bf16"], "embeddings for other precision"),
        (["--token-loss-weight", "1"], "keeps no tokens"),
        (["--streaming", "--steps-per-epoch", "2", "--train-split", "train"], "a stream has none"),
    ],
)
def test_a_cache_of_something_else_is_refused(arguments, message, teacher, tmp_path, capsys):
    cache = ("--teacher-cache", str(tmp_path / "cache"))
    run(teacher, tmp_path / "first", *cache, epochs=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    with pytest.raises((ValueError, SystemExit)) as stopped:
        run(teacher, tmp_path / "second", *cache, *arguments, epochs=1)
    assert message in str(stopped.value) + capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before


def test_a_folder_of_something_else_is_refused(teacher, tmp_path):
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ValueError, match="holds something else"):
        run(teacher, tmp_path / "out", "--teacher-cache", str(tmp_path))
