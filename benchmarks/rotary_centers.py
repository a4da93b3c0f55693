"""Should gradients reach RoIs through rotary positions? A small DINOv3 is trained on embedded CIFAR-10 images and
bootstrapped with and without, all else being equal.

    python benchmarks/rotary_centers.py

Runs are kept under --runs-dir and found again. Writes rotary_centers.json.
"""

import argparse
import contextlib
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torchvision.transforms import v2
from tqdm import trange
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, ViTImageProcessor, get_scheduler

from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.tables import format_table
from frugalvit.common.views import EvalView, ImageFormat
from frugalvit.modeling.layers import rotary_table
from frugalvit.modeling.modeling_sparseformer import SparseFormerModel
from frugalvit.training import bootstrap
from shared import STUDENT, add_run_arguments, folder_name, last_accuracies, run_training, spread, write_table


# timm's DINOv3 ViT, made small: rotary positions alone, registers, layer scale.
TEACHER = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 4, "init_values": 0.1}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6000, help="embedded training images (default: %(default)s)")
    parser.add_argument("--teacher-epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="of bootstrapping (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="default: %(default)s")
    add_run_arguments(parser, "runs/rotary_centers")
    arguments = parser.parse_args()

    teacher = arguments.runs_dir / "teacher"
    if not (teacher / "config.json").is_file():
        train_teacher(teacher, arguments.images, arguments.teacher_epochs)
    rows = []
    for name, context in (("detached", contextlib.nullcontext), ("with gradient", gradient_through_centers)):
        with context():
            measured = [bootstrap_student(arguments, teacher, name, seed) for seed in arguments.seeds]
        cosines = [result["epochs"][-1]["alignment"] for result in measured]
        rows.append(
            {
                "centers": name,
                "cosine": sum(cosines) / len(cosines),
                "cosine_spread": spread(cosines),
                **last_accuracies(measured),
                "teacher_accuracy": measured[0]["best"]["teacher_accuracy"],
            }
        )
        print(format_table([{k: v for k, v in row.items() if k != "accuracies"} for row in rows]), flush=True)
    settings = ("images", "teacher_epochs", "epochs", "learning_rate", "seeds")
    write_table(
        arguments.results_dir / "rotary_centers.json",
        {name: getattr(arguments, name) for name in settings},
        rows,
        data=f"CIFAR-10, {arguments.images} embedded training and 2,000 embedded test images, 32 px",
        teacher=TEACHER,
    )


def bootstrap_student(arguments, teacher: Path, name: str, seed: int) -> dict:
    argv = [
        *("--teacher", str(teacher), "--train-split", f"train[:{arguments.images}]", "--seed", str(seed)),
        *("--batch-size", "64", "--epochs", str(arguments.epochs), "--learning-rate", str(arguments.learning_rate)),
        *("--config-overrides", STUDENT, "--token-loss-weight", "2", "--recipe", "paper", "--no-compare"),
    ]
    return run_training(bootstrap, arguments.runs_dir / folder_name(name, seed), argv)


def gradient_through_centers():
    """Students whose rotary positions let gradients into the RoIs, inside."""

    def rotation(self, rois):
        config, (left_top, right_bottom) = self.config, rois.float().chunk(2, dim=-1)
        centers = ((left_top + right_bottom) * 0.5).flip(-1)
        head_dim = config.hidden_size // config.num_attention_heads
        table = rotary_table(centers, config.rope_theta, config.rope_scale, config.rope_shift, head_dim)
        return {"position_embeddings": table}

    return mock.patch.object(SparseFormerModel, "rotation", rotation)


def train_teacher(folder: Path, images: int, epochs: int, batch_size: int = 64):
    """A DINOv3 from scratch: AdamW, one cosine, crops of padded images and flips."""
    torch.manual_seed(0)
    config = TimmWrapperConfig(architecture="vit_small_patch16_dinov3", model_args=TEACHER, num_labels=10)
    model = TimmWrapperForImageClassification(config)
    view = EvalView(ImageFormat((32, 32)))
    data = load_images([SUBSET], f"train[:{images}]")
    pixels = torch.stack([view(decode_image(record["image"], i))["pixel_values"] for i, record in enumerate(data)])
    labels = torch.tensor(data["label"])
    augment = v2.Compose([v2.RandomCrop(32, padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * (images // batch_size)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    model.train()
    for step in trange(steps, desc="teacher"):
        if step % (images // batch_size) == 0:
            order = torch.randperm(images)
        index = order[step % (images // batch_size) * batch_size :][:batch_size]
        batch = torch.stack([augment(image) for image in pixels[index]]).float().div_(127.5).sub_(1)
        loss = F.cross_entropy(model(batch).logits, labels[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


if __name__ == "__main__":
    main()
