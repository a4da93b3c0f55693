"""Road scenes, fine-tuned: SparseFormers with a linear head on their maps, beside their teacher.

    python benchmarks/dense_finetuning.py --teacher VIT --train CAMVID_TRAIN --test CAMVID_TEST --bootstrap trees grid

All learn all weights, from the same images, crops, steps and schedule (`SegmentationTrainer`). The teacher is the
student with all of its patches, which computes the same. All others have 285 tokens: a grid that is not bootstrapped
is the teacher at a lower resolution; students of --bootstrap are those of dense_camvid.py, of the same --runs-dir, one
of them with the head of the paper, too. Scores are those of the test images at the masks' size, after the last epoch.
With --train-only, processes side by side may train seeds. Writes dense_finetuning.json.
"""

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from dense_camvid import SIZE, THIN, TOKENS, TREE, bootstrap_students, make_parser
from segmentation_table import CLASSES, VOID
from transformers import SegformerImageProcessor

from frugalvit import (
    PatchSparseFormerForSemanticSegmentation,
    SegmentationArguments,
    SegmentationTrainer,
    SparseFormerForSemanticSegmentation,
    count_macs,
    read_anatomy,
)
from frugalvit.common.files import write_json
from frugalvit.common.loading import choose_device, load_vision_model
from frugalvit.common.masks import MaskReader, load_masked_images
from frugalvit.common.tables import format_table
from frugalvit.common.views import ImageFormat
from frugalvit.evaluation.segmentation import segmentation_scores
from shared import folder_name, spread, write_table


LINEAR = {"num_labels": len(CLASSES), "decoder_type": "linear"}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="of fine-tuning (default: %(default)s)")
    parser.add_argument("--models", nargs="+", help="names of rows; default: all")
    arguments = parser.parse_args()
    model, processor = load_vision_model(arguments.teacher, "cpu")
    image_format = ImageFormat.from_processor(processor)
    rows = []
    for name, build in models(arguments, model, image_format).items():
        if arguments.models and name not in arguments.models:
            continue
        scores = [finetuned(arguments, name, build, image_format, number) for number in range(len(arguments.seeds))]
        if arguments.train_only:
            continue
        built = build(0)
        row = {"model": name, "macs": count_macs(built, SIZE).macs_with_attention}
        for column, error, values in (
            ("mean_iou", "spread", [score["mean_iou"] for score in scores]),
            (
                "thin_iou",
                "thin_spread",
                [statistics.mean(score["iou"][CLASSES.index(thin)] for thin in THIN) for score in scores],
            ),
        ):
            row |= {column: statistics.mean(values), error: spread(values)}
        rows.append(row)
        print(format_table(rows), flush=True)
    if rows:
        settings = {"teacher": Path(arguments.teacher).name, "seeds": arguments.seeds, "epochs": arguments.epochs}
        settings |= {"bootstrap_epochs": arguments.bootstrap_epochs}
        data = "CamVid, 367 training and 233 test images, 11 classes, scored at 360 x 480 pixels"
        write_table(arguments.results_dir / "dense_finetuning.json", settings, rows, data=data)


def models(arguments, model, image_format: ImageFormat) -> dict[str, Callable[[int], torch.nn.Module]]:
    """Models to fine-tune: from the name of a row to a function of the number of a seed."""
    teacher, count = read_anatomy(model, SIZE), TOKENS[1]
    plain = {"focusing": "inherited", "image_size": list(SIZE), **LINEAR}
    plain |= {"image_mean": image_format.mean, "image_std": image_format.std}

    def from_teacher(number: int, count: int, **placement):
        return SparseFormerForSemanticSegmentation.from_teacher(teacher, count, **plain, **placement)

    def from_student(number: int, kind: str, **fields):
        folders = bootstrap_students(arguments, kind, image_format)
        folder = folders[min(number, len(folders) - 1)]
        student = PatchSparseFormerForSemanticSegmentation.from_pretrained(folder, **{**LINEAR, **fields})
        student.set_num_tokens(count)
        return student

    found = {"teacher": functools.partial(from_teacher, count=teacher.num_patches)}
    found["grid, not bootstrapped"] = functools.partial(from_teacher, count=count)
    found["trees, not bootstrapped"] = functools.partial(from_teacher, count=count, **TREE)
    for kind in arguments.bootstrap:
        found[kind.replace("-", " with ")] = functools.partial(from_student, kind=kind)
        if kind == "grid":
            found["grid, the paper's head"] = functools.partial(from_student, kind=kind, decoder_type="attention")
    return found


def finetuned(arguments, name: str, build: Callable, image_format: ImageFormat, number: int) -> dict:
    """Scores of a model, fine-tuned with a seed of some number now or before."""
    seed = arguments.seeds[number]
    folder = arguments.runs_dir / folder_name(f"{name}, {arguments.epochs} epochs", seed)
    if (folder / "scores.json").is_file():
        return json.loads((folder / "scores.json").read_text())
    torch.manual_seed(seed)
    model = build(number)
    train, test = (load_masked_images([data], "train") for data in (arguments.train, arguments.test))
    processor = SegformerImageProcessor(
        size={"height": SIZE[0], "width": SIZE[1]},
        **{"image_mean": image_format.mean, "image_std": image_format.std, "resample": image_format.resample},
    )
    options = SegmentationArguments(
        output_dir=str(folder),
        seed=seed,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=8,
        ignored_labels=[VOID],
        learning_rate=1e-4,
        layer_decay=0.9,
        warmup_epochs=arguments.epochs / 20,
        scale=[0.8, 2.0],
        bf16=arguments.mixed_precision == "bf16",
        use_cpu=choose_device().type == "cpu",
        dataloader_num_workers=arguments.num_workers,
    )
    SegmentationTrainer(model, options, train, processing_class=processor).train()
    image_format = ImageFormat.from_processor(processor)
    scores = segmentation_scores(model.eval(), image_format, test, MaskReader(len(CLASSES), [VOID]))
    write_json(folder / "scores.json", scores)
    return scores


if __name__ == "__main__":
    main()
