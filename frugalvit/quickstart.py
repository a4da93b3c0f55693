"""`frugalvit quickstart`: from a ViT to a SparseFormer with a quarter of its tokens, on real images, in minutes."""

import shutil
import time
from pathlib import Path

from .common.choices import SUBSET
from .common.comparison import compare_speeds, describe_pair, side_by_side, using_tokens
from .common.data import load_images
from .common.decoding import decode_image
from .common.files import whole_folder, write_json
from .common.loading import choose_device, load_image_classifier
from .common.precision import choose_mixed_precision
from .common.tables import format_table
from .common.versions import origin
from .evaluation.classification import classification_accuracy
from .modeling.hosts import read_anatomy
from .options.quickstart import parse
from .pictures import save_figure
from .predict import draw_predictions, format_labels, predict
from .resources import checkpoint_path
from .training.bootstrap import bootstrap
from .training.components.runs import NOT_IN_REPOSITORY
from .training.options.bootstrap import RECIPES


HELD_BACK_IMAGES = 2000
RECIPE = "small"
# Of which speeds are compared; what results.json says is that of the last.
BATCH_SIZES = (1, 64)


def main(argv: list[str] | None = None) -> None:
    (arguments,) = parse(argv)
    folder = Path(arguments.output_dir)
    claim(folder)
    started = time.perf_counter()

    teacher_path = checkpoint_path("cifar10-vit")
    bf16 = choose_mixed_precision(choose_device()) == "bf16"
    epochs = arguments.epochs or (4 if bf16 else 3)
    views = epochs * RECIPES[RECIPE]["repeats"]
    print(
        f"Bootstrapping a SparseFormer from {teacher_path.name} on {arguments.images:,} images without labels. Each "
        f"is shown {views} times: the bar counts to about {views * arguments.images:,}. After each epoch, the "
        f"student is judged on {HELD_BACK_IMAGES // 4:,} images that are held back; at the end on "
        f"{HELD_BACK_IMAGES:,}, so that the last number is another one."
    )
    counts = arguments.elastic_token_counts
    bootstrap(
        str(teacher_path),
        SUBSET,
        counts,
        folder / "run",
        recipe=RECIPE,
        train_split=f"train[:{arguments.images}]",
        # A glance after every epoch; all held-back images come at the end.
        eval_split=f"test[:{HELD_BACK_IMAGES // 4}]",
        epochs=epochs,
        seed=arguments.seed,
        mixed_precision="bf16" if bf16 else "no",
        compare=False,
    )

    with whole_folder(folder / "model", overwrite=True) as repository:
        shutil.copytree(folder / "run", repository, ignore=NOT_IN_REPOSITORY, dirs_exist_ok=True)

    teacher, teacher_processor = load_image_classifier(teacher_path, "cpu")
    student, student_processor = load_image_classifier(folder / "model", "cpu")
    shipped, shipped_processor = load_image_classifier(checkpoint_path("cifar10-sparseformer"), "cpu")
    images = load_images(SUBSET, f"test[:{HELD_BACK_IMAGES}]")

    def accuracy(model, processor) -> float:
        return classification_accuracy(model, processor, images)["accuracy"]

    anatomy, size = read_anatomy(teacher), (32, 32)
    costs = describe_pair(anatomy, student, size, size)
    speeds = compare_speeds(anatomy, student, size, size, BATCH_SIZES)
    scores = [{"accuracy": accuracy(teacher, teacher_processor)}]
    for count in student.config.trained_token_counts:
        with using_tokens(student, count):
            scores.append({"accuracy": accuracy(student, student_processor)})
    rows = side_by_side(costs, scores, speeds)
    # The student with all of its tokens comes last.
    largest = rows[-1]
    measured = f"images/s, {BATCH_SIZES[-1]}"
    results = {
        "teacher_accuracy": rows[0]["accuracy"],
        "student_accuracy": largest["accuracy"],
        "shipped_student_accuracy": accuracy(shipped, shipped_processor),
        "teacher_tokens": rows[0]["tokens"],
        "student_tokens": largest["tokens"],
        "teacher_images_per_second": rows[0][measured],
        "student_images_per_second": largest[measured],
        "seconds": round(time.perf_counter() - started),
        **origin(),
    }

    shown = [decode_image(images[index]["image"], index) for index in range(0, 60, 10)]
    predictions = predict(student, student_processor, shown, top=3, output_rois=True)
    captions = [format_labels(prediction.labels) for prediction in predictions]
    save_figure(draw_predictions(predictions, captions), folder / "rois.png")
    write_json(folder / "results.json", results)

    print("\nThe student's labels for six held-back images:")
    print("\n".join(f"  {caption}" for caption in captions))
    print(f"\nOn {HELD_BACK_IMAGES} held-back images, both models in this run:\n\n{format_table(rows)}\n")
    times = largest[measured] / rows[0][measured]
    print(
        f"The student keeps {results['student_accuracy'] / results['teacher_accuracy']:.1%} of the teacher's accuracy "
        f"at {times:.2f} times its speed (float32, batches of {BATCH_SIZES[-1]}). The student that ships, of another "
        f"recipe with {shipped.num_parameters():,} parameters and longer training, reaches "
        f"{results['shipped_student_accuracy']:.4g} on these images.\n"
        f"{explain(rows[0], largest)}\n"
        f"Model: {folder / 'model'}   Where its tokens look: {folder / 'rois.png'}   "
        f"{results['seconds']} seconds."
    )


def explain(teacher: dict, student: dict) -> str:
    """What surprises in their rows of the table."""
    lines = []
    if student["parameters"] > teacher["parameters"]:
        lines.append(
            "The student has more parameters, those that choose where its tokens look, and computes less all the "
            "same: a block's parameters are used once for each token, of which there are fewer."
        )
    if student["images/s, 1"] <= teacher["images/s, 1"]:
        lines.append(
            "One image at a time it is no faster: so small a model spends its time on starting operations, of which "
            "it has more, and not on computing."
        )
    return " ".join(lines)


def claim(folder: Path):
    """Refuse a folder with something else in it; a quickstart that was interrupted there goes on."""
    if (folder / "results.json").exists():
        raise ValueError(f"--output {folder} holds a finished quickstart. Give another folder, or remove it.")
    interrupted = (folder / "run" / "run.json").exists()
    if folder.exists() and not interrupted and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output {folder} exists and is not an empty folder. Give another, or empty it.")
    folder.mkdir(parents=True, exist_ok=True)
