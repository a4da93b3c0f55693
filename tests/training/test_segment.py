"""Segmentation: masks and views, scores against brute force, the recipe, and the command that evaluates."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.cli import main
from frugalvit.common.decoding import CorruptImageError
from frugalvit.common.masks import MaskError, MaskReader, SegmentationEvalView, SegmentationView, load_masked_images
from frugalvit.common.metrics import SegmentationScores
from frugalvit.common.views import ImageFormat, seeded
from frugalvit.evaluation.segmentation import segmentation_scores, window_starts
from frugalvit.training import segment
from frugalvit.training.components.loaders import TrainingLoader


torch.set_num_threads(1)

NEAREST = ImageFormat((24, 32), mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), resample=0)


def encode(pixels: np.ndarray, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format)
    return buffer.getvalue()


def scene(seed: int, height: int = 40, width: int = 52) -> tuple[np.ndarray, np.ndarray]:
    """An image of rectangles and their classes, of which there are four; the image is 60 times the class."""
    generator = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2, 3):
        top, left = generator.integers(0, height - 12), generator.integers(0, width - 12)
        mask[top : top + generator.integers(8, 25), left : left + generator.integers(8, 25)] = label
    return np.repeat(60 * mask[:, :, None], 3, axis=2), mask


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Function that writes scenes and returns the file; `change` may alter the columns."""

    def write(name: str = "scenes", count: int = 12, change=None) -> str:
        path = tmp_path_factory.mktemp("data") / f"{name}.parquet"
        scenes = [scene(seed) for seed in range(count)]
        columns = {
            "image": [{"bytes": encode(image), "path": None} for image, _ in scenes],
            "annotation": [{"bytes": encode(mask), "path": None} for _, mask in scenes],
        }
        if change:
            change(columns)
        table = datasets.Dataset.from_dict(columns)
        for column in columns:
            table = table.cast_column(column, datasets.Image())
        table.to_parquet(path)
        return str(path)

    return write


def read(table, index: int, read_mask=None) -> tuple[Image.Image, torch.Tensor]:
    image = Image.open(io.BytesIO(table[index]["image"]["bytes"]))
    return image, (read_mask or MaskReader(4))(table[index]["mask"], index, image.size)


