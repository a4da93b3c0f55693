"""Semantic segmentation of road scenes: a SparseFormer against a plain ViT and a SegFormer, one command.

    python benchmarks/segmentation_table.py --dataset camvid-train.parquet --eval-dataset camvid-val.parquet

Three models get the same images, crops, steps and schedule: a SparseFormer from the shipped bootstrapped classifier,
with more tokens; the ViT that it was bootstrapped from, of the same width, with a linear head on its patches; and
Transformers' SegFormer, of about the SparseFormer's multiply-accumulates, from random weights, as it has no weights
that come from the same images. Scores are measured at the resolution of the masks, after the last epoch, speed and
memory of inference in the same run. Runs are kept under --runs-dir and found again, so that a killed command goes on,
and seeds can be run side by side. Writes segmentation.json and, of the first seed, segmentation.png beside it.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSemanticSegmentation, ViTConfig, ViTModel, ViTPreTrainedModel
from transformers.modeling_outputs import SemanticSegmenterOutput

from frugalvit import count_macs
from frugalvit.common.command_line import CommandParser
from frugalvit.common.loading import load_with_image_processor
from frugalvit.common.masks import MaskReader, load_masked_images
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from frugalvit.common.views import ImageFormat
from frugalvit.evaluation.segmentation import picture_of, segmentation_scores
from frugalvit.pictures import save_figure
from frugalvit.training import segment
from shared import add_run_arguments, folder_name, run_training, spread, write_table


# CamVid's classes as SegNet merged them; 11 is void.
CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "cyclist"]
VOID = 11
SEGFORMER = (
    "depths=[3,4,6,3],hidden_sizes=[64,128,320,512],num_attention_heads=[1,2,5,8],decoder_hidden_size=256,"
    "classifier_dropout_prob=0.1"
)


class ViTLinearForSemanticSegmentation(ViTPreTrainedModel):
    """A ViT with a linear classifier on every patch; positions are interpolated to the image's size."""

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> SemanticSegmenterOutput:
        tokens = self.vit(pixel_values, interpolate_pos_encoding=True).last_hidden_state[:, 1:]
        height, width = (side // self.config.patch_size for side in pixel_values.shape[-2:])
        return SemanticSegmenterOutput(logits=self.classifier(tokens).mT.unflatten(-1, (height, width)))


AutoModelForSemanticSegmentation.register(ViTConfig, ViTLinearForSemanticSegmentation, exist_ok=True)

# Rows: name -> arguments of the command.
ROWS = {
    "SparseFormer, {tokens} tokens": [
        *("--model", "checkpoints/cifar10-sparseformer", "--num-latent-tokens", "{tokens}"),
        *("--learning-rate", "5e-4", "--head-multiplier", "2", "--layer-decay", "0.9"),
    ],
    "ViT, linear head": [
        *("--model", "checkpoints/cifar10-vit", "--learning-rate", "5e-4", "--head-multiplier", "2"),
        *("--layer-decay", "0.9"),
    ],
    "SegFormer from scratch": [
        *("--model-type", "segformer", "--config-overrides", SEGFORMER, "--learning-rate", "1e-3"),
        *("--head-multiplier", "1", "--layer-decay", "1"),
    ],
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", required=True, help="CamVid to train on, as in `frugalvit segment`")
    parser.add_argument("--eval-dataset", nargs="+", required=True, help="CamVid to evaluate on")
    parser.add_argument("--rows", nargs="+", choices=["sparseformer", "vit", "segformer"], help="default: all")
    parser.add_argument("--image-size", type=int, nargs=2, default=[72, 96], help="height and width (default: 72 96)")
    parser.add_argument("--tokens", type=int, default=108, help="of the SparseFormer (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    add_run_arguments(parser, "runs/segmentation_table")
    arguments = parser.parse_args()

    rows = []
    for template, recipe in ROWS.items():
        if arguments.rows and template.partition(",")[0].partition(" ")[0].lower() not in arguments.rows:
            continue
        name = template.format(tokens=arguments.tokens)
        recipe = [part.format(tokens=arguments.tokens) for part in recipe]
        folders = [train(arguments, name, recipe, seed) for seed in arguments.seeds]
        rows.append({"row": name, **measure(arguments, folders)})
        print(format_table([{k: v for k, v in row.items() if k != "mean_ious"} for row in rows]), flush=True)
    write_table(
        arguments.results_dir / "segmentation.json",
        {name: getattr(arguments, name) for name in ("image_size", "tokens", "epochs", "seeds")},
        rows,
        data="CamVid, 200 training and 60 validation images, 11 classes, scored at 240 x 320 pixels",
        threads=torch.get_num_threads(),
    )


def train(arguments, name: str, recipe: list[str], seed: int) -> Path:
    """The folder of a model, trained now or before."""
    folder = arguments.runs_dir / folder_name(name, seed)
    run_training(
        segment,
        folder,
        [
            *("--dataset", *arguments.dataset, "--eval-dataset", *arguments.eval_dataset),
            *("--class-names", *CLASSES, "--ignored-labels", str(VOID), "--seed", str(seed)),
            *("--image-size", *map(str, arguments.image_size), "--epochs", str(arguments.epochs)),
            *("--batch-size", "8", "--warmup-steps", "50", "--drop-path", "0", "--scale", "0.8", "2"),
            *recipe,
        ],
    )
    return folder


def measure(arguments, folders: list[Path]) -> dict[str, object]:
    """Scores over seeds; multiply-accumulates, speed and memory of the first."""
    scores = []
    for folder in folders:
        model, image_format, images, read_mask = load(arguments, folder)
        scores.append(segmentation_scores(model, image_format, images, read_mask))
    model, image_format, images, read_mask = load(arguments, folders[0])
    if model.config.model_type == "sparseformer":
        save_figure(
            picture_of(model, image_format, images.select([5, 30, 50]), read_mask),
            arguments.results_dir / "segmentation.png",
        )
    mean_ious = [score["mean_iou"] for score in scores]
    return {
        "mean_iou": statistics.mean(mean_ious),
        "spread": spread(mean_ious),
        "pixel_accuracy": statistics.mean(score["pixel_accuracy"] for score in scores),
        "parameters": model.num_parameters(),
        "macs_with_attention": count_macs(model, image_format.size).macs_with_attention,
        "images_per_second": images_per_second({"": model}, torch.randn(8, 3, *image_format.size), rounds=7)[""],
        "memory_mb": memory(arguments, folders[0]),
        "mean_ious": mean_ious,
    }


def load(arguments, folder: Path):
    """A model as it was after the last epoch, its image format, the evaluation images and the reader of their masks.
    The folder's own model is that of the best epoch on those images, which would favor the model that varies most."""
    model, processor = load_with_image_processor(
        folder, "cpu", False, "a semantic segmentation model", lambda _: AutoModelForSemanticSegmentation
    )
    last = max(folder.glob("checkpoints/step-*"))
    model.load_state_dict(load_file(last / "model.safetensors"))
    images = load_masked_images(arguments.eval_dataset, "train")
    return model, ImageFormat.from_processor(processor), images, MaskReader(len(CLASSES), [VOID])


# A process of its own: what memory a forward pass adds at its peak. Linux counts the peak anew after a 5 there.
MEMORY = """
import re, sys
import torch
sys.path.insert(0, sys.argv[1])
import segmentation_table
model = segmentation_table.AutoModelForSemanticSegmentation.from_pretrained(sys.argv[2]).eval()
pixel_values = torch.randn(8, 3, int(sys.argv[3]), int(sys.argv[4]))
def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
with torch.inference_mode():
    model(pixel_values=pixel_values)
print(kilobytes("VmHWM") - before)
"""


def memory(arguments, folder: Path) -> float:
    """Megabytes that a forward pass of 8 images adds at its peak, on Linux."""
    command = [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(folder), *map(str, arguments.image_size)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024


if __name__ == "__main__":
    main()
