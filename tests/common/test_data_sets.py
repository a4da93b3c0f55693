"""Folders and files as people have them: their parts found, some images held back, labels that are none."""

import argparse
import gc
import os
import re
import shutil
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from drawn import draw, draw_classes, encode, save
from frugalvit.common.data import load_images, load_table, split_names
from frugalvit.common.decoding import decode_image
from frugalvit.common.folders import find_parts
from frugalvit.common.image_files import find_files, find_images
from frugalvit.common.labels import class_names, label_numbers
from frugalvit.common.masks import load_masked_images, load_masked_splits
from frugalvit.common.splits import default_split, hold_back, load_splits
from frugalvit.evaluation.images import images_to_evaluate
from frugalvit.training.components.arguments import DataArguments
from frugalvit.training.segment import MaskedImageArguments


# `datasets` leaves the files open that it looks into for their columns; they are closed, with a warning, as garbage.
LEFT_OPEN = pytest.mark.filterwarnings("ignore:.*metadata.csv:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def garbage_of_its_own(request):
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()


def write_metadata(folder: Path, count: int, **columns):
    names = ",".join(["file_name", *columns])
    rows = [",".join([f"{index}.png", *(str(values[index]) for values in columns.values())]) for index in range(count)]
    (folder / "metadata.csv").write_text("\n".join([names, *rows]) + "\n")


def flat(folder):
    # Names of files say nothing, whatever they are.
    draw(folder, 10)
    draw(folder, 10, 10, "image_test_{}.png")


def classes(folder):
    draw_classes(folder, 20)


def imagenet(folder):
    """Make a folder as ImageNet's, whose test images have no labels."""
    draw_classes(folder / "train", 10)
    draw_classes(folder / "val", 5, start=50)
    draw(folder / "test", 4, 100)
    (folder / "devkit").mkdir()


def imagenet_as_extracted(folder):
    draw_classes(folder / "ILSVRC" / "train", 10)
    draw(folder / "ILSVRC" / "val", 5, 50)


def validation(folder):
    draw_classes(folder / "train", 10)
    draw_classes(folder / "validation", 5, start=50)


def fewer_classes(folder):
    draw_classes(folder / "train", 10, ("ant", "cat", "dog"))
    draw_classes(folder / "val", 5, ("cat", "dog"), start=50)


def validation_and_test(folder):
    validation(folder)
    draw_classes(folder / "test", 4, start=100)


def flat_parts(folder):
    draw(folder / "train2017", 10)
    draw(folder / "val2017", 5, 50)


def metadata(folder):
    draw(folder, 20)
    write_metadata(folder, 20, label=["dog", "cat"] * 10)


def metadata_in_parts(folder):
    for part, labels in (("train", ["owl", "cat", "dog"] * 4), ("val", ["dog", "owl"] * 3)):
        draw(folder / part, len(labels))
        write_metadata(folder / part, len(labels), label=labels)


def parquet(folder, parts=("train",)):
    draw_classes(folder / "images", 10)
    images = datasets.load_dataset("imagefolder", data_dir=str(folder / "images"), split="train")
    (folder / "table").mkdir()
    for part in parts:
        images.to_parquet(folder / "table" / f"{part}-00000-of-00001.parquet")
    return folder / "table"


def parquet_with_test(folder):
    return parquet(folder, ("train", "test"))


@pytest.mark.parametrize(
    ("layout", "trained", "evaluated", "split", "names"),
    [
        (flat, 18, 2, "train, held back", None),
        (classes, 36, 4, "train, held back", ["cat", "dog"]),
        (imagenet, 20, 10, "validation", ["cat", "dog"]),
        (imagenet_as_extracted, 20, 5, "validation", ["cat", "dog"]),
        (fewer_classes, 30, 10, "validation", ["ant", "cat", "dog"]),
        (validation_and_test, 20, 10, "validation", ["cat", "dog"]),
        (flat_parts, 10, 5, "validation", None),
        pytest.param(metadata, 18, 2, "train, held back", ["cat", "dog"], marks=LEFT_OPEN),
        pytest.param(metadata_in_parts, 12, 6, "validation", ["cat", "dog", "owl"], marks=LEFT_OPEN),
        (parquet, 18, 2, "train, held back", ["cat", "dog"]),
        (parquet_with_test, 20, 20, "test", ["cat", "dog"]),
    ],
)
def test_what_people_have(layout, trained, evaluated, split, names, tmp_path, capsys):
    folder = str(layout(tmp_path) or tmp_path)
    data = DataArguments(dataset=[folder])
    train, evaluation, test = load_splits(data)
    assert (len(train), len(evaluation), data.evaluated) == (trained, evaluated, split)
    # Where there are both, the best epoch is chosen on the one and tested on the other.
    assert (test and len(test), data.tested) == ((8, "test") if layout is validation_and_test else (None, None))
    assert class_names(train) == names
    assert ("held back" in split) == ("are held back" in capsys.readouterr().out)
    if "label" in evaluation.features:
        assert class_names(evaluation) == names
        counts = np.bincount(label_numbers(evaluation))
        assert len(set(counts[counts > 0])) == 1
    if layout in (classes, imagenet, validation_and_test):
        # An image lies in the folder of its class.
        for images in (train, evaluation):
            for record in images:
                assert Path(record["image"]["path"]).parent.name == names[record["label"]]
    shown = [{number(images, index) for index in range(len(images))} for images in (train, evaluation)]
    assert layout in (parquet_with_test, metadata_in_parts) or not shown[0] & shown[1]


def number(images, index):
    return np.asarray(decode_image(images[index]["image"], index))[0, 0, 0]


def test_parts_are_folders_with_their_names(tmp_path):
    for name in ("train", "val", "Test_2"):
        draw(tmp_path / "a[b]*" / "data" / name, 2)
    parts = find_parts(tmp_path / "a[b]*")
    assert {split: [Path(path).name for path in paths] for split, paths in parts.items()} == {
        "train": ["train"],
        "validation": ["val"],
        "test": ["Test_2"],
    }
    assert len(load_images(str(tmp_path / "a[b]*"), "train+validation")) == 4
    with pytest.raises(ValueError, match=r"Cannot load the split 'val' of .*: it has train, validation, test\."):
        load_images(str(tmp_path / "a[b]*"), "val")
    imagenet(tmp_path / "imagenet")
    with pytest.raises(ValueError, match="only some of these parts have classes"):
        load_images(str(tmp_path / "imagenet"), "train+test")
    flat_parts(tmp_path / "flat")
    write_metadata(tmp_path / "flat", 2, label=[0, 1])
    with pytest.raises(ValueError, match="metadata.csv is beside the parts train2017, val2017"):
        find_parts(tmp_path / "flat")


def test_the_same_share_of_each_class_is_held_back(write_parquet):
    labels = [0] * 500 + [1] * 300 + [2] * 199 + [3]
    features = datasets.Features({"number": datasets.Value("int64"), "label": datasets.ClassLabel(num_classes=4)})
    images = datasets.Dataset.from_dict({"number": range(1000), "label": labels}, features)
    train, evaluation = hold_back(images)
    assert np.bincount(evaluation["label"]).tolist() in ([50, 30, 19], [49, 30, 20], [50, 29, 20])
    assert sorted([*train["number"], *evaluation["number"]]) == list(range(1000))
    # At random, but in every run alike.
    gaps = np.diff(evaluation["number"])
    assert len(set(gaps)) > 10 and hold_back(images)[1]["number"][:] == evaluation["number"][:]
    many = datasets.Dataset.from_dict({"number": range(60_000)})
    assert [len(part) for part in hold_back(many)] == [55_000, 5_000]
    for few in (many.select([0]), images.select([0, 500, 999])):
        with pytest.raises(ValueError, match="too few .* --eval-split none"):
            hold_back(few)


def test_evaluated_classes_are_trained(tmp_path, capsys):
    names = [f"class-{index}" for index in range(10)]
    draw_classes(tmp_path / "images", 5, names)
    sorted_by_class = {"train_split": "train[:80%]", "eval_split": "train[80%:]"}
    data = DataArguments(dataset=[str(tmp_path / "images")], **sorted_by_class)
    message = r"none of 2 classes that are evaluated: class-8, class-9 \(2\)"
    with pytest.raises(ValueError, match=rf"\(train\[:80%\]\) there are {message}.*sorted by class"):
        load_splits(data, learns_labels=True)
    # What is learned without labels is evaluated on any.
    train, evaluation, _ = load_splits(data)
    assert (len(train), len(evaluation)) == (40, 10) and "none of 2 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 5}, "--limit 5 is the beginning of images that are sorted by class, 5 images of cat (1) of 2"),
        ({"split": "train[:25%]"}, "train[:25%] is the beginning of images that are sorted by class, 5 images of cat"),
        ({"limit": 15}, None),
        ({}, None),
    ],
)
def test_the_first_images_of_class_folders_are_no_sample(options, said, tmp_path, capsys):
    draw_classes(tmp_path, 10)
    arguments = dict.fromkeys(("split", "limit", "dataset_config", "image_column", "label_column")) | options
    images_to_evaluate(argparse.Namespace(dataset=[str(tmp_path)], **arguments))
    printed = capsys.readouterr().err
    assert printed.startswith(f"Note: {said}") if said else not printed


