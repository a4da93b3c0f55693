"""Test data sets in common layouts of folders: their splits, held-back images, and missing labels."""

import argparse
import gc
import unicodedata
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest

from drawn import draw, draw_classes, encode, save
from frugalvit.evaluation.images import images_to_evaluate
from frugalvit.training.arguments import DataArguments
from frugalvit.training.data import class_names, default_split, hold_back, load_images, load_splits, split_names
from frugalvit.training.preprocessing import decode_image


# `datasets` does not close metadata.csv, so the garbage collector closes the file with a warning.
LEFT_OPEN = pytest.mark.filterwarnings("ignore:.*metadata.csv:pytest.PytestUnraisableExceptionWarning")
OPTIONS = dict.fromkeys(("split", "limit", "dataset_config", "image_column", "label_column"))


@pytest.fixture(autouse=True)
def garbage_of_its_own(request):
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()


def with_metadata(folder, labels):
    draw(folder, len(labels))
    rows = [f"{index}.png,{label}" for index, label in enumerate(labels)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))


def imagenet(folder):
    """Write images in the folder layout of ImageNet. The test images have no labels."""
    draw_classes(folder / "ILSVRC" / "Data" / "train", 10, ("ant", "cat", "dog"))
    draw_classes(folder / "ILSVRC" / "Data" / "val", 5, start=50)
    draw(folder / "ILSVRC" / "Data" / "test", 4, 100)
    (folder / "ILSVRC" / "Annotations").mkdir()


def all_parts(folder):
    for number, part in enumerate(("Training", "dev", "TEST")):
        draw_classes(folder / part, 10 - 3 * number, start=50 * number)


def metadata_in_parts(folder):
    with_metadata(folder / "train", ["owl", "cat", "dog"] * 4)
    with_metadata(folder / "val", ["dog", "owl"] * 3)


@pytest.mark.parametrize(
    ("layout", "sizes", "split", "names"),
    [
        # The name of an image, such as test_0.png, does not determine the image's split.
        (lambda folder: draw(folder, 20, name="test_{}.png"), (18, 2, None), "train, held back", None),
        (lambda folder: draw_classes(folder, 20), (36, 4, None), "train, held back", ["cat", "dog"]),
        (imagenet, (30, 10, None), "validation", ["ant", "cat", "dog"]),
        # The best epoch is chosen on the validation split and measured on the test split.
        (all_parts, (20, 14, 8), "validation", ["cat", "dog"]),
        pytest.param(metadata_in_parts, (12, 6, None), "validation", ["cat", "dog", "owl"], marks=LEFT_OPEN),
    ],
)
def test_splits_of_folders_are_found_or_held_back(layout, sizes, split, names, tmp_path, capsys):
    layout(tmp_path)
    parts = load_splits(data := DataArguments(dataset=[str(tmp_path)]))
    assert tuple(part and len(part) for part in parts) == sizes and data.evaluated == split
    assert data.tested == (sizes[2] and "test") and ("held back" in split) == ("held back" in capsys.readouterr().out)
    shown = []
    for part in filter(None, parts):
        assert class_names(part) == names
        shown += [np.asarray(decode_image(image, 0))[0, 0, 0] for image in part["image"]]
        if names and layout is not metadata_in_parts and split != "train, held back":
            assert all(Path(record["image"]["path"]).parent.name == names[record["label"]] for record in part)
    assert layout is metadata_in_parts or len(set(shown)) == len(shown)


def write(folder, files):
    """Write the files of a list. `NAME` is an image, `NAME>TARGET` is a link, `NAME.parquet` is a table of images, and
    `NAME.zip=IMAGE,IMAGE` is an archive of images."""
    for name in files.split():
        path, _, target = name.partition(">")
        path, _, packed = path.partition("=")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (folder / path).symlink_to(target)
        elif path.endswith(".parquet"):
            datasets.Dataset.from_dict({"image": [{"bytes": PICTURE, "path": None}] * 9}).to_parquet(folder / path)
        elif packed:
            with zipfile.ZipFile(folder / path, "w") as file:
                for inside in packed.split(","):
                    file.writestr(inside if "." in inside else f"{inside}.png", PICTURE)
        else:
            save(folder / f"{path}.png")


PICTURE = encode(np.zeros((8, 8, 3), np.uint8))
PARTS = {"train": 2, "test": 1}


@pytest.mark.parametrize(
    ("files", "parts", "names", "left_out"),
    [
        ("bus/0 car/0 train/0", {"train": 3}, "bus car train", None),
        ("cat/x/0 cat/1 dog/x/y/0", {"train": 3}, "cat dog", None),
        ("cat/0 dog/0 loose", {"train": 2}, "cat dog", "as they lie beside folders of classes: loose.png"),
        ("train/cat/0 train/cat/1 test/cat/0 extra/0", PARTS, "cat", "train and test: extra"),
        # A class folder may be a link to a folder elsewhere.
        ("cat/0 ../elsewhere/0 dog>../elsewhere", {"train": 2}, "cat dog", None),
        # Folders such as @eaDir and __MACOSX are not classes. Tables and archives next to class folders are left out.
        ("cat/0 dog/0 @eaDir/0 cat/@eaDir/0 .Trash-1/0 __MACOSX/cat/0 lost+found/0", {"train": 2}, "cat dog", None),
        ("cat/0 dog/0 x.parquet y.zip=a.txt", {"train": 2}, "cat dog", "images come first: x.parquet, y.zip (2)"),
        ("p.zip=cat/0,cat/1,dog/0,__MACOSX/cat/._0.png,a.txt", {"train": 3}, "cat dog", None),
        ("train/cafe\u0301/0 train/dog/0 val/caf\u00e9/0", {"train": 2, "validation": 1}, "caf\u00e9 dog", None),
        ("p.zip=train/cat/0,train/cat/1,test/cat/1", PARTS, "cat", None),
    ],
)
def test_class_folders_are_found(files, parts, names, left_out, tmp_path, capsys):
    folder = tmp_path / "photos [2023]"
    write(folder, files)
    for source in [folder, *(folder.glob("*.zip") if files.count(" ") == 0 else ())]:
        loaded = {split: load_images(str(source), split) for split in split_names(str(source))}
        assert {split: len(images) for split, images in loaded.items()} == parts
        for images in loaded.values():
            assert class_names(images) == (names and names.split())
            for record in images:
                assert decode_image(record["image"], 0)
                if names:
                    folders = Path(unicodedata.normalize("NFC", record["image"]["path"])).parts
                    assert class_names(images)[record["label"]] in folders
    printed = capsys.readouterr().err
    assert printed.count("Left out") == (left_out is not None) and (left_out or "") in printed


