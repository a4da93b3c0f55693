"""Measure students that are bootstrapped from a ViT-S/14, on images of Caltech-101 with 224 x 224 pixels.

    python benchmarks/caltech101.py students --train TRAIN --test TEST --tokens 16 36 64 --steps 218
    python benchmarks/caltech101.py table
    python benchmarks/caltech101.py compare --test TEST --tome CHECKOUT --diffrate CHECKOUT
    python benchmarks/caltech101.py shipped --test TEST --results-dir results
    python benchmarks/caltech101.py tome --train TRAIN --test TEST --tome CHECKOUT --merged 40
    python benchmarks/caltech101.py diffrate --train TRAIN --test TEST --diffrate CHECKOUT
    python benchmarks/caltech101.py features --model FOLDER --train TRAIN --test TEST
    python benchmarks/caltech101.py photographs --train TRAIN --test TEST

- `students` bootstraps the VARIANTS from a fine-tuned ViT (--teacher), without labels. The elastic variant is also
  measured with adaptive numbers of tokens. The model of the last step is measured, so test images do not select a
  model.
- `table` averages all runs and writes caltech101_students.json, caltech101_adaptive.json and caltech101_elastic.png.
- `compare` compares students, the teacher, ToMe (github.com/facebookresearch/ToMe) without tuning, and tuned DiffRate.
  The output is compare_caltech101.json and .png. For other data, --title changes the names of these files.
- `shipped` compares the student in checkpoints/ with its teacher, and with the teacher on smaller images before and
  after fine-tuning. The output is shipped_caltech101.json and .png.
- `tome` and `diffrate` (github.com/OpenGVLab/DiffRate) tune ToMe and DiffRate on the students' views with the
  students' loss. Before this tuning, `diffrate` searches DiffRate's rates with labels.
- `features` bootstraps from a pretrained ViT (--model) without the images of 20 classes, and tests embeddings on these
  classes (caltech101_features.json). If --title names other data, bootstrapping and test use all classes.
- `photographs` writes the data of `frugalvit quickstart`: random images of the training data and of the test data.

Finished runs under --runs-dir are reused.
"""

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm

import shared
from frugalvit import checkpoint_path
from frugalvit.baselines import LOWER_RESOLUTION, Baseline, WithTokens, load_students, load_teacher, load_teachers
from frugalvit.compare import compare, describe_score, embed_all
from frugalvit.evaluation.knn import neighbor_scores
from frugalvit.macs import count_macs
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.pictures import save_figure
from frugalvit.training import bootstrap
from frugalvit.training.data import class_names, label_numbers, load_images, sample
from frugalvit.training.files import atomic_file
from frugalvit.training.loading import choose_device, choose_mixed_precision, load_model
from frugalvit.training.preprocessing import decode_image
from frugalvit.training.views import EvalView, seeded
from linear_probe import fit_probe
from token_merging import SEARCH_RATE, MergedViT, baseline, diffrate, merging, tome, tune, with_random_patches


# Additional arguments of `frugalvit bootstrap` for each variant.
VARIANTS = {
    "fixed": [],
    "elastic": ["--num_tokens", "9", "16", "25", "36", "49", "64"],
    # `--truncate 9` leaves 3 of the 12 blocks. Their linear layers cost as much with 256 tokens (one for each patch)
    # as the linear layers of 12 blocks with 64 tokens.
    "3 blocks": ["--truncate", "9"],
    "paper": ["--focusing", "paper", "--preset", "paper", "--learning_rate", "2e-3", "--warmup_steps", "54"],
}
# Settings of `classify_adaptively`: values of `confidence`, and values of `token_counts`.
CONFIDENCES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
LOOKS = [(9, 36), (9, 64), (9, 16, 25, 36, 49, 64)]
# Views of a test image: the image itself, the image on a plain canvas, and the image on another photograph. The canvas
# and the other photograph are `CANVAS` times as wide and as high as the image.
VIEWS = ("photographs", "small", "small, on photographs")
CANVAS = 2.5
# The views on which students are measured, by the prefix of their columns in the tables.
SEEN = {"test": VIEWS[0], "canvas": VIEWS[1]}
BATCH_SIZE = 64
# `METHODS`: labels of the variants in pictures. `RESOLUTIONS`: image sizes in pixels at which the teacher is compared
# with students.
METHODS = {
    "fixed": "SparseFormer, inherited start",
    "elastic": "one SparseFormer, any number of tokens",
    "paper": "SparseFormer, the paper's start",
}
RESOLUTIONS = [56, 84, 112, 168]
# Method of students with other seeds, which are measured but not drawn.
SEEDS = "student with another seed"
FINE_TUNED = "teacher, fine-tuned with labels for each size of images"
CALTECH = "Caltech-101"
# Labels of the classes whose images `compare_features` excludes from bootstrapping.
LEFT_OUT = range(0, 100, 5)