def test_labels_of_minus_one_are_none(tmp_path, write_parquet, capsys):
    def write(name, labels, folder="unlabeled"):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])})
        images = load_images(write_parquet(count=len(labels))).remove_columns("label")
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / f"{name}-00000-of-00001.parquet"
        images.add_column("label", labels).cast(features).to_parquet(file)
        return str(file)

    secret = write("test", [-1] * 6)
    labeled, some = write("train", [0, 1] * 12), write("some", [0, -1, 1, None], "other")
    data = DataArguments(dataset=[labeled], eval_dataset=[secret])
    train, evaluation, _ = load_splits(data)
    assert "label" in train.features and "label" not in evaluation.features and len(evaluation) == 6
    assert "The images of the split 'train' have no labels" in capsys.readouterr().out
    # Some are a mistake where they are to be learned from, and otherwise as good as none.
    for learned, evaluated, message in (
        (labeled, some, "Image 1 of the split 'train' has no label, as 1 others of 4; choose another"),
        (secret, labeled, "Image 0 of the split 'train' has no label, as 5 others of 6"),
    ):
        with pytest.raises(ValueError, match=message):
            load_splits(DataArguments(dataset=[learned], eval_dataset=[evaluated]), learns_labels=True)
    train, evaluation, _ = load_splits(DataArguments(dataset=[some], eval_dataset=[some]))
    assert "label" not in train.features and "label" not in evaluation.features
    # By default the labels count: of two splits, the one that has them.
    assert default_split(str(tmp_path / "unlabeled")) == "test"
    write("validation", [0, 1] * 3)
    load_splits(data := DataArguments(dataset=[str(tmp_path / "unlabeled")]))
    assert data.evaluated == "validation"
    arguments = {"dataset": [str(tmp_path / "unlabeled")], "split": None, "limit": None}
    options = dict.fromkeys(("dataset_config", "image_column", "label_column"))
    assert images_to_evaluate(argparse.Namespace(**arguments, **options))[1] == "validation"


