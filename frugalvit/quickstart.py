"""`frugalvit quickstart`: bootstrap a SparseFormer from a ViT on photographs, and compare the two models."""

import time
from dataclasses import dataclass
from pathlib import Path

from .baselines import load_students, load_teachers
from .command_line import argument, read_options
from .compare import BATCH_SIZES, ERRORS, compare, draw_comparison, table_rows
from .pictures import save_figure
from .predict import draw_predictions, format_labels, predict
from .training.arguments import CheckedArguments
from .training.bootstrap import bootstrap
from .training.choices import NO_EVALUATION
from .training.data import load_images
from .training.files import checkpoint_path, only_in_a_clone, shipped_checkpoints, shipped_images, write_json
from .training.loading import choose_device, choose_mixed_precision, load_model
from .training.preprocessing import decode_image
from .training.text import format_table
from .versions import origin


PROG = "frugalvit quickstart"
TEACHER = "caltech101-vit"
TOKENS = [9, 16, 25, 36, 49, 64]
# Numbers of tokens to compare. The student with 16 tokens costs about as much as the teacher on images of 56 pixels,
# and the student with 36 tokens about as much as the teacher on images of 84 pixels.
COMPARED_TOKENS = [9, 16, 36]
RESOLUTIONS = [56, 84]
# Numbers of photographs for training and for testing.
NUM_IMAGES = (560, 300)
QUICK_NUM_IMAGES = (56, 30)
ROUNDS = 2
# On few photographs, a smaller batch size and learning rate than the defaults give better students.
BATCH_SIZE = 8
LEARNING_RATE = 5e-4
DRAWN_TOKENS = 16


@dataclass(kw_only=True)
class QuickstartOptions(CheckedArguments):
    """Turn a ViT that comes with the repository into a SparseFormer that is several times faster. The training needs
    photographs without labels. Both models are then compared on other photographs. The output folder has student/,
    comparison.png, rois.png and results.json."""

    output: str = argument("quickstart", "Output folder.", metavar="FOLDER")
    seed: int = argument(0, "Seed of the order and the crops of the photographs.")
    quick: bool = argument(False, "Use a tenth of the photographs: a test of the installation, not of the method.")


def main(argv: list[str] | None = None) -> None:
    options = read_options(QuickstartOptions, PROG, argv)
    photographs = shipped_images("caltech101")
    folder = Path(options.output)
    if TEACHER not in shipped_checkpoints() or not (photographs / "train.parquet").is_file():
        raise only_in_a_clone("The quickstart's data, a teacher and photographs,")
    teacher = str(checkpoint_path(TEACHER))
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} - {"student"}:
        raise ValueError(f"output {folder} is neither empty nor an interrupted quickstart; give another folder.")
    num_train, num_test = QUICK_NUM_IMAGES if options.quick else NUM_IMAGES
    device = choose_device()
    bf16 = choose_mixed_precision(device) == "bf16"
    precision = "bf16" if bf16 else "float32"
    started = time.perf_counter()

    print(
        f"From a ViT-S/14 with 256 tokens to a SparseFormer with {TOKENS[0]} to {TOKENS[-1]}, a number that each call "
        "chooses. It takes two to six minutes on two CPU cores.\n\n"
        f"1/3  The student learns from {num_train} photographs without labels to embed them as its teacher does.\n"
    )
    bootstrap(
        teacher,
        str(photographs / "train.parquet"),
        TOKENS,
        folder / "student",
        train_split=f"train[:{num_train}]",
        eval_split=NO_EVALUATION,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=options.seed,
        bf16=bf16,
        use_cpu=device.type == "cpu",
    )

    print(f"\n2/3  Student and teacher, also on smaller images, are compared on {num_test} other photographs.\n")
    images = load_images([str(photographs / "test.parquet")], f"train[:{num_test}]")
    baselines = load_teachers(teacher, "ViT-S/14", RESOLUTIONS, device=str(device))
    students = load_students(str(folder / "student"), "student", device=str(device))
    baselines += [student for student in students if student.model.num_tokens in COMPARED_TOKENS]
    rows = compare(baselines, images, precisions=[precision], rounds=ROUNDS)
    save_figure(draw_comparison(rows), folder / "comparison.png")

    print(f"3/3  A picture of the RoIs of {DRAWN_TOKENS} tokens.\n")
    student, processor = load_model(folder / "student", "image-classification", "cpu")
    shown = [decode_image(images[index]["image"], index) for index in range(4)]
    predictions = predict(student, processor, shown, num_tokens=DRAWN_TOKENS, top=1, output_rois=True)
    captions = [format_labels(prediction) for prediction in predictions]
    save_figure(draw_predictions(predictions, captions), folder / "rois.png")
    seconds = round(time.perf_counter() - started)
    settings = {"photographs": num_train, "held_back": len(images), "precision": precision, "seed": options.seed}
    write_json(folder / "results.json", {**settings, "seconds": seconds, **origin(), "rows": rows})

    print(
        f"{format_table(table_rows(rows))}\n\n{ERRORS}images/s are those of batches of "
        f"{BATCH_SIZES[-1]} in {precision}. It took {seconds} seconds. In {folder}: student/, comparison.png, "
        "rois.png, results.json.\n\nNext, with your own ViT and your own photographs, which need no labels:\n"
        "  frugalvit bootstrap --teacher YOUR_VIT --dataset PHOTOGRAPHS --num_tokens "
        f"{' '.join(map(str, TOKENS))} --num_train_epochs 1 --output_dir student\n"
        "  frugalvit compare YOUR_VIT student --dataset PHOTOGRAPHS --output comparison\n"
        "  frugalvit predict PHOTOGRAPHS --model student --num_tokens 36"
    )
