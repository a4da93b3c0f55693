"""Table 4 of the bootstrapping paper at the scale of CIFAR-10: students beside ToMe and DiffRate on their teacher.

    python benchmarks/token_merging_table.py --tome CHECKOUT --diffrate CHECKOUT

The peers (github.com/facebookresearch/ToMe, github.com/OpenGVLab/DiffRate) run from their own checkouts, off the shelf
and fine-tuned on as many images as a student is bootstrapped on, by distillation from the teacher, without labels like
the student; DiffRate's search for its rates takes as many again, with labels. Runs are kept under --runs-dir and found
again, so that a second command measures speed alone. Writes token_merging.json.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForImageClassification

import frugalvit
import token_merging
from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.files import write_json
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.metrics import evaluate_classifier
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from frugalvit.common.views import EvalView, ImageFormat
from frugalvit.training import bootstrap
from frugalvit.training.components.loaders import evaluation_loader
from shared import add_run_arguments, folder_name, last_accuracies, run_training, write_table


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tome", required=True, help="checkout of ToMe")
    parser.add_argument("--diffrate", help="checkout of DiffRate")
    parser.add_argument("--teacher", default="checkpoints/cifar10-vit", help="default: %(default)s")
    parser.add_argument("--student", default="checkpoints/cifar10-sparseformer", help="default: %(default)s")
    parser.add_argument("--merged", type=int, nargs="+", default=[6, 10, 20], help="ToMe's r (default: 6 10 20)")
    parser.add_argument(
        "--diffrate-share", type=float, default=0.5, help="of the teacher's MACs (default: %(default)s)"
    )
    parser.add_argument("--images", type=int, default=4000, help="embedded training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--search-rate", type=float, default=0.03, help="of DiffRate's search (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="when speed is measured (default: %(default)s)")
    add_run_arguments(parser, "runs/token_merging")
    arguments = parser.parse_args()

    teacher, processor = load_image_classifier(arguments.teacher, "cpu")
    size, image_format = teacher.config.image_size, ImageFormat.from_processor(processor)
    rows, models = [], {}

    def add(name: str, model: nn.Module, training: str | None, trained: list[dict] | None = None):
        """A row; models that differ in weights alone are one in speed."""
        models.setdefault(name, model)
        macs = frugalvit.count_macs(model, size).macs_with_attention
        accuracies = last_accuracies(trained or [evaluate_once(arguments, name, model, macs, image_format)])
        share = macs / rows[0]["macs_with_attention"] if rows else 1.0
        rows.append(
            {"row": name, "training": training, **accuracies, "macs_with_attention": macs, "of_teacher": share}
        )
        print(name, training or "", f"{accuracies['accuracy']:.4f}", flush=True)

    add("teacher", teacher, None)
    add("teacher in timm", token_merging.MergedViT(token_merging.as_timm(teacher)), None)
    for merged in arguments.merged:
        name, peer = f"ToMe@{merged}", ["--tome", arguments.tome, "--merged", str(merged)]
        model = token_merging.tome(teacher, arguments.tome, merged)
        add(name, model, "off the shelf")
        add(name, model, "fine-tuned", [fine_tune(arguments, name, peer, seed) for seed in arguments.seeds])
    if arguments.diffrate:
        name, peer = "DiffRate", ["--diffrate", arguments.diffrate]
        rates = search_rates(arguments, peer, arguments.diffrate_share * rows[0]["macs_with_attention"])
        model = token_merging.diffrate(teacher, arguments.diffrate, rates)
        add(name, model, "rates searched")
        peer += ["--rates", str(rates)]
        add(name, model, "fine-tuned", [fine_tune(arguments, name, peer, seed) for seed in arguments.seeds])
    runs = [bootstrap_student(arguments, seed) for seed in arguments.seeds]
    folder = arguments.runs_dir / folder_name("student", arguments.seeds[0])
    add("student", AutoModelForImageClassification.from_pretrained(folder).eval(), "bootstrapped", runs)
    add("student that ships", load_image_classifier(arguments.student, "cpu")[0], "bootstrapped on more images")

    torch.set_num_threads(arguments.threads)
    pixel_values = torch.randn(64, 3, size, size, generator=torch.Generator().manual_seed(0))
    speeds = images_per_second(models, pixel_values)
    for row in rows:
        row["images_per_second"] = speeds[row["row"]]
    print(format_table([{k: v for k, v in row.items() if k != "accuracies"} for row in rows]))
    settings = ("merged", "diffrate_share", "images", "epochs", "learning_rate", "search_rate", "seeds")
    write_table(
        arguments.results_dir / "token_merging.json",
        {name: getattr(arguments, name) for name in settings},
        rows,
        data=f"CIFAR-10, {arguments.images} embedded training and 2,000 embedded test images, 32 px",
        speed="batches of 64, float32, median of interleaved rounds",
        threads=arguments.threads,
    )


def evaluate_once(arguments, name: str, model: nn.Module, macs: int, image_format: ImageFormat) -> dict:
    """Accuracy of a model that is not trained here, as a run's results, measured now or before."""
    source = {"row": name, "teacher": arguments.teacher, "student": arguments.student, "macs": macs}
    file = arguments.runs_dir / f"{folder_name(name, 0)}-evaluated.json"
    if file.is_file() and (results := json.loads(file.read_text(encoding="utf-8")))["source"] == source:
        return results
    accelerator = Accelerator()
    loader = evaluation_loader(accelerator, load_images(SUBSET, "test"), EvalView(image_format))
    results = {"source": source, "epochs": [evaluate_classifier(accelerator, model, loader)]}
    write_json(file, results)
    return results


def budget(arguments, seed: int) -> list[str]:
    """The options that all trainings share."""
    return [
        *("--train-split", f"train[:{arguments.images}]", "--epochs", str(arguments.epochs)),
        *("--batch-size", "64", "--seed", str(seed), "--teacher", arguments.teacher),
    ]


def fine_tune(arguments, name: str, peer: list[str], seed: int) -> dict:
    """Results of a peer's run with a seed, on the views of the student's recipe."""
    recipe = ["--warmup-epochs", "0.5", "--learning-rate", str(arguments.learning_rate), "--loss", "teacher"]
    folder = arguments.runs_dir / folder_name(name, seed)
    return run_training(token_merging, folder, [*budget(arguments, seed), *recipe, *peer])


def search_rates(arguments, peer: list[str], macs: float) -> Path:
    """The folder of DiffRate's search with the first seed."""
    folder = arguments.runs_dir / folder_name("DiffRate, searched", arguments.seeds[0])
    recipe = ["--warmup-epochs", "0.5", "--learning-rate", str(arguments.search_rate), "--search-macs", str(macs)]
    run_training(token_merging, folder, [*budget(arguments, arguments.seeds[0]), *recipe, *peer])
    return folder


def bootstrap_student(arguments, seed: int) -> dict:
    """Results of a student's run with a seed, by the recipe `small`."""
    folder = arguments.runs_dir / folder_name("student", seed)
    argv = [*budget(arguments, seed), "--recipe", "small"]
    return run_training(bootstrap, folder, argv)


if __name__ == "__main__":
    main()