@LEFT_OPEN
def test_labels_that_are_texts(tmp_path):
    draw(tmp_path, 4)
    write_metadata(tmp_path, 4, label=["b", "a", "c", "a"], kind=["x", "y", "x", "y"])
    assert load_images(str(tmp_path))["label"][:] == [1, 0, 2, 0]
    images = load_images(str(tmp_path), label_column="kind")
    assert class_names(images) == ["x", "y"] and images["label"][:] == [0, 1, 0, 1]
    assert load_images(str(tmp_path), class_names=["c", "b", "a"])["label"][:] == [1, 2, 0, 2]
    with pytest.raises(ValueError, match=r"c \(1\) .* a, b \(2\)"):
        load_images(str(tmp_path), class_names=["a", "b"])


def test_masks_are_held_back(tmp_path):
    draw(tmp_path / "images", 20)
    draw(tmp_path / "masks", 20)
    data = MaskedImageArguments(dataset=[str(tmp_path)])
    assert tuple(map(len, load_masked_splits(data)[:2])) == (18, 2) and data.evaluated == "train, held back"
    data = MaskedImageArguments(dataset=[str(tmp_path)], eval_split="none")
    assert load_masked_splits(data)[1] is None and data.evaluated is None


def test_nothing_is_held_back_from_a_stream(write_parquet):
    with pytest.raises(ValueError, match=r"from a stream. Give --eval-split \(of train\)"):
        load_splits(DataArguments(dataset=[write_parquet()], streaming=True, steps_per_epoch=1))