def test_the_same_share_of_each_class_is_held_back():
    def make_table(labels):
        features = datasets.Features(
            {"number": datasets.Value("int64"), "label": datasets.ClassLabel(num_classes=300)}
        )
        return datasets.Dataset.from_dict({"number": range(len(labels)), "label": labels}, features)

    images = make_table([0] * 500 + [1] * 300 + [2] * 200)
    train, evaluation = hold_back(images)
    assert np.bincount(evaluation["label"]).tolist() == [50, 30, 20]
    assert sorted([*train["number"], *evaluation["number"]]) == list(range(1000))
    assert hold_back(images)[1]["number"][:] == evaluation["number"][:] != sorted(evaluation["number"])
    # Each class keeps a training image, even if the class has only one image or there are many classes.
    for labels in ([0] * 99 + [1], [*range(300)] * 2, [None, -1, 0, 0, 0]):
        train, evaluation = hold_back(make_table(labels))
        assert len(evaluation) == max(len(labels) // 10, 1) and set(train["label"]) >= set(evaluation["label"])
    many = datasets.Dataset.from_dict({"number": range(60_000)})
    assert [len(part) for part in hold_back(many)] == [55_000, 5_000]
    for few in (many.select([0]), make_table([0, 1, 2])):
        with pytest.raises(ValueError, match="too few to evaluate on"):
            hold_back(few)


def test_what_trainings_hold_back_can_be_loaded_again(tmp_path):
    """If a data set has no split for evaluation, `frugalvit compare` uses the images that trainings hold back."""
    draw_classes(tmp_path, 15, ("cat", "dog", "owl"))
    evaluation = load_splits(data := DataArguments(dataset=[str(tmp_path)]))[1]
    arguments = argparse.Namespace(**OPTIONS | {"dataset": [str(tmp_path)], "skip_corrupt": False})
    images, split = images_to_evaluate(arguments, held_back=True)
    assert images["image"][:] == evaluation["image"][:] and split == data.evaluated == "train, held back"
    assert len(images_to_evaluate(arguments)[0]) == 45


def test_labels_of_minus_one_are_none(tmp_path, write_parquet, capsys):
    def write(name, labels):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])})
        images = load_images(write_parquet(count=len(labels))).remove_columns("label")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        images.add_column("label", labels).cast(features).to_parquet(file := str(tmp_path / name))
        return file

    secret, labeled = (
        write("d/test-00000-of-00001.parquet", [-1] * 6),
        write("d/train-00000-of-00001.parquet", [0, 1] * 12),
    )
    some = write("some.parquet", [0, -1, 1, None])
    train, evaluation, _ = load_splits(DataArguments(dataset=[labeled], eval_dataset=[secret]))
    assert "label" in train.features and "label" not in evaluation.features and len(evaluation) == 6
    # Missing labels are an error if training learns from labels. Otherwise, the label column is left out.
    for learned, evaluated, message in (
        (labeled, some, "2 of 4 images of the split 'train' have no label, the first is image 1"),
        (secret, labeled, "has no labels to train with"),
    ):
        with pytest.raises(ValueError, match=message):
            load_splits(DataArguments(dataset=[learned], eval_dataset=[evaluated]), learns_labels=True)
    train, evaluation, _ = load_splits(DataArguments(dataset=[some], eval_dataset=[some]))
    assert "label" not in train.features and "label" not in evaluation.features
    # Training and evaluation choose a split with labels, even if `default_split` returns a split without labels.
    folder = str(tmp_path / "d")
    assert default_split(folder) == "test"
    write("d/validation-00000-of-00001.parquet", [0, 1] * 3)
    load_splits(data := DataArguments(dataset=[folder]))
    assert data.evaluated == "validation" and data.tested is None
    assert images_to_evaluate(argparse.Namespace(**OPTIONS | {"dataset": [folder]}))[1] == "validation"


@LEFT_OPEN
def test_a_folder_with_the_name_of_a_split_may_be_a_data_set(tmp_path):
    with_metadata(tmp_path / "test", ["owl", "cat"])
    assert load_images(str(tmp_path / "test"))["label"][:] == [1, 0]


def test_labels_that_csv_reads_as_one_number_are_refused(tmp_path):
    with_metadata(tmp_path, ["01", "1", "10"])
    with pytest.raises(ValueError, match=r"metadata.csv has '01', which is read as a number"):
        load_images([str(tmp_path)])
