"""Students of a ViT-S/14 on Caltech-101 at 224 pixels, with a start from the teacher's own patch embedding.

    python benchmarks/caltech101.py teacher --model FOLDER --train TRAIN --test TEST
    python benchmarks/caltech101.py students --train TRAIN --test TEST --tokens 16 36 64 --steps 218
    python benchmarks/caltech101.py table
    python benchmarks/caltech101.py compare --test TEST --tome CHECKOUT
    python benchmarks/caltech101.py tome --train TRAIN --test TEST --tome CHECKOUT --merged 40
    python benchmarks/caltech101.py diffrate --train TRAIN --test TEST --diffrate CHECKOUT
    python benchmarks/caltech101.py features --model FOLDER --train TRAIN --test TEST

`teacher` fine-tunes a pretrained ViT, first on small images. `students` bootstraps from it, without labels: students
whose cells stay on a grid over the whole image (fixed), which are a distilled teacher at a lower resolution, with four
times as many points (fine fixed), the paper's (paper), students with all of the teacher's tokens and its last blocks
alone (3 blocks), and one for six counts of tokens (elastic), also asked with few first and with more where it is not
sure. Test images choose nothing: the last step of each run is what counts. Runs are kept under --runs-dir and found
again; `table` puts all that are there into caltech101_students.json, caltech101_adaptive.json and
caltech101_elastic.png. `compare` is `frugalvit compare` with ToMe (github.com/facebookresearch/ToMe) besides, as it is
off the shelf, and what `diffrate` made (compare_caltech101.json and .png; of other data, named by --title). `tome`
tunes it, too, on the views and by the loss of the students (caltech101_tome.json). `diffrate` first searches its
rates (github.com/OpenGVLab/DiffRate) for the cost of 64 tokens, on the same views with labels, and tunes it then as
ToMe (caltech101_diffrate.json). `features` bootstraps from the pretrained ViT itself on the images of 81 classes, and
judges the embeddings of teacher and student by the 20 others (caltech101_features.json); of other data, with fewer
classes, it bootstraps on all images, without their classes, and judges by all classes.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm

import frugalvit
import token_merging
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images, sample
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import whole_file, write_json
from frugalvit.common.labels import class_names, label_numbers
from frugalvit.common.loading import choose_device, load_image_classifier
from frugalvit.common.num_tokens import using_tokens
from frugalvit.common.precision import choose_mixed_precision
from frugalvit.common.risk import stop_when_sure
from frugalvit.common.tables import format_table
from frugalvit.common.views import EvalView, ImageFormat, seeded
from frugalvit.compare import compare
from frugalvit.contenders import BASELINES, load_students, load_teacher, load_teachers
from frugalvit.evaluation.embeddings import of_classes
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.pictures import save_figure
from frugalvit.training import bootstrap, train
from shared import add_run_arguments, run_training, spread, write_comparison, write_table
from token_merging import contender, diffrate, merging, tome


# Arguments of `frugalvit bootstrap` besides the shared ones.
VARIANTS = {
    "fixed": ["--focusing", "inherited"],
    "fine fixed": ["--focusing", "inherited", "--config-overrides", "patch_size=28"],
    "elastic": ["--focusing", "inherited", "--elastic-token-counts", "9", "16", "25", "36", "49", "64"],
    # With --tokens 256, the teacher's at 224 pixels: as many products as 64 tokens through twelve blocks.
    "3 blocks": ["--focusing", "inherited", "--truncate", "9"],
    "paper": ["--recipe", "paper", "--learning-rate", "2e-3", "--warmup-epochs", "0.5"],
}
# Sureness from which on an image needs no more tokens, and how many it is looked at with.
CONFIDENCES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
LOOKS = [(9, 36), (9, 64), (9, 16, 25, 36, 49, 64)]
# Small objects: every image on a canvas whose sides are so many times its own.
CANVAS = 2.5
BATCH_SIZE = 64
CPU = torch.device("cpu")
# What is compared: variants by what they are called in the picture, and the teacher at as many pixels.
METHODS = {
    "fixed": "SparseFormer, inherited start",
    "elastic": "one SparseFormer, any number of tokens",
    "paper": "SparseFormer, the paper's start",
}
RESOLUTIONS = [56, 84, 112, 168]
CALTECH = "Caltech-101"
# Classes of it that `features` leaves out of bootstrapping.
LEFT_OUT = range(0, 100, 5)


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", help="pretrained ViT to fine-tune")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="of test images")
    parser.add_argument("--tome", help="checkout of ToMe")
    parser.add_argument("--diffrate", help="checkout of DiffRate")
    parser.add_argument("--search-macs", type=float, default=1.43e9, help="that DiffRate may cost (default: 1.43e9)")
    parser.add_argument("--merged", type=int, nargs="+", default=[8, 12, 16], help="ToMe's r (default: 8 12 16)")
    parser.add_argument("--title", default=CALTECH, help="name of the data (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=600, help="test images to compare with (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each model (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["fixed"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 36, 64], help="default: 16 36 64")
    parser.add_argument("--steps", type=int, nargs="+", default=[218], help=f"of {BATCH_SIZE} views (default: 218)")
    parser.add_argument("--zoom-out", type=float, default=1.0, help="as in training (default: %(default)s)")
    parser.add_argument("--view-epochs", type=int, default=2, help="as in training (default: %(default)s)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--num-workers", type=int, default=0, help="that decode images (default: %(default)s)")
    add_run_arguments(parser, "runs/caltech101")
    arguments = parser.parse_args()
    function, needed = COMMANDS[arguments.what]
    if missing := [name for name in needed if getattr(arguments, name) is None]:
        parser.error(f"{arguments.what} needs --{missing[0]}")
    function(arguments)


def train_teacher(arguments):
    """Fine-tune a teacher for five epochs at half of the size, then for half an epoch at the model's size."""
    shared = [
        *("--dataset", arguments.train, "--eval-split", "none", "--crop", "resized", "--batch-size", str(BATCH_SIZE)),
        *("--mixed-precision", arguments.mixed_precision, "--attn-implementation", "eager", "--layer-decay", "0.85"),
        *("--num-workers", str(arguments.num_workers)),
    ]
    small, teacher = arguments.runs_dir / "teacher-112", arguments.runs_dir / "teacher"
    first = ["--model", arguments.model, "--train-image-size", "112", "--epochs", "5", "--crop-scale", "0.3", "1.0"]
    first += ["--learning-rate", "3e-4", "--head-multiplier", "5", "--warmup-epochs", "0.5", "--mixup", "0.1"]
    run_training(train, small, [*shared, *first])
    second = ["--model", str(small), "--epochs", "1", "--steps-per-epoch", "55", "--crop-scale", "0.4", "1.0"]
    second += ["--learning-rate", "1e-4", "--warmup-epochs", "0.1", "--mixup", "0"]
    run_training(train, teacher, [*shared, *second, "--gradient-accumulation-steps", "4"])
    measured = teacher_on_test(arguments, "test")
    print(f"Teacher: {measured['accuracy']:.2%} of {len(measured['labels']):,} test images.")