def main():
    parser = shared.make_parser(__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--teacher", default=str(checkpoint_path("caltech101-vit")), help="default: caltech101-vit")
    parser.add_argument("--model", help="pretrained ViT without a classifier")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="parquet file or folder of test images")
    parser.add_argument("--tome", help="checkout of ToMe")
    parser.add_argument("--diffrate", help="checkout of DiffRate")
    parser.add_argument("--search-macs", type=float, default=1.43e9, help="of DiffRate (default: 1.43e9)")
    parser.add_argument("--merged", type=int, nargs="+", default=[8, 12, 16], help="ToMe's r (default: 8 12 16)")
    parser.add_argument("--title", default=CALTECH, help="name of the data (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=600, help="test images to compare with (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each model (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["fixed"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 36, 64], help="default: 16 36 64")
    parser.add_argument("--steps", type=int, nargs="+", default=[218], help=f"of {BATCH_SIZE} views (default: 218)")
    shared.add_precision_argument(parser, "bf16")
    shared.add_run_arguments(parser, "runs/caltech101")
    run_command(parser, COMMANDS)


def run_command(parser, commands: Mapping[str, tuple[Callable, tuple[str, ...]]]):
    """Parse the command line, check that the options of the chosen command are given, and run the command."""
    arguments = parser.parse_args()
    function, needed = commands[arguments.what]
    if missing := [name for name in needed if getattr(arguments, name) is None]:
        parser.error(f"{arguments.what} needs --{missing[0]}")
    function(arguments)


def train_students(arguments):
    for steps, seed, tokens, variant in itertools.product(
        arguments.steps, arguments.seeds, arguments.tokens, arguments.variants
    ):
        shared.print_rows(train_student(arguments, variant, tokens, steps, seed))


def train_student(arguments, variant: str, tokens: int, steps: int, seed: int) -> list[dict]:
    """Train and measure a student, or reuse its run. Return a row for each number of tokens."""
    folder = arguments.runs_dir / f"{variant.replace(' ', '-')}-{tokens}tokens-{steps}steps-seed{seed}"
    argv = shared_arguments(arguments, arguments.teacher, arguments.train, seed)
    argv += ["--max_steps", str(steps), "--num_tokens", str(tokens), *VARIANTS[variant]]
    shared.run_training(bootstrap, folder, argv)
    about = {"variant": variant, "views": steps * BATCH_SIZE, "seed": seed}
    options = shared.describe_options(arguments, "test")
    return shared.measured_once(
        folder, lambda folder: [about | row for row in measure_student(arguments, folder)], options
    )


def shared_arguments(arguments, teacher: Path | str, images: Path | str, seed: int) -> list[str]:
    return [
        *("--teacher", str(teacher), "--dataset", str(images), "--eval_split", "none", "--seed", str(seed)),
        *("--per_device_train_batch_size", str(BATCH_SIZE), *shared.precision_arguments(arguments)),
    ]


@torch.no_grad()
def measure_student(arguments, folder: Path) -> list[dict]:
    """Measure a student's accuracy, and its cosine with the teacher, on the views in `SEEN`. Return a row for each
    number of tokens, and for each setting of `classify_adaptively` that the student's numbers of tokens allow."""
    model, processor = load_model(folder, "image-classification", "cpu")
    teacher, _ = load_teacher(arguments.teacher, str(choose_device()))
    counts, image_format = model.config.trained_token_counts, ImageFormat.from_processor(processor)
    rows = {
        count: {"tokens": count, "macs": count_macs(WithTokens(model, count), image_format.size).macs_with_attention}
        for count in counts
    }
    adaptive = [
        {"looks": list(looks), "confidence": confidence}
        for looks, confidence in itertools.product(LOOKS, CONFIDENCES)
        if {*looks} <= {*counts}
    ]
    base, teacher_classifier = model.base_model.to(choose_device()), teacher.classifier.cpu()
    for images, view in SEEN.items():
        expected, labels = outputs_for(arguments, teacher.embed, image_format, view)
        of_teacher, logits = {"teacher_accuracy": accuracy_of(teacher_classifier(expected), labels)}, {}
        for count, row in rows.items():
            embeddings, _ = outputs_for(arguments, functools.partial(pooled, base, count), image_format, view)
            logits[count] = model.classifier(embeddings)
            cosine = F.cosine_similarity(embeddings, expected).mean().item()
            row[images] = of_teacher | {"accuracy": accuracy_of(logits[count], labels), "cosine": cosine}
        for row in adaptive:
            found = {count: (logits[count], rows[count]["macs"]) for count in row["looks"]}
            row[images] = of_teacher | measure_adaptive(found, labels, row["confidence"])
    return [*rows.values(), *adaptive]


def pooled(model, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    return model(pixel_values, num_tokens=num_tokens).pooler_output


def measure_adaptive(found: dict[int, tuple[torch.Tensor, int]], labels: torch.Tensor, confidence: float) -> dict:
    """For `classify_adaptively`, compute the accuracy, the mean number of tokens and the mean number of
    multiply-accumulates. `found` maps each number of tokens to the logits and the multiply-accumulates of a forward
    pass with this number of tokens."""
    scores, classes = torch.stack([logits.softmax(1) for logits, _ in found.values()]).max(-1)
    sure = scores >= confidence
    sure[-1] = True
    looks = sure.int().argmax(0)
    macs = torch.tensor([float(cost) for _, cost in found.values()]).cumsum(0)
    return {
        "accuracy": (classes.gather(0, looks[None])[0] == labels).float().mean().item(),
        "tokens": torch.tensor([float(count) for count in found])[looks].mean().item(),
        "macs": macs[looks].mean().item(),
    }


@functools.lru_cache(len(VIEWS))
def test_images(
    test: str, image_format: ImageFormat, view: str, backgrounds: str | None = None, limit: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the test images in one of `VIEWS`, `(images, 3, height, width)` uint8, and their labels."""
    records, view_of = sample(load_images([test], "train"), limit, seed=0), EvalView(image_format)
    shown = tqdm(views_of(records, image_format, view, backgrounds), view, len(records), leave=False)
    pixels = [view_of(image)["pixel_values"] for image in shown]
    return torch.stack(pixels), torch.tensor(records["label"])


def views_of(
    records: datasets.Dataset, image_format: ImageFormat, view: str, backgrounds: str | None = None
) -> Iterator[Image.Image]:
    others = load_images([backgrounds], "train") if view == VIEWS[2] else None
    for index in range(len(records)):
        image = decode_image(records[index]["image"], index)
        if view == VIEWS[1]:
            image = put_on_canvas(image, index, image_format)
        elif view == VIEWS[2]:
            number = index % len(others)
            image = put_on(decode_image(others[number]["image"], number), image, index)
        yield image


@torch.no_grad()
def outputs_for(
    arguments, call: Callable, image_format: ImageFormat, view: str = VIEWS[0]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a function for all normalized test images, float32 on the CPU, and the images' labels."""
    backgrounds = getattr(arguments, "backgrounds", None)
    limit = getattr(arguments, "test_images", None)
    pixels, labels = test_images(arguments.test, image_format, view, backgrounds, limit)
    device, found = choose_device(), []
    for batch in tqdm(pixels.split(32), desc=view, leave=False):
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            found.append(call(image_format.normalize(batch.to(device))).float().cpu())
    return torch.cat(found), labels


def accuracy_of(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(1) == labels).float().mean().item()


def put_on_canvas(image: Image.Image, index: int, image_format: ImageFormat) -> Image.Image:
    """Put a test image on a plain canvas at a random place. `index` seeds the random numbers."""
    with seeded(index):
        return v2.RandomZoomOut(image_format.fill, (CANVAS, CANVAS), p=1.0)(image)


def put_on(background: Image.Image, image: Image.Image, index: int) -> Image.Image:
    """Resize `background` to `CANVAS` times the width and height of a test image. Put the test image on the background
    at a random place. `index` seeds the random numbers."""
    size = [round(CANVAS * side) for side in image.size]
    with seeded(index):
        left, top = (int(torch.randint(large - small + 1, ())) for large, small in zip(size, image.size, strict=True))
    canvas = background.resize(size)
    canvas.paste(image, (left, top))
    return canvas


def compare_all(arguments):
    """Compare the first seed's students with the teacher, ToMe and DiffRate."""
    seed = arguments.seeds[0]
    baselines = load_teachers(arguments.teacher, "ViT-S/14", RESOLUTIONS)
    original, image_processor = load_teacher(arguments.teacher)
    baselines += [with_random_patches(original, image_processor, (side // 14) ** 2, seed) for side in RESOLUTIONS]
    for variant, method in METHODS.items():
        for folder in sorted(arguments.runs_dir.glob(f"{variant}-*tokens-{arguments.steps[0]}steps-seed{seed}")):
            tokens = folder.name.split("-")[-3].removesuffix("tokens")
            if int(tokens) in arguments.tokens:
                name = variant if variant == "elastic" else f"{variant}, {tokens} tokens"
                baselines += load_students(str(folder), method, name)
    if arguments.tome:
        baselines += [merging(original, image_processor, arguments.tome, merged) for merged in arguments.merged]
    if arguments.diffrate:
        model = tuned_diffrate(arguments, original, image_processor, seed)
        baselines.append(baseline("DiffRate, tuned", "DiffRate, tuned", model.cpu(), original, image_processor))
    images = sample(load_images([arguments.test], "train"), arguments.limit, seed)
    rows = measure(arguments, baselines, images)
    data = f"{arguments.title}, test images chosen at random, 224 px"
    shared.write_comparison(arguments, f"compare_{file_name(arguments)}", len(images), rows, data=data)


def measure(arguments, baselines: list[Baseline], images: datasets.Dataset) -> list[dict]:
    fast = choose_mixed_precision(torch.device("cpu")) == "bf16"
    precisions = ["float32", "bf16"] if fast else ["float32"]
    options = {"precisions": precisions, "rounds": arguments.rounds, "folder": arguments.runs_dir / "embeddings"}
    return compare(baselines, images, batch_size=32, **options)


def file_name(arguments) -> str:
    return arguments.title.lower().replace("-", "")


def measure_peers(arguments):
    """Measure ToMe or DiffRate before and after tuning. DiffRate's rates are searched before both measurements. Tuning
    takes one epoch. Views and loss are the same as for students. The learning rate is the same as for the students'
    inherited weights."""
    teacher, processor = load_teacher(arguments.teacher)
    rows, settings = [], {"seeds": arguments.seeds}
    if arguments.what == "diffrate":
        settings |= {"search_macs": arguments.search_macs, "rates": "searched with labels"}
        for seed in arguments.seeds:
            tuned = tuned_diffrate(arguments, teacher, processor, seed)
            searched = diffrate(teacher, arguments.diffrate, arguments.runs_dir / f"diffrate-rates-seed{seed}")
            for model in (searched, tuned):
                about = {"tuned": model is tuned, "seed": seed}
                rows.append(about | measure_peer(arguments, model, teacher, processor))
    else:
        settings |= {"merged": arguments.merged}
        for merged, seed in itertools.product(arguments.merged, [None, *arguments.seeds]):
            model = tome(teacher, arguments.tome, merged)
            if seed is not None:
                model = tune_peer(arguments, f"tome{merged}", model, teacher, processor, seed)
            about = {"merged": merged, "tuned": seed is not None, "seed": seed}
            rows.append(about | measure_peer(arguments, model, teacher, processor))
    file = arguments.results_dir / f"caltech101_{arguments.what}.json"
    shared.write_table(file, settings, rows, data="Caltech-101, test images, 224 px")


def tuned_diffrate(arguments, teacher, processor, seed: int) -> MergedViT:
    """Search DiffRate's rates and tune the weights, or reuse both runs. Return the model."""
    search = {"loss": "labels", "search_macs": arguments.search_macs, "learning_rate": SEARCH_RATE}
    model = diffrate(teacher, arguments.diffrate)
    tune_peer(arguments, "diffrate-rates", model, teacher, processor, seed, **search)
    model = diffrate(teacher, arguments.diffrate, arguments.runs_dir / f"diffrate-rates-seed{seed}")
    return tune_peer(arguments, "diffrate", model, teacher, processor, seed)


def tune_peer(arguments, name: str, model: MergedViT, teacher, processor, seed: int, **options) -> MergedViT:
    """Tune ToMe or DiffRate for an epoch, or reuse the run. Loss and learning rate default to those of students."""
    return tune(
        arguments.runs_dir / f"{name}-seed{seed}",
        model,
        teacher,
        load_images([arguments.train], "train") if arguments.train else None,
        ImageFormat.from_processor(processor),
        epochs=1,
        warmup_epochs=0.1,
        scale=(0.5, 1.0),
        seed=seed,
        bf16=arguments.mixed_precision == "bf16",
        **{"loss": "cosine", "learning_rate": 2e-5} | options,
    )


@torch.no_grad()
def measure_peer(arguments, model: MergedViT, teacher, processor) -> dict:
    image_format = ImageFormat.from_processor(processor)
    model.to(choose_device())
    embeddings, labels = outputs_for(arguments, lambda pixels: model(pixels).embedding, image_format)
    accuracy, macs = accuracy_of(teacher.classifier.cpu()(embeddings), labels), count_macs(model, teacher.image_size)
    return {"accuracy": accuracy, "macs": macs.macs_with_attention, "images": len(labels)}


def compare_features(arguments):
    """Measure embeddings of the classes on which the student is not bootstrapped. On other data than Caltech-101,
    bootstrap and test on all classes."""
    runs, seed = arguments.runs_dir, arguments.seeds[0]
    train, test = (load_images([images], "train") for images in (arguments.train, arguments.test))
    kept, epochs, left_out, classes = arguments.train, 2, [], f"all {len(class_names(train))} classes"
    if arguments.title == CALTECH:
        kept, epochs, classes = runs / "kept-classes.parquet", 1, f"{len(LEFT_OUT)} of 101 classes"
        write_classes(kept, train, {*range(len(class_names(train)))} - {*LEFT_OUT})
        left_out = [class_names(train)[label] for label in LEFT_OUT]
        train, test = (of_classes(images, LEFT_OUT) for images in (train, test))
    student = runs / f"features-elastic-seed{seed}"
    argv = shared_arguments(arguments, arguments.model, kept, seed)
    shared.run_training(bootstrap, student, [*argv, "--num_train_epochs", str(epochs), *VARIANTS["elastic"]])
    baselines = load_teachers(arguments.model, "ViT-S/14", RESOLUTIONS)
    teacher = load_teacher(arguments.model)
    baselines += [with_random_patches(*teacher, (side // 14) ** 2, seed) for side in RESOLUTIONS]
    baselines += load_students(str(student), METHODS["elastic"], "student")
    rows, teachers = compare(baselines, test, batch_size=32, rounds=1), {}
    (asked, indices), (known, known_indices) = (embed_all(baselines, images, 32) for images in (test, train))
    labels = torch.from_numpy(label_numbers(test))[indices]
    known_labels = torch.from_numpy(label_numbers(train))[known_indices]
    for row, embeddings, known_embeddings in zip(rows, asked, known, strict=True):
        # Speeds of one round are not reported. The command `compare` measures speeds in more rounds.
        del row["images_per_second"]
        right = classified_rightly(embeddings, labels, known_embeddings, known_labels)
        for name, values in right.items():
            row |= describe_score(name, values, teachers.get(name))
        teachers = teachers or right
    shared.write_table(
        arguments.results_dir / f"{file_name(arguments)}_features.json",
        {"images": len(test), "train_images": len(train), "epochs": epochs, "left_out": left_out},
        rows,
        data=f"{arguments.title}, {classes}, 224 px",
    )


def of_classes(images: datasets.Dataset, classes: Container[int]) -> datasets.Dataset:
    return images.select([row for row, label in enumerate(label_numbers(images)) if label in classes])


def write_classes(file: Path, images: datasets.Dataset, classes: Container[int]):
    """Write the images of some classes as a parquet file, if the file does not exist."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as aside:
            of_classes(images, classes).to_parquet(aside)


def classified_rightly(
    embeddings: torch.Tensor, labels: torch.Tensor, known: torch.Tensor, known_labels: torch.Tensor, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Classify test images by a linear probe and by nearest neighbors. Both classifiers are built from the training
    embeddings `known`. Embeddings have the shape `(draws, images, embedding_size)`. For each classifier, return the
    share of draws in which the class of an image is right, `(images,)`."""
    classes, numbers = known_labels.unique(return_inverse=True)
    right = {"linear_accuracy": [], "neighbor_accuracy": []}
    for asked, features in zip(embeddings, known, strict=True):
        scores = (fit_probe(features, numbers, seed)(asked), neighbor_scores(features, numbers, asked))
        for draws, each in zip(right.values(), scores, strict=True):
            draws.append(classes[each.argmax(1)] == labels)
    return {name: torch.stack(draws).double().mean(0) for name, draws in right.items()}


def compare_shipped(arguments):
    """Compare the shipped student with its teacher, and with the teacher on smaller images. The accuracies
    of fine-tuned teachers are read from the results of small_images.py, if this file exists. The student's mean
    accuracy includes the students that the command `students` has trained with other seeds."""
    baselines = load_teachers(arguments.teacher, "ViT-S/14", RESOLUTIONS)
    folders = [checkpoint_path("caltech101-sparseformer"), *sorted(arguments.runs_dir.glob("elastic-64tokens-*"))]
    for number, folder in enumerate(folders):
        baselines += load_students(str(folder), METHODS["elastic"] if number == 0 else SEEDS, "student")
    images = load_images([arguments.test], "train")
    rows = measure(arguments, baselines, images)
    tuned = shared.read_rows(arguments.results_dir / "small_images_caltech101.json")
    students = [row for row in rows if row["method"] == SEEDS]
    rows = [row for row in rows if row["method"] != SEEDS]
    for row in [*rows]:
        accuracies = fine_tuned_accuracies(tuned, row["image_size"][0])
        if row["method"] == LOWER_RESOLUTION and accuracies:
            others = dict.fromkeys(name for name in row if name.startswith(("accuracy", "cosine", "neighbors")))
            about = {"model": f"{row['model']}, fine-tuned", "method": FINE_TUNED}
            rows.append(row | others | about | {"accuracy": accuracies[0]} | over_seeds(accuracies))
        elif row["method"] == METHODS["elastic"]:
            row |= over_seeds([each["accuracy"] for each in (row, *students) if each["model"] == row["model"]])
    data = f"{arguments.title}, all test images, 224 px"
    shared.write_comparison(arguments, "shipped_caltech101", len(images), rows, data=data)


def fine_tuned_accuracies(rows: list[dict], size: int) -> list[float]:
    """Return the accuracies of teachers that small_images.py has fine-tuned for an epoch on images of one size. Each
    row has another seed."""
    wanted = {"method": "with labels", "rate": 2e-5, "epochs": 1, "pixels": size}
    return [row["accuracy"] for row in rows if wanted.items() <= row.items()]


def over_seeds(accuracies: list[float]) -> dict:
    """Return the mean and the standard deviation of accuracies of the same training with different seeds."""
    return {"mean": statistics.mean(accuracies), "spread": shared.spread(accuracies), "seeds": len(accuracies)}


def make_table(arguments):
    """Average all finished runs over seeds. Write a table for fixed numbers of tokens and one for
    `classify_adaptively`. Draw the elastic student and the students that were trained for one number of tokens."""
    groups = {}
    for file in sorted(arguments.runs_dir.glob("*/measured.json")):
        for run in json.loads(file.read_text(encoding="utf-8")):
            key = (run["views"], run["variant"], *run.get("looks", [run.get("tokens")]))
            groups.setdefault((*key, run.get("confidence", 0.0)), []).append(run)
    students, adaptive = [], []
    for _, runs in sorted(groups.items()):
        first = runs[0]
        row = {"student": first["variant"], "views": first["views"]}
        if "looks" in first:
            row |= {"looks": " → ".join(map(str, first["looks"])), "confidence": first["confidence"]}
            adaptive.append(row | averages(runs, ("tokens", "macs")) | {"seeds": len(runs)})
        else:
            row |= {"tokens": first["tokens"], "macs": first["macs"]}
            students.append(row | averages(runs, ("cosine",)) | {"seeds": len(runs)})
    settings = {"batch_size": BATCH_SIZE, "canvas": CANVAS, "mixed_precision": arguments.mixed_precision}
    for name, rows in (("students", students), ("adaptive", adaptive)):
        if rows:
            shared.write_table(
                arguments.results_dir / f"caltech101_{name}.json",
                settings | {"seeds": "as listed"},
                rows,
                data="Caltech-101, 6,982 training and 1,695 test images, 224 px",
            )
    if adaptive:
        save_figure(draw_elastic(students, adaptive), arguments.results_dir / "caltech101_elastic.png")


def averages(runs: list[dict], names: tuple[str, ...]) -> dict[str, float | None]:
    row = {}
    for images in SEEN:
        accuracies = [run[images]["accuracy"] for run in runs]
        row |= {
            f"{images}_accuracy": statistics.mean(accuracies),
            f"{images}_spread": shared.spread(accuracies),
            f"{images}_of_teacher": statistics.mean(accuracies) / runs[0][images]["teacher_accuracy"],
            f"{images}_teacher_accuracy": runs[0][images]["teacher_accuracy"],
            **{f"{images}_{name}": statistics.mean(run[images][name] for run in runs) for name in names},
        }
    return row


def draw_elastic(students: list[dict], adaptive: list[dict]) -> Figure:
    """Draw accuracy over multiply-accumulates, with a panel for each view in `SEEN`."""
    # Students are comparable only if they have been trained on the same number of views.
    views = adaptive[0]["views"]
    names = {"fixed": "one student for each count", "elastic": "one student for all counts"}
    lines = {name: [] for name in names.values()}
    for row in students:
        if row["views"] == views and row["student"] in names:
            lines[names[row["student"]]].append(row | {f"{images}_macs": row["macs"] for images in SEEN})
    for row in adaptive:
        lines.setdefault(f"the same, {row['looks']} until sure", []).append(row)
    figure = Figure(figsize=(11, 4.6), facecolor="white", layout="constrained")
    axes = figure.subplots(1, 2)
    titles = ("Photographs", f"On a canvas {CANVAS} times as wide and high")
    for axis, images, title in zip(axes, SEEN, titles, strict=True):
        for name, rows in lines.items():
            points = sorted((row[f"{images}_macs"] / 1e9, 100 * row[f"{images}_accuracy"]) for row in rows)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axis.set(title=title, xlabel="G multiply-accumulates an image", ylabel="accuracy (%)", xlim=(0.15, 1.6))
        axis.grid(alpha=0.3)
    axes[0].set_ylim(82, 95)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_photographs(arguments):
    """Write random images of the training data and of the test data as the photographs of `frugalvit quickstart`. The
    training images are written without labels."""
    parts = {
        "train": sample(load_images([arguments.train], "train"), 960, seed=0).select_columns("image"),
        "test": sample(load_images([arguments.test], "train"), 300, seed=0),
    }
    for name, images in parts.items():
        with atomic_file(shared.ROOT / "training" / "caltech101" / f"{name}.parquet") as aside:
            images.cast_column("image", datasets.Image()).to_parquet(aside)


# Function and required arguments of each command.
COMMANDS = {
    "students": (train_students, ("train", "test")),
    "table": (make_table, ()),
    "compare": (compare_all, ("test",)),
    "shipped": (compare_shipped, ("test",)),
    "tome": (measure_peers, ("train", "test", "tome")),
    "diffrate": (measure_peers, ("train", "test", "diffrate")),
    "features": (compare_features, ("model", "train", "test")),
    "photographs": (draw_photographs, ("train", "test")),
}


if __name__ == "__main__":
    main()
