"""`frugalvit index` and `frugalvit search`: a folder of images, found by words and by images."""

import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPVisionConfig

import frugalvit
import frugalvit.search
from frugalvit import SparseFormerVisionModelWithProjection, index
from frugalvit.cli import main
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import locked
from frugalvit.index import Shard, read_shards
from frugalvit.search import image_called, search


MODEL = str(frugalvit.checkpoint_path("cifar10-sparseformer-clip"))


@pytest.fixture
def images(tmp_path) -> Path:
    """Photographs in folders of folders."""
    folder = tmp_path / "images"
    for number, record in enumerate(load_images(SUBSET, "test[:24]")):
        path = folder / f"{number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        decode_image(record["image"], number).save(path)
    return folder


def build(images: Path, output: Path, *more: str) -> int:
    return main(["index", str(images), "--model", MODEL, "--output", str(output), "--device", "cpu", *more])


def files_in(output: Path) -> list[str]:
    return sorted(file[0] for shard in read_shards(output) for file in shard.files)


def test_an_image_finds_itself_and_words_find_images(images, tmp_path, capsys):
    output = tmp_path / "index"
    assert build(images, output) == 0
    assert "24 images in" in capsys.readouterr().out
    picture = tmp_path / "found.png"
    query = str(images / "1" / "07.png")
    assert main(["search", str(output), query, "--top", "5", "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 5
    assert found[0]["image"] == query
    assert found[0]["cosine"] == pytest.approx(1, abs=1e-4)
    assert [row["cosine"] for row in found] == sorted((row["cosine"] for row in found), reverse=True)
    with Image.open(picture) as image:
        # Most of it is photographs.
        assert np.asarray(image.convert("L")).std() > 40
    # By what the model itself makes of words and images.
    assert main(["search", str(output), "a photo of a ship", "--top", "24", "--json"]) == 0
    cosines = {row["image"]: row["cosine"] for row in json.loads(capsys.readouterr().out)}
    towers = index.load_two_towers(MODEL, None, "cpu")
    path = next(iter(cosines))
    with torch.inference_mode(), Image.open(path) as image:
        pixel_values = towers.image_processor([image.convert("RGB")], return_tensors="pt")["pixel_values"]
        expected = towers.embed_images(pixel_values) @ towers.embed_texts(["a photo of a ship"]).mT
    assert cosines[path] == pytest.approx(expected.item(), abs=1e-4)


def test_a_killed_command_goes_on_and_new_images_are_added(images, tmp_path, capsys, monkeypatch):
    output = tmp_path / "index"
    monkeypatch.setattr(index, "SHARD", 8)
    decode_file = index.decode_file

    def die(file, name, **options):
        if name.endswith("20.png"):
            raise KeyboardInterrupt
        return decode_file(file, name, **options)

    monkeypatch.setattr(index, "decode_file", die)
    assert build(images, output, "--batch-size", "4") == 130
    kept = len(files_in(output))
    assert 0 < kept < 24
    monkeypatch.setattr(index, "decode_file", decode_file)
    capsys.readouterr()
    assert build(images, output) == 0
    assert f"24 images in {output}, {24 - kept} of them looked at now." in capsys.readouterr().out
    shutil.copyfile(images / "0" / "00.png", images / "new.png")
    # Another image under an old name.
    changed = images / "0" / "02.png"
    shutil.copyfile(images / "1" / "03.png", changed)
    os.utime(changed, ns=(2**62, 2**62))
    assert build(images, output) == 0
    assert f"25 images in {output}, 2 of them looked at now." in capsys.readouterr().out
    assert main(["search", str(output), str(images / "1" / "03.png"), "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {Path(row["image"]).name for row in found} == {"02.png", "03.png"}
    assert all(row["cosine"] == pytest.approx(1, abs=1e-4) for row in found)
    # What is gone is not found.
    changed.unlink()
    assert main(["search", str(output), str(images / "1" / "03.png"), "--top", "25", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 24


def test_a_swapped_image_side_is_compared_with_the_clips_own(images, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=64, patch_size=4, projection_dim=16)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = {**sizes, "vocab_size": len(tokenizer)}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    student = SparseFormerVisionModelWithProjection.from_teacher(clip, 4, truncate=1, stem_channels=8)
    clip.save_pretrained(tmp_path / "clip")
    CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}).save_pretrained(
        tmp_path / "clip"
    )
    tokenizer.save_pretrained(tmp_path / "clip")
    student.save_pretrained(tmp_path / "student")
    models = ["--model", str(tmp_path / "clip"), "--vision-model", str(tmp_path / "student")]
    assert main(["index", str(images), *models, "--output", str(tmp_path / "index"), "--device", "cpu"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    found = re.fullmatch(r".* of 24: (.*) images/s, (.*) with the CLIP's own image side\.", line)
    new, own = map(float, found.groups())
    assert new > own


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda images, output: (images / "bad.png").write_bytes(b"none"), "Cannot read 'bad.png'"),
        (lambda images, output: shutil.rmtree(images), "There is no folder"),
        (lambda images, output: [path.unlink() for path in images.rglob("*.png")], "There are no images"),
        (lambda images, output: (output.mkdir(), (output / "note.txt").write_text("mine")), "is no index"),
        (
            lambda images, output: (output.mkdir(), (output / "index.json").write_text('{"folder": "", "model": ""}')),
            "choose another --output",
        ),
    ],
)
def test_bad_input_is_one_line(change, message, images, tmp_path, capsys):
    output = tmp_path / "index"
    change(images, output)
    assert build(images, output) == 1
    assert message in capsys.readouterr().err


def test_corrupt_images_may_be_left_out(images, tmp_path, capsys):
    (images / "bad.png").write_bytes(b"none")
    assert build(images, tmp_path / "index", "--skip-corrupt") == 0
    error = capsys.readouterr().err
    assert "Left out: bad.png" in error and "--skip-corrupt" not in error
    assert len(files_in(tmp_path / "index")) == 24
    [path] = (tmp_path / "index").glob("*.safetensors")
    path.write_bytes(b"{}")
    assert main(["search", str(tmp_path / "index"), "a photo of a ship"]) == 1
    assert "is damaged" in capsys.readouterr().err


WORDS = [
    "a photo of a cat that sits on a chair " * 12,
    "a" * 5_000,
    "cat",
    "cat/dog",
    "what is 3.5",
    "a cat.",
    "~nobody's cat",
    "~",
    "notes",
    "photos",
    "a\nb",
]
FILES = ["cat.png", "./cat.png", "a b.JPG", "photos/dog", "photos/notes.txt", "picture"]
MISSING = ["holiday.jpg", "photos/holiday.PNG", "a photo of a cat.webp", "IMG_1.HEIC", "~nobody/x.jpg"]


@pytest.mark.parametrize("query", WORDS + FILES + MISSING)
def test_words_and_files_are_told_apart(query, tmp_path, monkeypatch):
    """Beside files that are called like words."""
    (tmp_path / "photos").mkdir()
    for name in ("cat.png", "a b.JPG", "photos/dog", "picture"):
        Image.new("RGB", (8, 8)).save(tmp_path / name, "PNG")
    for name in ("notes", "photos/notes.txt", "cat"):
        (tmp_path / name).write_text("no image")
    monkeypatch.chdir(tmp_path)
    if query in MISSING:
        with pytest.raises(FileNotFoundError, match="There is no file .*; give an image"):
            image_called(query)
    else:
        assert image_called(query) == (Path(query) if query in FILES else None)


@pytest.mark.parametrize("history", ["12", "21", "121", "212", "1232", "1", "3213"])
def test_what_is_there_now_is_found(history, tmp_path):
    """Also where an older file took the place of a newer one, or the first one came back; files of equal size."""
    known, shards, image = [], [], tmp_path / "image.png"
    for time in map(int, history):
        image.touch()
        os.utime(image, ns=(time * 10**18, time * 10**18))
        if (file := [image.name, *index.describe(image)]) not in known:
            known.append(file)
            shards.append(Shard([file], torch.nn.functional.one_hot(torch.tensor([time]), 4).float()))
    query = torch.nn.functional.one_hot(torch.tensor(time), 4).float()
    [found] = search(query, shards, 3, tmp_path)
    assert found.cosine == 1
    # Without a look at it, the last embedding counts.
    [found] = search(shards[-1].embeddings[0], shards, 3)
    assert found.cosine == 1
    image.unlink()
    with pytest.raises(ValueError, match="none of its 1 is there any more"):
        search(query, shards, 3, tmp_path)


@pytest.mark.parametrize("damaged", [[0], [0, 2]])
def test_a_damaged_file_is_made_anew_and_others_stay(damaged, images, tmp_path, capsys, monkeypatch):
    output = tmp_path / "index"
    monkeypatch.setattr(index, "SHARD", 8)
    assert build(images, output, "--batch-size", "8") == 0
    paths = index.shard_files(output)
    assert len(paths) == 3
    kept = {path: path.read_bytes() for number, path in enumerate(paths) if number not in damaged}
    for number in damaged:
        paths[number].write_text("broken")
        assert build(images, output) == 1 and f"{paths[number].name}' is damaged; remove it" in capsys.readouterr().err
        paths[number].unlink()
    assert build(images, output) == 0
    assert files_in(output) == sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    assert all(path.read_bytes() == content for path, content in kept.items())


NAMES = [["a.png", 1, 1], ["b.png", 1, 1]]


@pytest.mark.parametrize(
    ("files", "embeddings"),
    [
        (json.dumps([*NAMES, NAMES[0]]), torch.ones(2, 4)),
        (json.dumps(NAMES[:1]), torch.ones(2, 4)),
        (json.dumps([[5, 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["a.png", "1", 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["a.png", 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps(["a.png", "b.png"]), torch.ones(2, 4)),
        (json.dumps({"a.png": 1, "b.png": 1}), torch.ones(2, 4)),
        (json.dumps([["../a.png", 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["x/../../a.png", 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["/etc/passwd", 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["", 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps([["a\0.png", 1, 1], NAMES[1]]), torch.ones(2, 4)),
        (json.dumps(NAMES), torch.ones(2)),
        (json.dumps(NAMES), torch.ones(())),
        (json.dumps(NAMES), torch.ones(2, 4, 1)),
        (json.dumps(NAMES), torch.ones(2, 4, dtype=torch.int64)),
        (json.dumps(NAMES), torch.full((2, 4), float("nan"))),
        ("null", torch.ones(2, 4)),
        ("[" * 100_000, torch.ones(2, 4)),
        (None, torch.ones(2, 4)),
    ],
)
def test_what_no_index_holds_is_said(files, embeddings, tmp_path):
    path = tmp_path / "embeddings-00000-0.safetensors"
    save_file({"embeddings": embeddings}, path, None if files is None else {"files": files})
    with pytest.raises(ValueError, match="00000-0.safetensors' is damaged; remove it"):
        list(read_shards(tmp_path))
    save_file({"embeddings": torch.ones(2, 4)}, path, {"files": json.dumps(NAMES)})
    [shard] = read_shards(tmp_path)
    assert shard.files == NAMES
    save_file(
        {"embeddings": torch.ones(2, 3)}, tmp_path / "embeddings-00001-0.safetensors", {"files": json.dumps(NAMES)}
    )
    with pytest.raises(ValueError, match="00001-0.safetensors' is damaged"):
        list(read_shards(tmp_path))


@pytest.mark.parametrize(
    "about",
    ["", "[]", '{"folder": 5, "model": "x"}', '{"folder": "x"}', '{"folder": "", "model": "", "vision_model": []}'],
)
def test_what_is_no_index_is_said(about, tmp_path, capsys):
    (tmp_path / "index.json").write_text(about)
    assert main(["search", str(tmp_path), "a photo of a ship"]) == 1
    assert "is no index; `frugalvit index" in capsys.readouterr().err


def test_one_command_at_a_time_writes_an_index_and_follows_no_link(images, tmp_path, capsys):
    output = tmp_path / "index"
    output.mkdir()
    with locked(output):
        assert build(images, output) == 1
    assert "is in use by process" in capsys.readouterr().err
    assert not list(output.iterdir())
    (tmp_path / "mine").write_text(json.dumps({"folder": str(images.resolve()), "model": str(Path(MODEL).resolve())}))
    (output / "index.json").symlink_to(tmp_path / "mine")
    before = (tmp_path / "mine").read_text()
    assert build(images, output) == 1 and "is a link" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == before


@pytest.mark.parametrize("moment", ["listed", "described"])
def test_a_file_that_is_removed_meanwhile_is_left_out(moment, images, tmp_path, capsys, monkeypatch):
    gone, image_files, locks = images / "0" / "00.png", index.image_files, index.locked

    def remove_while_listing(folder):
        found = sorted(image_files(folder))
        gone.unlink()
        return found

    def remove_before_embedding(output):
        gone.unlink()
        return locks(output)

    if moment == "listed":
        monkeypatch.setattr(index, "image_files", remove_while_listing)
    else:
        monkeypatch.setattr(index, "locked", remove_before_embedding)
    assert build(images, tmp_path / "index") == 0
    assert "23 images in" in capsys.readouterr().out
    assert len(files_in(tmp_path / "index")) == 23


@pytest.mark.parametrize("library", [faiss, None], ids=["faiss", "plain"])
@given(count=st.integers(1, 30), top=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_search_is_sorting(library, count, top, seed):
    """Also in pieces, with the last embedding of an image that changed."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.nn.functional.normalize(torch.randn(count, 4, generator=generator), dim=-1)
    query = torch.nn.functional.normalize(torch.randn(4, generator=generator), dim=-1)
    files = [[f"{number}.png", 1, 1] for number in range(count)]
    half = count // 2
    old = Shard([[name, size, 2] for name, size, _ in files[:half]], -embeddings[:half])
    shards = [old, Shard(files[:half], embeddings[:half]), Shard(files[half:], embeddings[half:])]
    with patch.object(frugalvit.search, "faiss", library):
        found = search(query, [shard for shard in shards if shard.files], top)
    order = (embeddings @ query).argsort(descending=True)[:top].tolist()
    assert [each.name for each in found] == [f"{number}.png" for number in order]
    assert [each.cosine for each in found] == pytest.approx((embeddings @ query)[order].tolist(), abs=1e-6)
