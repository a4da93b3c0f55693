"""Measure semantic segmentation of road scenes (CamVid) by a SparseFormer, a plain ViT and a SegFormer.

    python benchmarks/segmentation_table.py --dataset camvid-train.parquet --eval-dataset camvid-val.parquet

Three models are trained with the same images, crops, number of steps and schedule:

- SparseFormer: the shipped bootstrapped classifier, with a segmentation head and more tokens;
- ViT: the teacher of this SparseFormer, with a linear head on the patches;
- SegFormer: Transformers' model with about the same multiply-accumulates as the SparseFormer. Its weights are random,
  because no SegFormer is pretrained on the same images as the two other models.

Scores are measured at the resolution of the masks, after the last epoch. Speed and memory of inference are also
measured. Finished runs under --runs-dir are reused, so an interrupted command can be repeated. Seeds can run in
parallel. The output is segmentation.json.
"""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSemanticSegmentation, ViTConfig, ViTModel, ViTPreTrainedModel
from transformers.modeling_outputs import SemanticSegmenterOutput

import shared
from frugalvit import count_macs
from frugalvit.evaluation.segmentation import segmentation_scores
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.speed import images_per_second
from frugalvit.training import segment
from frugalvit.training.loading import load_model
from frugalvit.training.masks import MaskReader, load_masked_images


# Classes of CamVid, merged as in SegNet. Label 11 is void.
CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "cyclist"]
VOID = 11
SIZE = [72, 96]
TOKENS = 108
SEGFORMER = (
    "depths=[3,4,6,3],hidden_sizes=[64,128,320,512],num_attention_heads=[1,2,5,8],decoder_hidden_size=256,"
    "classifier_dropout_prob=0.1"
)


class ViTLinearForSemanticSegmentation(ViTPreTrainedModel):
    """A ViT with a linear classifier on each patch. Position embeddings are interpolated to the image size."""

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

# Arguments of `frugalvit segment` for each row, by row name.
ROWS = {
    f"SparseFormer, {TOKENS} tokens": [
        *("--model", "checkpoints/cifar10-sparseformer", "--num_latent_tokens", str(TOKENS)),
        *("--learning_rate", "5e-4", "--head_multiplier", "2", "--layer_decay", "0.9"),
    ],
    "ViT, linear head": [
        *("--model", "checkpoints/cifar10-vit", "--learning_rate", "5e-4", "--head_multiplier", "2"),
        *("--layer_decay", "0.9"),
    ],
    "SegFormer from scratch": [
        *("--model_type", "segformer", "--config_overrides", SEGFORMER, "--learning_rate", "1e-3"),
        *("--head_multiplier", "1", "--layer_decay", "1"),
    ],
}


def main():
    parser = shared.make_parser(__doc__)
    parser.add_argument("--dataset", nargs="+", required=True, help="CamVid to train on, as in `frugalvit segment`")
    parser.add_argument("--eval-dataset", nargs="+", required=True, help="CamVid to evaluate on")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    shared.add_run_arguments(parser, "runs/segmentation_table")
    arguments = parser.parse_args()

    settings = {"image_size": SIZE, "tokens": TOKENS, "epochs": arguments.epochs, "seeds": arguments.seeds}
    rows = []
    for name, options in ROWS.items():
        folders = [train(arguments, name, options, seed) for seed in arguments.seeds]
        rows.append({"row": name, **measure(arguments, folders)})
        data = "CamVid, 200 training and 60 validation images, 11 classes, scored at 240 x 320 pixels"
        shared.write_table(arguments.results_dir / "segmentation.json", settings, rows, data=data)


def train(arguments, name: str, options: list[str], seed: int) -> Path:
    folder = arguments.runs_dir / shared.folder_name(name, seed)
    argv = [
        *("--dataset", *arguments.dataset, "--eval_dataset", *arguments.eval_dataset, "--seed", str(seed)),
        *("--class_names", *CLASSES, "--ignored_labels", str(VOID), "--image_size", *map(str, SIZE)),
        *("--num_train_epochs", str(arguments.epochs), "--per_device_train_batch_size", "8"),
        *("--warmup_steps", "50", "--drop_path", "0", "--scale", "0.8", "2", *options),
    ]
    shared.run_training(segment, folder, argv)
    return folder


def measure(arguments, folders: list[Path]) -> dict[str, object]:
    """Measure the scores of all seeds. Also measure multiply-accumulates, speed and memory, which are the same for all
    seeds."""
    images, read_mask = load_masked_images(arguments.eval_dataset, "train"), MaskReader(len(CLASSES), [VOID])
    model, processor = load(folders[0])
    image_format = ImageFormat.from_processor(processor)
    scores = [segmentation_scores(load(folder)[0], image_format, images, read_mask) for folder in folders]
    mean_ious = [score["mean_iou"] for score in scores]
    return {
        "mean_iou": statistics.mean(mean_ious),
        "spread": shared.spread(mean_ious),
        "pixel_accuracy": statistics.mean(score["pixel_accuracy"] for score in scores),
        "parameters": model.num_parameters(),
        "macs_with_attention": count_macs(model, image_format.size).macs_with_attention,
        "images_per_second": images_per_second({"": model}, torch.randn(8, 3, *image_format.size), rounds=7)[""],
        "memory_mb": shared.peak_memory(make_pass, folders[0], image_format.size),
        "mean_ious": mean_ious,
    }


def load(folder: Path):
    return load_model(folder, "image-segmentation", "cpu")


def make_pass(folder: Path, size: tuple[int, int]) -> Callable[[], object]:
    return functools.partial(load(folder)[0].eval(), torch.randn(8, 3, *size))


if __name__ == "__main__":
    main()