def images_in(folder, **counts):
    for path, count in counts.items():
        draw(folder / path.replace("__", "/"), count)


def class_link(folder):
    images_in(folder.parent, elsewhere=2)
    images_in(folder, cat=2)
    (folder / "dog").symlink_to("../elsewhere")


def circle(folder):
    images_in(folder, cat=2, dog=2)
    (folder / "dog" / "again").symlink_to(folder)


def called_like_parts(folder):
    images_in(folder, cat=1, dog=1)
    for name in ("train_1", "test-2", "validation", "x.test"):
        Image.new("RGB", (8, 8)).save(folder / "cat" / f"{name}.png")


@pytest.mark.parametrize(
    ("name", "make", "parts", "left_out"),
    [
        ("photos", lambda f: images_in(f, bus=2, car=2, train=2), {"train": (6, ["bus", "car", "train"])}, None),
        ("photos [2023]", lambda f: images_in(f, cat=2, dog=2), {"train": (4, ["cat", "dog"])}, None),
        ("photos", called_like_parts, {"train": (6, ["cat", "dog"])}, None),
        ("photos", class_link, {"train": (4, ["cat", "dog"])}, None),
        ("photos", circle, {"train": (4, ["cat", "dog"])}, None),
        ("photos", lambda f: images_in(f, cat__x=2, dog__x=2), {"train": (4, ["cat", "dog"])}, None),
        (
            "photos",
            lambda f: images_in(f, train__cat=2, test__cat=1, extra=3),
            {"train": (2, ["cat"]), "test": (1, ["cat"])},
            "Left out, as train and test are parts of|Left out, as test and train are parts of",
        ),
        (
            "photos",
            lambda f: (images_in(f, cat=2, dog=2), Image.new("RGB", (8, 8)).save(f / "loose.png")),
            {"train": (4, ["cat", "dog"])},
            "Left out, as they lie beside the folders of classes: loose.png",
        ),
    ],
)
def test_class_folders_are_class_folders(name, make, parts, left_out, tmp_path, capsys):
    folder = tmp_path / name
    folder.mkdir()
    make(folder)
    found = {}
    for split in split_names(str(folder)):
        images = load_images(str(folder), split)
        found[split] = (len(images), images.features["label"].names)
        decode_image(images[len(images) - 1]["image"], 0)
    assert found == parts
    printed = capsys.readouterr().err
    assert re.search(left_out, printed) if left_out else "Left out" not in printed


@pytest.mark.parametrize(
    ("folders", "parts", "flat"),
    [
        # Words after the name of a part count where nothing else holds images.
        ("train freight, train passenger, bus, car", {"train": 4}, False),
        ("train, train freight, bus", {"train": 3}, False),
        ("train-engine, Test_tube", {"train": 1, "test": 1}, True),
        ("validation stamp, test card", {"train": 2}, False),
        ("val d'isere, devon, evaluator, trainer", {"train": 4}, False),
        ("train_images, test_images", {"train": 1, "test": 1}, True),
        ("train_part_a/cat, train_part_b/cat", {"train": 1}, False),
        # Years and numbers always do.
        ("train2017, val2017, extra", {"train": 1, "validation": 1}, True),
        ("Train 1, TEST-2, extra", {"train": 1, "test": 1}, True),
        ("data/train/cat, data/train/dog, data/dev_2/cat", {"train": 2, "validation": 1}, False),
    ],
)
def test_words_that_name_a_split(folders, parts, flat, tmp_path):
    for name in folders.split(", "):
        save(tmp_path / name / "0.png")
        save(tmp_path / name / "1.png")
    found = {}
    for split in split_names(str(tmp_path)):
        images = load_images(str(tmp_path), split)
        assert flat == ("label" not in images.features)
        found[split] = len(images) // 2 if flat else len(set(images["label"]))
    assert found == parts


OF_MACHINES = (
    *("@eaDir/0.png", "cat/@eaDir/0.png", "#recycle/cat", "#snapshot/2024/cat", "@Recycle", "@Recently-Snapshot/cat"),
    *("$RECYCLE.BIN/S-1-5", "System Volume Information", "lost+found", "__MACOSX/cat", ".ipynb_checkpoints"),
    *("cat/.thumbnails", ".Trash-1000/files", ".git/x", "Photos Previews.lrdata/1"),
)