def train_students(arguments):
    """Train one student after another, and measure each when it is done."""
    for steps in arguments.steps:
        for seed in arguments.seeds:
            for tokens in arguments.tokens:
                for variant in arguments.variants:
                    for row in train_student(arguments, variant, tokens, steps, seed):
                        print(json.dumps(row), flush=True)


def train_student(arguments, variant: str, tokens: int, steps: int, seed: int) -> list[dict]:
    """Train and measure a student, now or before; return a row for each count of tokens."""
    zoomed = f"-zoom{arguments.zoom_out:g}" if arguments.zoom_out > 1 else ""
    folder = arguments.runs_dir / f"{variant.replace(' ', '-')}-{tokens}tokens-{steps}steps{zoomed}-seed{seed}"
    measured_file = folder / "measured.json"
    if measured_file.is_file():
        return json.loads(measured_file.read_text(encoding="utf-8"))
    epoch = len(load_images([arguments.train], "train")) // BATCH_SIZE
    epochs = max(round(steps / epoch), 1)
    cache = arguments.runs_dir / f"cache{zoomed}-seed{seed}"
    argv = [
        *shared_arguments(arguments, arguments.runs_dir / "teacher", arguments.train, seed),
        *("--epochs", str(epochs), "--steps-per-epoch", str(min(steps, epoch)), "--num-latent-tokens", str(tokens)),
        *("--view-epochs", str(arguments.view_epochs), "--zoom-out", str(arguments.zoom_out), *VARIANTS[variant]),
        *("--teacher-cache", str(cache)),
    ]
    run_training(bootstrap, folder, argv)
    views = epochs * min(steps, epoch) * BATCH_SIZE
    about = {"variant": variant, "views": views, "seed": seed, "zoom_out": arguments.zoom_out}
    measured = [about | row for row in measure_student(arguments, *load_image_classifier(folder, "cpu"))]
    write_json(measured_file, measured)
    return measured


