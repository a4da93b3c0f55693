"""`frugalvit quickstart`: makes a SparseFormer of a ViT that is several times faster, on photographs, in minutes."""

import time
from pathlib import Path

from .baselines import load_students, load_teachers
from .command_line import CommandParser
from .compare import BATCH_SIZES, ERRORS, compare, draw_comparison, table_rows
from .pictures import save_figure
from .predict import draw_predictions, format_labels, predict
from .training.bootstrap import bootstrap
from .training.choices import NO_EVALUATION
from .training.data import load_images
from .training.decoding import decode_image
from .training.files import checkpoint_path, only_in_a_clone, shipped_checkpoints, shipped_images, write_json
from .training.loading import choose_device, load_model
from .training.precision import choose_mixed_precision
from .training.text import format_table
from .versions import origin


TEACHER = "caltech101-vit"
TOKENS = [9, 16, 25, 36, 49, 64]
# At these sizes the teacher costs about as much as 16, 36 and 64 tokens.
RESOLUTIONS = [56, 84, 112]
# Photographs to learn from, photographs to test on and timed passes; of --quick.
SIZES = (560, 300, 3)
QUICK_SIZES = (56, 30, 1)
# For few photographs more and smaller steps than the recipe's are better.
BATCH_SIZE = 8
LEARNING_RATE = 5e-4
# Tokens of the picture.
DRAWN_TOKENS = 16


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit quickstart",
        description="Turn a ViT that comes with the repository into a SparseFormer that is several times faster, on "
        "photographs without labels, and compare both on other photographs. Writes student/, comparison.png, rois.png "
        "and results.json.",
    )
    parser.add_argument("--output", metavar="DIR", default="quickstart", help="output folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for order and crops (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the photographs: shows that it works, not how well"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    photographs = shipped_images("caltech101")
    folder = Path(arguments.output)
    if TEACHER not in shipped_checkpoints() or not (photographs / "train.parquet").is_file():
        raise only_in_a_clone("What the quickstart works with, a teacher and photographs,")
    teacher = str(checkpoint_path(TEACHER))
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} - {"student"}:
        raise ValueError(f"--output {folder} is neither empty nor an interrupted quickstart; give another folder.")
    num_train, num_test, rounds = QUICK_SIZES if arguments.quick else SIZES
    device = choose_device()
    bf16 = choose_mixed_precision(device) == "bf16"
    precision = "bf16" if bf16 else "float32"
    started = time.perf_counter()

    print(
        f"From a ViT-S/14 with 256 tokens to a SparseFormer with {TOKENS[0]} to {TOKENS[-1]}, a number that each call "
        f"chooses, in about three minutes on two CPU cores.\n\n1/3  The student learns from {num_train} photographs "
        "without labels to embed them as its teacher does.\n"
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
        seed=arguments.seed,
        bf16=bf16,
        use_cpu=device.type == "cpu",
    )

    print(f"\n2/3  Both on {num_test} photographs that were held back, and the teacher with smaller images.\n")
    images = load_images([str(photographs / "test.parquet")], f"train[:{num_test}]")
    baselines = load_teachers(teacher, "ViT-S/14", RESOLUTIONS, device=str(device))
    baselines += load_students(str(folder / "student"), "student", device=str(device))
    rows = compare(baselines, images, precisions=[precision], rounds=rounds)
    save_figure(draw_comparison(rows), folder / "comparison.png")

    print(f"3/3  Where {DRAWN_TOKENS} tokens look.\n")
    student, processor = load_model(folder / "student", "image-classification", "cpu")
    shown = [decode_image(images[index]["image"], index) for index in range(4)]
    student.set_num_tokens(DRAWN_TOKENS)
    predictions = predict(student, processor, shown, top=1, output_rois=True)
    captions = [format_labels(prediction) for prediction in predictions]
    save_figure(draw_predictions(predictions, captions), folder / "rois.png")
    seconds = round(time.perf_counter() - started)
    settings = {"photographs": num_train, "held_back": len(images), "precision": precision, "seed": arguments.seed}
    write_json(folder / "results.json", {**settings, "seconds": seconds, **origin(), "rows": rows})

    print(
        f"{format_table(table_rows(rows))}\n\n{ERRORS}images/s are those of batches of "
        f"{BATCH_SIZES[-1]} in {precision}. It took {seconds} seconds. In {folder}: student/, comparison.png, "
        "rois.png, results.json.\n\nNext, with your own ViT and your own photographs, which need no labels:\n"
        "  frugalvit bootstrap --teacher YOUR_VIT --dataset PHOTOGRAPHS --num_tokens "
        f"{' '.join(map(str, TOKENS))} --num_train_epochs 1 --output_dir student\n"
        "  frugalvit compare YOUR_VIT student --dataset PHOTOGRAPHS --output comparison\n"
        "  frugalvit predict PHOTOGRAPHS --model student --num-tokens 36"
    )