@pytest.mark.parametrize("metadata", [False, pytest.param(True, marks=LEFT_OPEN)])
def test_folders_that_machines_make_hold_no_images(metadata, tmp_path):
    for name in ("cat", "dog"):
        save(tmp_path / "d" / name / "0.png")
    for kind in ("images", "masks"):
        shutil.copytree(tmp_path / "d" / "cat", tmp_path / "m" / kind)
    for folder in OF_MACHINES:
        save(tmp_path / "d" / folder / "thumbnail.jpg")
        (tmp_path / "d" / folder / "x.parquet").write_text("")
        save(tmp_path / "m" / "images" / folder / "0.jpg")
    if metadata:
        (tmp_path / "d" / "metadata.csv").write_text("file_name,label\ncat/0.png,a\ndog/0.png,b\n")
    images = load_images(str(tmp_path / "d"))
    assert class_names(images) == (["a", "b"] if metadata else ["cat", "dog"]) and len(images) == 2
    assert len(find_images([str(tmp_path / "d")])) == 2
    assert len(load_masked_images(str(tmp_path / "m"), "train")) == 1


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["fox/IMG_1.HEIC", "fox/IMG_2.heic"], r"2 \.heic in .*fox.*frugalvit.pictures"),
        (["cat/a.CR2", "dog/b.nef"], r"1 \.cr2, 1 \.nef in .*: convert them to JPEG or TIFF"),
        (["cat/a.svg", "dog/a.eps"], r"1 \.eps, 1 \.svg in .*: convert them to PNG"),
        (["cat/a.avif"], None),
        (["cat/a.txt", "Thumbs.db", "cat/.a.heic", "@eaDir/a.heic"], None),
    ],
)
def test_pictures_that_are_not_read_are_said_once(names, said, tmp_path, capsys):
    draw_classes(tmp_path, 2)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name.endswith("avif"):
            save(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic" + bytes(64))
    train, evaluation, _ = load_splits(DataArguments(dataset=[str(tmp_path)]))
    printed = capsys.readouterr().err
    assert printed.count("they are not read") == (said is not None) and re.search(said or "", printed)
    assert len(train) + len(evaluation) == 4 + names[0].endswith("avif")
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert len(find_images([str(tmp_path / "copy")])) == len(train) + len(evaluation)
    assert re.search(said or "^$", capsys.readouterr().err)


def test_a_folder_that_may_not_be_looked_into_is_no_empty_one(tmp_path, monkeypatch):
    """The folder's images would be missing without a word."""
    draw_classes(tmp_path, 2)
    (tmp_path / "cat" / "deeper").mkdir(exist_ok=True, parents=True)
    scandir, closed = os.scandir, str((tmp_path / "cat" / "deeper").resolve())

    def refusing(path="."):
        if os.path.realpath(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="Permission denied"):
        find_images([str(tmp_path)])


def table(**columns):
    return lambda path: datasets.Dataset.from_dict(columns).to_parquet(path)


def pictures(count):
    return table(image=[{"bytes": encode(np.zeros((8, 8, 3), np.uint8)), "path": None}] * count)


def archive(*names):
    def write(path):
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, encode(np.zeros((8, 8, 3), np.uint8)))

    return write


CLASSES = ["cat/0.png", "cat/1.png", "dog/0.png"]
NOTHING = "nothing is left out"