def shared_arguments(arguments, teacher: Path | str, images: Path | str, seed: int) -> list[str]:
    """The options that all students here are bootstrapped with."""
    return [
        *("--teacher", str(teacher), "--dataset", str(images), "--eval-split", "none", "--no-compare"),
        *("--batch-size", str(BATCH_SIZE), "--seed", str(seed), "--mixed-precision", arguments.mixed_precision),
        *("--num-workers", str(arguments.num_workers)),
    ]


@torch.inference_mode()
def teacher_on_test(arguments, images: str) -> dict:
    """The teacher's embeddings of test images, labels and accuracy, measured once."""
    file = arguments.runs_dir / f"teacher-on-{images}.pt"
    if not file.is_file():
        device = choose_device()
        model, processor = load_image_classifier(arguments.runs_dir / "teacher", str(device))
        anatomy = read_anatomy(model, ImageFormat.from_processor(processor).size)
        embeddings, labels = embed(arguments, anatomy.embed, processor, images, device)
        logits = anatomy.classifier(embeddings.to(device)).cpu()
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        torch.save({"embeddings": embeddings, "labels": labels, "accuracy": accuracy}, file)
    return torch.load(file)


@torch.inference_mode()
def measure_student(arguments, model, processor) -> list[dict]:
    """Measure accuracy and cosine with the teacher on the test images, and on the same images as small objects, for
    each count of tokens. A student for several counts also chooses for each image as many as it needs to be sure."""
    counts = model.config.trained_token_counts
    rows = {count: {"tokens": count} for count in counts}
    adaptive = [
        {"looks": list(looks), "confidence": confidence}
        for looks, confidence in itertools.product(LOOKS, CONFIDENCES)
        if {*looks} <= {*counts}
    ]
    for count, row in rows.items():
        with using_tokens(model, count):
            row["macs"] = frugalvit.count_macs(model, model.config.image_size).macs_with_attention
    for images in ("test", "canvas"):
        teacher, logits = teacher_on_test(arguments, images), {}
        for count, row in rows.items():
            with using_tokens(model, count):
                embeddings, labels = embed(
                    arguments, lambda pixels: model.base_model(pixels).pooler_output, processor, images
                )
            logits[count] = model.classifier(embeddings)
            row[images] = {
                "accuracy": (logits[count].argmax(1) == labels).float().mean().item(),
                "teacher_accuracy": teacher["accuracy"],
                "cosine": F.cosine_similarity(embeddings, teacher["embeddings"]).mean().item(),
            }
        for row in adaptive:
            found = {count: (logits[count], rows[count]["macs"]) for count in row["looks"]}
            row[images] = {"teacher_accuracy": teacher["accuracy"]} | measure_adaptive(
                found, labels, row["confidence"]
            )
    return [*rows.values(), *adaptive]


def measure_adaptive(found: dict[int, tuple[torch.Tensor, int]], labels: torch.Tensor, confidence: float) -> dict:
    """Accuracy of `classify_adaptively`, and tokens and cost of an image on average, from the logits with each count
    and their cost."""
    classes, looks = stop_when_sure({count: logits for count, (logits, _) in found.items()}, confidence)
    macs = torch.tensor([float(cost) for _, cost in found.values()]).cumsum(0)
    return {
        "accuracy": (classes == labels).float().mean().item(),
        "tokens": torch.tensor([float(count) for count in found])[looks - 1].mean().item(),
        "macs": macs[looks - 1].mean().item(),
    }