class TestData:
    def test_parquet(self, parquet):
        table = load_masked_images(parquet(), "train[:5]")
        assert table.column_names == ["image", "mask"] and len(table) == 5
        assert np.array_equal(read(table, 3)[1], scene(3)[1])

    @pytest.mark.parametrize(("masks", "split"), [("annotations", "training"), ("masks", "")])
    def test_folder_of_pairs(self, masks, split, tmp_path):
        for folder in ("images", masks):
            (tmp_path / folder / split).mkdir(parents=True)
        for seed in range(3):
            image, mask = scene(seed)
            Image.fromarray(image).save(tmp_path / "images" / split / f"{seed}.jpg", quality=95)
            Image.fromarray(mask).save(tmp_path / masks / split / f"{seed}.png")
        table = load_masked_images(str(tmp_path), split or "train")
        assert len(table) == 3
        mask = MaskReader(4)(table[2]["mask"], 2, (52, 40))
        assert np.array_equal(mask, scene(2)[1])
        (tmp_path / masks / split / "1.png").unlink()
        with pytest.raises(ValueError, match="1 images in .* have no mask .* for example 1.jpg"):
            load_masked_images(str(tmp_path), split or "train")
        if split:
            with pytest.raises(ValueError, match="has no split 'test'; it has train"):
                load_masked_images(str(tmp_path), "test")

    def test_slices_of_a_folder(self, tmp_path):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / ".DS_Store").write_text("")
        for seed in range(8):
            Image.fromarray(scene(seed)[0]).save(tmp_path / "images" / f"{seed}.png")
            Image.fromarray(scene(seed)[1]).save(tmp_path / "masks" / f"{seed}.png")

        def names(split: str) -> str:
            return "".join(record["path"][-5] for record in load_masked_images(str(tmp_path), split)["image"])

        assert [names("train"), names("train[:75%]"), names("train[75%:]")] == ["01234567", "012345", "67"]
        for split, message in (("test", "has no split 'test'; it has train"), ("train[8:]", "no images|Cannot take")):
            with pytest.raises(ValueError, match=message):
                load_masked_images(str(tmp_path), split)

    def test_columns_that_do_not_tell(self, parquet):
        def three(columns):
            columns["other"] = columns["annotation"]

        path = parquet("three", change=three)
        with pytest.raises(ValueError, match="image, annotation, other; expected one of images and one of masks"):
            load_masked_images(path, "train")
        assert len(load_masked_images(path, "train", mask_column="other")) == 12
        with pytest.raises(ValueError, match="has no column 'mask' of images; it has"):
            load_masked_images(path, "train", mask_column="mask")

    def test_empty(self, parquet):
        with pytest.raises(ValueError, match=r"train\[:0\].* no data|has no images"):
            load_masked_images(parquet(), "train[:0]")

    def test_labels_that_do_not_count(self):
        mask = {"bytes": encode(np.array([[0, 1, 2, 255]], np.uint8)), "path": None}
        assert MaskReader(3)(mask, 0, (4, 1)).tolist() == [[0, 1, 2, 255]]
        assert MaskReader(2, ignored_labels=[2])(mask, 0, (4, 1)).tolist() == [[0, 1, 255, 255]]
        binary = {"bytes": encode(np.array([[True, False]])), "path": None}
        assert MaskReader(2)(binary, 0, (2, 1)).tolist() == [[1, 0]]
        with pytest.raises(ValueError, match=r"do not count are \[300\], expected numbers from 0 to 255"):
            MaskReader(2, ignored_labels=[300])
        assert MaskReader(2, reduce_labels=True)(mask, 0, (4, 1)).tolist() == [[255, 0, 1, 255]]

    @pytest.mark.parametrize(
        ("mask", "size", "error", "message"),
        [
            (encode(np.zeros((4, 5), np.uint8)), (5, 5), MaskError, "image 7 has 5 x 4 pixels, the image 5 x 5"),
            (encode(np.full((4, 5), 3, np.uint8)), (5, 4), MaskError, r"labels \[3\], the classes are 0 to 2"),
            (encode(np.full((4, 5), 300, np.uint16)), (5, 4), MaskError, r"has the labels \[300\]"),
            (encode(np.zeros((4, 5, 3), np.uint8)), (5, 4), MaskError, "a picture of mode RGB, expected one channel"),
            (b"no image", (5, 4), CorruptImageError, "mask of image 7 of the data set cannot be read"),
        ],
        ids=["size", "label", "16 bits", "color", "corrupt"],
    )
    def test_bad_masks(self, mask, size, error, message):
        with pytest.raises(error, match=message):
            MaskReader(3)({"bytes": mask, "path": None}, 7, size)