@pytest.mark.parametrize(
    ("images", "files", "parts", "names", "left_out"),
    [
        (CLASSES, {"cat/statistics.parquet": table(path=["a"] * 9)}, {"train": 3}, ["cat", "dog"], "statistics"),
        (CLASSES, {"thumbnails.parquet": pictures(2)}, {"train": 3}, ["cat", "dog"], "thumbnails.parquet"),
        (CLASSES, {"x.parquet": Path.touch, "y.zip": Path.touch}, {"train": 3}, ["cat", "dog"], "x.parquet, y.zip"),
        (CLASSES, {"photos.zip": archive(*CLASSES)}, {"train": 3}, ["cat", "dog"], "photos.zip"),
        (["assets/logo.png"], {"data/train-00000-of-00001.parquet": pictures(5)}, {"train": 5}, None, "logo.png"),
        ([], {"train.parquet": pictures(2), "about.parquet": table(a=[1])}, {"train": 2}, None, "about.parquet"),
        (
            [],
            {"photos.zip": archive(*CLASSES, "__MACOSX/cat/._0.png", "a")},
            {"train": 3},
            ["cat", "dog"],
            NOTHING,
        ),
        ([], {"photos.zip": archive("0.png", "1.png")}, {"train": 2}, None, NOTHING),
        ([], {"p.zip": archive("train/cat/0.png", "test/cat/1.png")}, {"train": 1, "test": 1}, ["cat"], NOTHING),
        ([], {"cat.zip": archive("0.png"), "dog.zip": archive("dog/0.png")}, {"train": 2}, ["cat", "dog"], NOTHING),
        ([], {"p-1.zip": archive(*CLASSES), "p-2.zip": archive("cat/9.png")}, {"train": 4}, ["cat", "dog"], NOTHING),
    ],
)
def test_one_stray_file_does_not_decide(images, files, parts, names, left_out, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "d"
    folder.mkdir()
    for name in images:
        save(folder / name)
    for name, write in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name)
    found = {}
    for split in split_names(str(folder)):
        loaded = load_images(str(folder), split)
        found[split] = len(loaded)
        assert class_names(loaded) == names
        decode_image(loaded[0]["image"], 0)
    assert found == parts
    printed = capsys.readouterr().err
    assert printed.count("Left out") == (left_out != NOTHING) and (left_out == NOTHING or left_out in printed)
    if not images and len(files) == 1 and "photos.zip" in files:
        # The file itself is as good as its folder.
        assert len(load_images(str(folder / "photos.zip"))) == parts["train"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"PK"), "Cannot unpack x.zip"),
        (archive("notes.txt"), "no images in"),
    ],
)
def test_zip_files_that_cannot_be_taken(write, message, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "x.zip")
    with pytest.raises(ValueError, match=message):
        load_images(str(tmp_path / "d"))


def test_names_that_are_not_utf8_are_named(tmp_path):
    draw_classes(tmp_path, 2)
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/cat/caf\xe9.png"))
    save(path)
    with pytest.raises(ValueError, match=r"The name of the file .*\\udc.* is not UTF-8. Rename it") as error:
        load_images(str(tmp_path))
    assert str(error.value).isascii()
    # Where names are not kept with the pixels, they may be any.
    assert len(list(find_files(find_images([str(tmp_path)])))) == 5


def test_accents_are_written_in_one_way(tmp_path):
    for part, name in (("train", "cafe\u0301"), ("val", "caf\u00e9")):
        save(tmp_path / "d" / part / name / "0.png")
        save(tmp_path / "d" / part / "dog" / "0.png")
    for split in ("train", "validation"):
        images = load_images(str(tmp_path / "d"), split)
        assert class_names(images) == ["caf\u00e9", "dog"] and images["label"][:] == [0, 1]
    texts = {"image": [b""] * 4, "label": ["cafe\u0301", "dog", "caf\u00e9", None]}
    table(**texts)(tmp_path / "t.parquet")
    for names in (None, ["cafe\u0301", "dog"]):
        images = load_images(str(tmp_path / "t.parquet"), class_names=names)
        assert class_names(images) == ["caf\u00e9", "dog"] and images["label"][:] == [0, 1, 0, None]


@pytest.mark.parametrize(
    ("files", "parts", "left_out"),
    [
        (["train-0-of-2.parquet", "train-1-of-2.parquet", "test.parquet"], {"train": 2, "test": 1}, None),
        (["data/train.parquet", "data/bus.parquet"], {"train": 1}, r"Left out, as other files of .*bus\.parquet"),
    ],
)
def test_folders_of_parquet_files(files, parts, left_out, tmp_path, capsys):
    folder = tmp_path / "photos [2023]"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict({"x": [1]}).to_parquet(folder / name)
    assert {split: len(load_table(str(folder), split)) for split in split_names(str(folder))} == parts
    printed = capsys.readouterr().err
    assert re.search(left_out, printed) if left_out else "Left out" not in printed