def embed(arguments, model, processor, images: str, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the embeddings of all test images, in float32 on the CPU, and their labels; with "canvas", each image is
    put on a larger one."""
    image_format = ImageFormat.from_processor(processor)
    view = EvalView(image_format)
    records = load_images([arguments.test], "train")
    precision = torch.bfloat16 if arguments.mixed_precision == "bf16" else None
    found, labels = [], []
    for start in tqdm(range(0, len(records), 32), desc=images, leave=False):
        pixels = []
        for index in range(start, min(start + 32, len(records))):
            image = decode_image(records[index]["image"], index)
            if images == "canvas":
                image = put_on_canvas(image, index, image_format)
            pixels.append(view(image)["pixel_values"])
            labels.append(records[index]["label"])
        with torch.autocast(device.type, precision, enabled=precision is not None):
            found.append(model(image_format.normalize(torch.stack(pixels).to(device))).float().cpu())
    return torch.cat(found), torch.tensor(labels)


def put_on_canvas(image: Image.Image, index: int, image_format: ImageFormat) -> Image.Image:
    """A test image as a small object, at a place that its number decides."""
    with seeded(index):
        return v2.RandomZoomOut(image_format.fill, (CANVAS, CANVAS), p=1.0)(image)


def compare_all(arguments):
    """Compare the students that are there, of the first seed and of as many views, with the teacher and its peers."""
    teacher, seed = arguments.runs_dir / "teacher", arguments.seeds[0]
    contenders = load_teachers(str(teacher), "ViT-S/14", BASELINES, RESOLUTIONS, seed=seed)
    for variant, method in METHODS.items():
        for folder in sorted(arguments.runs_dir.glob(f"{variant}-*tokens-{arguments.steps[0]}steps-seed{seed}")):
            tokens = folder.name.split("-")[-3].removesuffix("tokens")
            if int(tokens) in arguments.tokens:
                name = variant if variant == "elastic" else f"{variant}, {tokens} tokens"
                contenders += load_students(str(folder), method, name)
    original, image_processor = load_teacher(str(teacher))
    if arguments.tome:
        contenders += [merging(original, image_processor, arguments.tome, merged) for merged in arguments.merged]
    if arguments.diffrate:
        rates, tuned = (arguments.runs_dir / f"{name}-seed{seed}" for name in ("diffrate-rates", "diffrate"))
        model = diffrate(original, arguments.diffrate, rates, tuned)
        contenders.append(contender("DiffRate, tuned", "DiffRate, tuned", model, original, image_processor))
    fast = choose_mixed_precision(torch.device("cpu")) == "bf16"
    precisions = ["float32", "bf16"] if fast else ["float32"]
    images = sample(load_images([arguments.test], "train"), arguments.limit, seed)
    rows = compare(contenders, images, batch_size=32, precisions=precisions, rounds=arguments.rounds, memory=False)
    name = f"compare_{file_name(arguments)}"
    data = f"{arguments.title}, test images chosen at random, 224 px"
    write_comparison(arguments, name, len(images), rows, data=data)


def file_name(arguments) -> str:
    """The name of the data in names of files."""
    return arguments.title.lower().replace("-", "")


def tune_tome(arguments):
    """Measure ToMe off the shelf, and after one epoch of the students' views, with their loss and rate."""
    teacher, processor = load_teacher(str(arguments.runs_dir / "teacher"))
    rows = []
    for merged in arguments.merged:
        peer = ["--tome", arguments.tome, "--merged", str(merged)]
        runs = {seed: tune_peer(arguments, f"tome{merged}", seed, peer) for seed in arguments.seeds}
        for seed, folder in {None: None, **runs}.items():
            model = tome(teacher, arguments.tome, merged, folder)
            rows.append({"merged": merged, "seed": seed} | measure_peer(arguments, model, teacher, processor))
    write_peers(arguments, "tome", {"merged": arguments.merged}, rows, "seed null: off the shelf")


def tune_diffrate(arguments):
    """Measure DiffRate with rates that were searched, and after one epoch of tuning as for ToMe."""
    teacher, processor = load_teacher(str(arguments.runs_dir / "teacher"))
    peer, rows = ["--diffrate", arguments.diffrate], []
    for seed in arguments.seeds:
        # The rate of `token_merging_table.py`, which found it on CIFAR-10.
        search = [*peer, "--search-macs", str(arguments.search_macs), "--learning-rate", "0.03"]
        rates = run_peer(arguments, "diffrate-rates", seed, search)
        for tuned in (None, tune_peer(arguments, "diffrate", seed, [*peer, "--rates", str(rates)])):
            model = diffrate(teacher, arguments.diffrate, rates, tuned)
            about = {"tuned": tuned is not None, "seed": seed}
            rows.append(about | measure_peer(arguments, model, teacher, processor))
    write_peers(arguments, "diffrate", {"search_macs": arguments.search_macs}, rows, "rates searched with labels")


def run_peer(arguments, name: str, seed: int, argv: list[str]) -> Path:
    """The folder of a peer's epoch on the students' views, run now or before."""
    folder = arguments.runs_dir / f"{name}-seed{seed}"
    shared = [
        *shared_arguments(arguments, arguments.runs_dir / "teacher", arguments.train, seed)[:4],
        *("--eval-split", "none", "--batch-size", str(BATCH_SIZE), "--seed", str(seed)),
        *("--mixed-precision", arguments.mixed_precision, "--crop-scale", "0.5", "1"),
        *("--epochs", "1", "--warmup-epochs", "0.1"),
    ]
    run_training(token_merging, folder, [*shared, *argv])
    return folder


def tune_peer(arguments, name: str, seed: int, argv: list[str]) -> Path:
    """`run_peer` with the students' loss and rate of inherited weights."""
    recipe = ["--loss", "cosine", "--learning-rate", "2e-5", "--weight-decay", "0.05"]
    return run_peer(arguments, name, seed, [*recipe, *argv])


@torch.inference_mode()
def measure_peer(arguments, model, teacher, processor) -> dict:
    """Accuracy on the test images, and cost."""
    embeddings, labels = embed(arguments, lambda pixels: model(pixels).embedding, processor, "test")
    right = teacher.classifier(embeddings).argmax(1) == labels
    macs = frugalvit.count_macs(model, teacher.image_size).macs_with_attention
    return {"accuracy": right.float().mean().item(), "macs": macs, "images": len(labels)}


def write_peers(arguments, name: str, settings: dict, rows: list[dict], remark: str):
    print(format_table(rows))
    write_table(
        arguments.results_dir / f"caltech101_{name}.json",
        settings | {"seeds": arguments.seeds},
        rows,
        data=f"Caltech-101, test images, 224 px; {remark}",
    )


def compare_features(arguments):
    """Judge embeddings by classes that bootstrapping did not see or, of other data than Caltech-101, was not told."""
    runs, seed = arguments.runs_dir, arguments.seeds[0]
    train, test = (load_images([images], "train") for images in (arguments.train, arguments.test))
    kept, epochs, left_out, classes = arguments.train, 2, [], f"all {len(class_names(train))} classes"
    if arguments.title == CALTECH:
        kept, epochs, classes = runs / "kept-classes.parquet", 1, f"{len(LEFT_OUT)} of 101 classes"
        if not kept.is_file():
            chosen = [row for row, label in enumerate(label_numbers(train)) if label not in LEFT_OUT]
            with whole_file(kept) as file:
                train.select(chosen).to_parquet(file)
        left_out = [class_names(train)[label] for label in LEFT_OUT]
        train, test = (of_classes(images, LEFT_OUT) for images in (train, test))
    student = runs / f"features-elastic-seed{seed}"
    argv = [*shared_arguments(arguments, arguments.model, kept, seed), "--epochs", str(epochs), *VARIANTS["elastic"]]
    run_training(bootstrap, student, [*argv, "--num-latent-tokens", "64"])
    contenders = load_teachers(arguments.model, "ViT-S/14", BASELINES, RESOLUTIONS, seed=seed)
    contenders += load_students(str(student), METHODS["elastic"], "student")
    rows = compare(contenders, test, train, batch_size=32, rounds=1, memory=False)
    # Speeds stand in what `compare` writes.
    rows = [{name: value for name, value in row.items() if name != "images_per_second"} for row in rows]
    print(format_table(rows))
    write_table(
        arguments.results_dir / f"{file_name(arguments)}_features.json",
        {"images": len(test), "train_images": len(train), "epochs": epochs, "left_out": left_out},
        rows,
        data=f"{arguments.title}, {classes}, 224 px",
    )


def make_table(arguments):
    """Write the means over the seeds of all runs that are there, for each count of tokens and for
    `classify_adaptively`, and draw one student for all counts beside those for one."""
    groups = {}
    for file in sorted(arguments.runs_dir.glob("*/measured.json")):
        for run in json.loads(file.read_text(encoding="utf-8")):
            key = (run["views"], run["zoom_out"], run["variant"], *run.get("looks", [run.get("tokens")]))
            groups.setdefault((*key, run.get("confidence", 0.0)), []).append(run)
    students, adaptive = [], []
    for _, runs in sorted(groups.items()):
        first = runs[0]
        row = {"student": first["variant"], "views": first["views"], "zoom_out": first["zoom_out"]}
        if "looks" in first:
            row |= {"looks": " → ".join(map(str, first["looks"])), "confidence": first["confidence"]}
            adaptive.append(row | averages(runs, ("tokens", "macs")) | {"seeds": len(runs)})
        else:
            row |= {"tokens": first["tokens"], "macs": first["macs"]}
            students.append(row | averages(runs, ("cosine",)) | {"seeds": len(runs)})
    settings = {"batch_size": BATCH_SIZE, "canvas": CANVAS, "mixed_precision": arguments.mixed_precision}
    for name, rows in (("students", students), ("adaptive", adaptive)):
        if rows:
            print(format_table(rows))
            write_table(
                arguments.results_dir / f"caltech101_{name}.json",
                settings | {"seeds": "as listed"},
                rows,
                data="Caltech-101, 6,982 training and 1,695 test images, 224 px",
            )
    if adaptive:
        save_figure(draw_elastic(students, adaptive), arguments.results_dir / "caltech101_elastic.png")


def averages(runs: list[dict], names: tuple[str, ...]) -> dict[str, float | None]:
    """Means over the seeds of the numbers on the test images, and on the same images as small objects."""
    row = {}
    for images in ("test", "canvas"):
        accuracies = [run[images]["accuracy"] for run in runs]
        row |= {
            f"{images}_accuracy": statistics.mean(accuracies),
            f"{images}_spread": spread(accuracies),
            f"{images}_of_teacher": statistics.mean(accuracies) / runs[0][images]["teacher_accuracy"],
            **{f"{images}_{name}": statistics.mean(run[images][name] for run in runs) for name in names},
        }
    return row


def draw_elastic(students: list[dict], adaptive: list[dict]) -> Figure:
    """Draw accuracy over multiply-accumulates, for objects that fill the image and for small ones."""
    # The students that are compared saw as many views as the one for all counts, of photographs as they are.
    views = adaptive[0]["views"]
    lines = {"one student for each count": [], "one student for all counts": []}
    for row in students:
        if (row["views"], row["zoom_out"]) == (views, 1.0) and row["student"] in ("fixed", "elastic"):
            name = "one student for each count" if row["student"] == "fixed" else "one student for all counts"
            lines[name].append((row["macs"], row["macs"], row))
    for row in adaptive:
        name = f"the same, {row['looks']} until sure"
        lines.setdefault(name, []).append((row["test_macs"], row["canvas_macs"], row))
    figure = Figure(figsize=(11, 4.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for name, points in lines.items():
        for axis, which, images in zip(axes, (0, 1), ("test", "canvas"), strict=True):
            ordered = sorted((point[which] / 1e9, 100 * point[2][f"{images}_accuracy"]) for point in points)
            axis.plot(*zip(*ordered, strict=True), marker="o", markersize=4, label=name)
    for axis, title in zip(axes, ("Photographs", f"On a canvas {CANVAS} times as wide and high"), strict=True):
        axis.set(title=title, xlabel="G multiply-accumulates an image", ylabel="accuracy (%)", xlim=(0.15, 1.6))
        axis.grid(alpha=0.3)
    axes[0].set_ylim(82, 95)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# Functions, and the arguments that they cannot do without.
COMMANDS = {
    "teacher": (train_teacher, ("model", "train", "test")),
    "students": (train_students, ("train", "test")),
    "table": (make_table, ()),
    "compare": (compare_all, ("test",)),
    "tome": (tune_tome, ("train", "test", "tome")),
    "diffrate": (tune_diffrate, ("train", "test", "diffrate")),
    "features": (compare_features, ("model", "train", "test")),
}


if __name__ == "__main__":
    main()