class TestViews:
    @given(seed=st.integers(0, 2**31), scale=st.sampled_from([(0.5, 2.0), (0.3, 0.4), (2.0, 3.0)]))
    def test_image_and_mask_move_together(self, seed, scale):
        view = SegmentationView(NEAREST, MaskReader(4), scale, distort=0.0)
        image, mask = scene(seed % 10)
        with seeded(seed):
            sample = view(Image.fromarray(image), torch.from_numpy(mask))
        pixels, labels = sample["pixel_values"], sample["labels"]
        assert pixels.shape == (3, 24, 32) and labels.shape == (24, 32)
        assert pixels.dtype == labels.dtype == torch.uint8 and type(pixels) is type(labels) is torch.Tensor
        counts = labels != 255
        assert counts.any()
        assert torch.equal(pixels[0][counts], 60 * labels[counts])
        assert not pixels[:, ~counts].any()  # what pads is of the mean color

    @given(
        size=st.tuples(st.integers(9, 60), st.integers(9, 60)),
        have=st.tuples(st.integers(20, 120), st.integers(20, 120)),
        axis=st.integers(0, 1),
    )
    def test_masks_are_centered_as_smooth_images_are(self, size, have, axis):
        """Image and mask are ramps here. The difference of their means is the shift, in pixels of the original."""
        ramp = np.indices(have)[axis].astype(np.uint8) * 2
        view = SegmentationEvalView(ImageFormat(size, resample=2), MaskReader(255))
        sample = view(Image.fromarray(np.repeat(ramp[..., None], 3, axis=2)), torch.from_numpy(ramp))
        shift = (sample["pixel_values"][0].float() - sample["labels"].float()).mean().item() / 2
        assert abs(shift) <= 0.75

    def test_is_a_function_of_the_seed(self):
        view = SegmentationView(ImageFormat((24, 32)), MaskReader(4))
        image, mask = scene(0)
        samples = []
        for key in (0, 0, 1):
            with seeded(key):
                samples.append(view(Image.fromarray(image), torch.from_numpy(mask)))
        assert all(torch.equal(samples[0][name], samples[1][name]) for name in samples[0])
        assert not torch.equal(samples[0]["pixel_values"], samples[2]["pixel_values"])

    def test_crops_avoid_a_single_class(self):
        image, mask = np.zeros((200, 200, 3), np.uint8), np.zeros((200, 200), np.uint8)
        mask[:, 100:] = 1
        shares = {}
        for max_share in (0.75, 1.0):
            view = SegmentationView(ImageFormat((32, 32)), MaskReader(4), (2.0, 2.0), max_share)
            single = 0
            for seed in range(40):
                with seeded(seed):
                    labels = view(Image.fromarray(image), torch.from_numpy(mask))["labels"]
                single += len(labels.unique()) == 1
            shares[max_share] = single
        assert shares[0.75] < shares[1.0]

    def test_evaluation_sees_all(self):
        image, mask = scene(0)
        sample = SegmentationEvalView(NEAREST, MaskReader(4))(Image.fromarray(image), torch.from_numpy(mask))
        assert torch.equal(sample["pixel_values"][0], 60 * sample["labels"])
        assert sample["labels"].shape == (24, 32)


class TestScores:
    @given(seed=st.integers(0, 2**31), num_labels=st.integers(2, 6), batches=st.integers(1, 3))
    def test_against_brute_force(self, seed, num_labels, batches):
        generator = np.random.default_rng(seed)
        scores, everything = SegmentationScores(num_labels), []
        for _ in range(batches):
            references = generator.choice([*range(num_labels), 255], (2, 4, 5))
            predictions = generator.integers(0, num_labels, (2, 4, 5))
            scores.add_batch(predictions=predictions, references=references)
            everything += zip(predictions.ravel(), references.ravel(), strict=True)
        pairs = [(guess, truth) for guess, truth in everything if truth != 255]
        iou, accuracy = {}, {}
        for label in range(num_labels):
            both = sum(guess == truth == label for guess, truth in pairs)
            either = sum(label in pair for pair in pairs)
            truths = sum(truth == label for _, truth in pairs)
            iou[label] = both / either if either else None
            accuracy[label] = both / truths if truths else None
        results = scores.compute()
        assert results["iou"] == pytest.approx(list(iou.values()))
        known = [value for value in iou.values() if value is not None]
        assert results["mean_iou"] == (pytest.approx(np.mean(known)) if known else None)
        known = [value for value in accuracy.values() if value is not None]
        assert results["mean_accuracy"] == (pytest.approx(np.mean(known)) if known else None)
        right = [guess == truth for guess, truth in pairs]
        assert results["pixel_accuracy"] == (pytest.approx(np.mean(right)) if right else None)

    def test_counts_anew_after_computing(self):
        scores = SegmentationScores(2)
        scores.add_batch(predictions=np.array([[0, 1]]), references=np.array([[0, 1]]))
        assert scores.compute()["mean_iou"] == 1
        assert scores.compute(predictions=np.array([1, 1]), references=np.array([0, 0]))["mean_iou"] == 0
        assert scores.compute(predictions=np.array([1]), references=np.array([255]))["mean_iou"] is None

    @pytest.mark.parametrize(("predictions", "references"), [([2], [0]), ([-1], [0]), ([0], [7])])
    def test_numbers_that_are_no_classes(self, predictions, references):
        with pytest.raises(ValueError, match="expected 0 to 1"):
            SegmentationScores(2).add_batch(predictions=predictions, references=references)

    def test_shapes_that_differ(self):
        with pytest.raises(ValueError, match=r"predictions of shape \(2, 3\) for references of \(3, 2\)"):
            SegmentationScores(2).add_batch(predictions=np.zeros((2, 3)), references=np.zeros((3, 2)))


