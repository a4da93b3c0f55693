"""Trainings for segmentation, on scenes of rectangles."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from drawn import encode, scene, write_scenes
from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.cli import main
from frugalvit.common.masks import MaskError
from frugalvit.training import segment
from frugalvit.training.components.loaders import TrainingLoader


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
    def arguments(self, start, scenes, out, *more) -> list[str]:
        return [
            *("--model", str(start), "--num-latent-tokens", "16", "--image-size", "40", "48"),
            *("--dataset", scenes, "--eval-dataset", scenes, "--class-names", "a", "b", "c", "d"),
            *("--output", str(out), "--epochs", "6", "--batch-size", "4", "--eval-batch-size", "5"),
            *("--learning-rate", "1e-3", "--head-multiplier", "2", "--warmup-steps", "2", "--drop-path", "0.1", *more),
        ]

    def test_learns_and_evaluates_as_the_command_does(self, start, scenes, tmp_path):
        assert segment.main(self.arguments(start, scenes, tmp_path / "out")) == 0
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
        command = ["evaluate", "segmentation", "--model", str(tmp_path / "out"), "--dataset", scenes]
        picture = tmp_path / "scenes.png"
        assert main([*command, "--output", str(tmp_path / "scores.json"), "--picture", str(picture)]) == 0
        with Image.open(picture) as drawn:
            assert drawn.width > 1500
        scores = json.loads((tmp_path / "scores.json").read_text())
        # Masks of 52 pixels across here, of 48 in training.
        assert scores["mean_iou"] == pytest.approx(results["best"]["mean_iou"], abs=0.05)
        assert {"iou a", "iou b", "iou c", "iou d"} <= scores.keys()

    def test_a_run_that_was_stopped_goes_on(self, start, scenes, tmp_path):
        arguments = self.arguments(start, scenes, tmp_path / "whole", "--epochs", "2", "--checkpointing-steps", "2")
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

    def test_trains_models_of_transformers_from_scratch(self, scenes, tmp_path):
        overrides = (
            "depths=[1,1,1,1],hidden_sizes=[8,8,16,16],num_attention_heads=[1,1,1,1],mlp_ratios=[1,1,1,1],"
            "decoder_hidden_size=16"
        )
        arguments = self.arguments("", scenes, tmp_path / "out", "--layer-decay", "1")
        arguments = ["--model-type", "segformer", "--config-overrides", overrides, *arguments[4:]]
        arguments[arguments.index("--drop-path") + 1] = "0.2"
        assert segment.main([*arguments, "--epochs", "2"]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["drop_path_rate"] == 0.2
        card = (tmp_path / "out" / "README.md").read_text()
        assert "pipeline_tag: image-segmentation" in card and "AutoModelForSemanticSegmentation" in card

    def test_each_rate_ends_in_the_optimizer(self, start, scenes, tmp_path):
        words = self.arguments(start, scenes, tmp_path / "out", "--layer-decay", "0.5")
        own = segment.make_trainer(segment.parse(words), words)
        optimizer, _ = own.make_optimizer()
        rates = {weight: group["initial_lr"] for group in optimizer.param_groups for weight in group["params"]}
        of_name = {name: rates[weight] for name, weight in own.model.named_parameters()}
        assert of_name["decode_head.query.weight"] == pytest.approx(2e-3)
        assert of_name["sparseformer.layernorm.weight"] == pytest.approx(1e-3)
        assert of_name["sparseformer.layers.1.mlp.fc1.weight"] == pytest.approx(1e-3)
        assert of_name["sparseformer.layers.0.mlp.fc1.weight"] == pytest.approx(5e-4)
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
    def test_bad_arguments(self, more, message, start, scenes, tmp_path, capsys):
        arguments = self.arguments(start, scenes, tmp_path / "out", "--epochs", "1", *more)
        with pytest.raises((ValueError, SystemExit)) as raised:
            segment.main(arguments)
        assert re.search(message, f"{raised.value} {capsys.readouterr().err}")

    @pytest.mark.nightly
    def test_two_processes_give_the_losses_of_one(self, scenes, tmp_path):
        """The model has a pooling head, on which the scores of pixels do not depend."""
        torch.manual_seed(0)
        SparseFormerForImageClassification(tiny_config(pooling="attention")).save_pretrained(tmp_path / "start")
        arguments = self.arguments(tmp_path / "start", scenes, tmp_path / "one", "--epochs", "2", "--drop-path", "0")
        segment.main(arguments)
        job = {"module": "training.segment", "processes": 2, "ends": [0, 0], "log": str(tmp_path / "log")}
        job["arguments"] = [*arguments, "--output", str(tmp_path / "two")]
        (tmp_path / "jobs.json").write_text(json.dumps([job]))
        program = Path(__file__).with_name("several_processes.py")
        subprocess.run([sys.executable, program, tmp_path / "jobs.json"], check=True, timeout=250)
        results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
        losses = [[epoch["train_loss"] for epoch in each["epochs"]] for each in results]
        # Each process divides by the pixels that count in its own share.
        assert losses[0] == pytest.approx(losses[1], rel=0.02)

    def test_needs_to_know_the_classes(self, start, scenes, tmp_path):
        arguments = self.arguments(start, scenes, tmp_path / "out")
        at = arguments.index("--class-names")
        with pytest.raises(ValueError, match="is no segmentation model"):
            segment.main(arguments[:at] + arguments[at + 5 :])

    def test_bad_masks_are_one_line_where_workers_decode(self, start, scenes, tmp_path):
        def shrink(columns):
            columns["annotation"][3]["bytes"] = encode(scene(3, 20, 30)[1])

        path = write_scenes(tmp_path / "shrunk.parquet", change=shrink)
        arguments = self.arguments(start, scenes, tmp_path / "out", "--dataset", path, "--num-workers", "1")
        with pytest.raises(
            MaskError, match="mask of image 3 is a picture of mode L with 30 x 20 pixels, expected .* 52 x 40"
        ):
            segment.main(arguments)