@given(length=st.integers(1, 300), window=st.integers(1, 100), stride=st.integers(1, 120))
def test_windows_cover_everything(length, window, stride):
    starts = window_starts(length, window, stride)
    assert starts[0] == 0 and starts[-1] == max(length - window, 0)
    if stride <= window:
        assert {at for start in starts for at in range(start, start + window)} >= set(range(length))


class ByColor(torch.nn.Module):
    """Scores of a pixel from its color alone."""

    config, device = SimpleNamespace(num_labels=4), torch.device("cpu")

    def forward(self, pixel_values):
        return SimpleNamespace(logits=-(pixel_values[:, :1] - 60 * torch.arange(4).view(1, 4, 1, 1)).abs())


def test_windows_with_gaps_are_refused(parquet):
    images = load_masked_images(parquet(), "train")
    with pytest.raises(ValueError, match="A stride of 30 leaves gaps between windows of"):
        segmentation_scores(ByColor(), NEAREST, images, MaskReader(4), window=(16, 40), stride=30)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flip": True},
        {"window": (40, 40), "shorter_side": 40},
        {"window": (16, 24), "stride": 7, "shorter_side": 40, "flip": True},
        {"window": (64, 64), "shorter_side": 40},
    ],
    ids=["whole", "flipped", "two windows", "many windows", "a window larger than the image"],
)
def test_every_way_sees_each_pixel_where_it_is(options, parquet):
    images = load_masked_images(parquet(), "train")
    image_format = ImageFormat((40, 52), NEAREST.mean, NEAREST.std, resample=0)
    results = segmentation_scores(ByColor(), image_format, images, MaskReader(4), batch_size=5, **options)
    assert results["images"] == 12 and results["skipped"] == 0
    assert results["mean_iou"] == results["pixel_accuracy"] == 1


def tiny_config(**fields) -> SparseFormerConfig:
    return SparseFormerConfig(
        image_size=32,
        num_latent_tokens=4,
        num_sampling_points=4,
        num_mixed_points=8,
        stem_channels=8,
        focusing_hidden_size=32,
        num_focusing_iterations=2,
        hidden_size=64,
        num_hidden_layers=2,
        decoder_hidden_size=32,
        image_mean=0.5,
        image_std=0.25,
        **fields,
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A tiny SparseFormer classifier."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start")
    SparseFormerForImageClassification(tiny_config()).save_pretrained(folder)
    return folder


class TestRecipe:
    def arguments(self, start, parquet, out, *more) -> list[str]:
        return [
            *("--model", str(start), "--num-latent-tokens", "16", "--image-size", "40", "48"),
            *("--dataset", parquet(), "--eval-dataset", parquet(), "--class-names", "a", "b", "c", "d"),
            *("--output", str(out), "--epochs", "6", "--batch-size", "4", "--eval-batch-size", "5"),
            *("--learning-rate", "1e-3", "--head-multiplier", "2", "--warmup-steps", "2", "--drop-path", "0.1", *more),
        ]

    def test_learns_and_evaluates_as_the_command_does(self, start, parquet, tmp_path):
        assert segment.main(self.arguments(start, parquet, tmp_path / "out")) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        losses = [epoch["train_loss"] for epoch in results["epochs"]]
        assert losses[-1] < 0.9 * losses[0]
        assert results["best"]["mean_iou"] == max(epoch["mean_iou"] for epoch in results["epochs"])
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["num_latent_tokens"] == 16 and config["image_size"] == [40, 48]
        assert config["id2label"] == {"0": "a", "1": "b", "2": "c", "3": "d"}
        processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
        assert processor["image_processor_type"].startswith("SegformerImageProcessor")
        assert processor["image_std"] == 0.25 and processor["size"] == {"height": 40, "width": 48}
        assert f"mean IoU {results['best']['mean_iou']:.2%}" in (tmp_path / "out" / "README.md").read_text()
        command = ["evaluate", "segmentation", "--model", str(tmp_path / "out"), "--dataset", parquet()]
        picture = tmp_path / "scenes.png"
        assert main([*command, "--output", str(tmp_path / "scores.json"), "--picture", str(picture)]) == 0
        with Image.open(picture) as drawn:
            assert drawn.width > 1500
        scores = json.loads((tmp_path / "scores.json").read_text())
        # Masks of 52 pixels across here, of 48 in training.
        assert scores["mean_iou"] == pytest.approx(results["best"]["mean_iou"], abs=0.05)
        assert {"iou a", "iou b", "iou c", "iou d"} <= scores.keys()

    def test_a_run_that_was_stopped_goes_on(self, start, parquet, tmp_path):
        arguments = self.arguments(start, parquet, tmp_path / "whole", "--epochs", "2", "--checkpointing-steps", "2")
        again = [str(tmp_path / "again") if word == str(tmp_path / "whole") else word for word in arguments]
        assert segment.main(arguments) == 0
        epoch = TrainingLoader.epoch

        def stopped(self, number, start=0):
            for at, batch in enumerate(epoch(self, number, start), start):
                if (number, at) == (1, 2):
                    raise KeyboardInterrupt
                yield batch

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TrainingLoader, "epoch", stopped)
            segment.main(again)
        assert segment.main(again) == 0
        for name in ("model.safetensors", "checkpoints/step-00000006/optimizer.pt"):
            files = [tmp_path / folder / name for folder in ("whole", "again")]
            assert files[0].read_bytes() == files[1].read_bytes()

    def test_trains_models_of_transformers_from_scratch(self, parquet, tmp_path):
        overrides = (
            "depths=[1,1,1,1],hidden_sizes=[8,8,16,16],num_attention_heads=[1,1,1,1],mlp_ratios=[1,1,1,1],"
            "decoder_hidden_size=16"
        )
        arguments = self.arguments("", parquet, tmp_path / "out", "--layer-decay", "1")
        arguments = ["--model-type", "segformer", "--config-overrides", overrides, *arguments[4:]]
        arguments[arguments.index("--drop-path") + 1] = "0.2"
        assert segment.main([*arguments, "--epochs", "2"]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["drop_path_rate"] == 0.2
        card = (tmp_path / "out" / "README.md").read_text()
        assert "pipeline_tag: image-segmentation" in card and "AutoModelForSemanticSegmentation" in card

    def test_learning_rates_fall_towards_the_image(self, start):
        model = segment.SparseFormerForSemanticSegmentation.from_pretrained(start)
        factors = segment.learning_rate_factors(model, 10.0, 0.5)
        of_name = {name: factors[parameter] for name, parameter in model.named_parameters()}
        assert of_name["decode_head.query.weight"] == 10
        assert of_name["sparseformer.layernorm.weight"] == 1
        assert of_name["sparseformer.layers.1.mlp.fc1.weight"] == 1
        assert of_name["sparseformer.layers.0.mlp.fc1.weight"] == 0.5
        assert of_name["sparseformer.stem.convolution.weight"] == 0.25
        assert of_name["sparseformer.focusing_layer.mlp.fc1.weight"] == 0.25

    def test_each_rate_ends_in_the_optimizer(self, start, parquet, tmp_path):
        words = self.arguments(start, parquet, tmp_path / "out", "--layer-decay", "0.5")
        own = segment.make_trainer(segment.parse(words), words)
        optimizer, _ = own.make_optimizer()
        rates = {weight: group["initial_lr"] for group in optimizer.param_groups for weight in group["params"]}
        of_name = {name: rates[weight] for name, weight in own.model.named_parameters()}
        assert of_name["decode_head.query.weight"] == pytest.approx(2e-3)
        assert of_name["sparseformer.layers.1.mlp.fc1.weight"] == pytest.approx(1e-3)
        assert of_name["sparseformer.stem.convolution.weight"] == pytest.approx(2.5e-4)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--class-names", "a", "b"], r"has the labels \[2, 3\], the classes are 0 to 1"),
            (["--ignored-labels", "0", "1", "2", "3"], "No pixel of the evaluation masks counts"),
            (["--warmup-steps", "18"], "--warmup-steps 18 is all of the training of 3 steps"),
            (["--num-labels", "5"], "--num-labels is 5, --class-names has 4"),
            (["--model-type", "segformer"], "either --model, to go on from, or --model-type"),
            (["--train-split", "train[:2]"], "2 training images make 0 batches"),
        ],
    )
    def test_bad_arguments(self, more, message, start, parquet, tmp_path, capsys):
        arguments = self.arguments(start, parquet, tmp_path / "out", "--epochs", "1", *more)
        with pytest.raises((ValueError, SystemExit)) as raised:
            segment.main(arguments)
        assert re.search(message, f"{raised.value} {capsys.readouterr().err}")

    @pytest.mark.reliability
    def test_two_processes_give_the_losses_of_one(self, parquet, tmp_path):
        """The model has a pooling head, on which the scores of pixels do not depend."""
        torch.manual_seed(0)
        SparseFormerForImageClassification(tiny_config(pooling="attention")).save_pretrained(tmp_path / "start")
        arguments = self.arguments(tmp_path / "start", parquet, tmp_path / "one", "--epochs", "2", "--drop-path", "0")
        segment.main(arguments)
        job = {"module": "training.segment", "processes": 2, "ends": [0, 0], "log": str(tmp_path / "log")}
        job["arguments"] = [*arguments, "--output", str(tmp_path / "two")]
        (tmp_path / "jobs.json").write_text(json.dumps([job]))
        program = Path(__file__).with_name("several_processes.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, program, tmp_path / "jobs.json"], env=environment, check=True, timeout=250)
        results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
        losses = [[epoch["train_loss"] for epoch in each["epochs"]] for each in results]
        # Each process divides by the pixels that count in its own share.
        assert losses[0] == pytest.approx(losses[1], rel=0.02)

    def test_needs_to_know_the_classes(self, start, parquet, tmp_path):
        arguments = self.arguments(start, parquet, tmp_path / "out")
        at = arguments.index("--class-names")
        with pytest.raises(ValueError, match="is no segmentation model that would know the classes"):
            segment.main(arguments[:at] + arguments[at + 5 :])

    def test_bad_masks_are_one_line_where_workers_decode(self, start, parquet, tmp_path):
        def shrink(columns):
            columns["annotation"][3]["bytes"] = encode(scene(3, 20, 30)[1])

        path = parquet("shrunk", change=shrink)
        arguments = self.arguments(start, parquet, tmp_path / "out", "--dataset", path, "--num-workers", "1")
        with pytest.raises(MaskError, match="^The mask of image 3 has 30 x 20 pixels, the image 52 x 40; expected"):
            segment.main(arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--stride", "4"], "--stride and --shorter-side say how a window slides"),
            (["--window", "1", "2", "3"], "--window has 3 numbers"),
            (["--picture", "scenes.txt"], "expected a file name ending in one of"),
            (["--picture", "scenes.png", "--drawn", "13"], "--drawn has 13, there are 12 images"),
        ],
    )
    def test_bad_evaluation(self, arguments, message, parquet, tmp_path, capsys):
        config = SegformerConfig(depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, num_labels=4)
        SegformerForSemanticSegmentation(config).save_pretrained(tmp_path / "model")
        SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
        command = ["evaluate", "segmentation", "--model", str(tmp_path / "model"), "--dataset", parquet()]
        assert main([*command, *arguments]) == 1
        assert message in capsys.readouterr().err
