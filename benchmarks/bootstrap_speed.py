"""Measure the speed of `frugalvit bootstrap`, and of a plain training loop that does the same.

    python benchmarks/bootstrap_speed.py --dataset IMAGES --results-dir results
    python benchmarks/bootstrap_speed.py --dataset IMAGES --parts --results-dir results
    python benchmarks/bootstrap_speed.py --dataset IMAGES --test TEST --seeds 0 1 2 --steps 13 --batch-size 64
    python benchmarks/bootstrap_speed.py --dataset IMAGES --test TEST --seeds 0 1 2 --steps 52 --batch-size 32 --views

The shipped student's training is repeated for a few steps, with `COUNTS` as numbers of tokens. The plain loop has no
trainer: it reads, crops and normalizes images with torchvision, embeds them with the teacher, and trains the student's
base model by AdamW. Each row of the table measures the command or the plain loop in one precision. The last row
measures later epochs of the command with `--views_per_image`, in which the teacher's embeddings are known. In each of
--rounds rounds, every row runs once, in a new process. The table shows the median of each row's runs. The output is
bootstrap_speed.json.

With --parts, the time of the plain loop's steps is divided into parts: images, teacher, the student's forward and
backward passes, and the optimizer. The time of the linear layers' matrix products alone is measured for the same
numbers of images and tokens. The output is bootstrap_parts.json.

With --test, speed is not measured. Instead, students are trained with each seed, and their accuracies on the test
images are compared: students that were trained in float32 and in bfloat16 (bootstrap_precision.json) or, with --views,
students that saw new views in each of EPOCHS epochs and students that saw one or two views of each image
(bootstrap_views.json).
"""

import functools
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from frugalvit import Classifier, PatchSparseFormerForImageClassification, bootstrap, checkpoint_path
from frugalvit.baselines import WithTokens, load_teacher
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training import bootstrap as training
from frugalvit.training.data import label_numbers, load_images
from frugalvit.training.loading import bfloat16_is_fast, choose_device
from frugalvit.training.students import token_counts_to_train
from shared import MatrixProducts, Views, add_run_arguments, cropped, make_parser, run_training, spread, write_table


COUNTS = [9, 16, 25, 36, 49, 64]
# Numbers of tokens with which accuracies are compared.
TESTED = [16, 36, 64]
# Epochs of the trainings with `--views`.
EPOCHS = 4


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--teacher", default=str(checkpoint_path("caltech101-vit")), help="default: caltech101-vit")
    parser.add_argument("--dataset", required=True, help="images to train on, as in `frugalvit bootstrap`")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after as many more (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--parts", action="store_true", help="measures the parts of a step")
    parser.add_argument("--test", help="test images; compares accuracies instead of speeds")
    parser.add_argument("--views", action="store_true", help="compares new views with repeated views")
    add_run_arguments(parser, "runs/bootstrap-precision")
    arguments = parser.parse_args()
    if arguments.views and not arguments.test:
        parser.error("--views needs --test")
    if arguments.parts and (arguments.test or choose_device().type != "cpu"):
        parser.error("--parts measures on a CPU, and takes no --test")
    if arguments.test:
        compare_accuracies(arguments)
    elif arguments.parts:
        measure_parts(arguments)
    else:
        compare_speeds(arguments)


def compare_speeds(arguments):
    rows = {}
    for bf16 in (False, True) if bfloat16_is_fast() else (False,):
        for function in (plain_loop, bootstrap_command):
            name = f"{function.__name__}, {'bfloat16' if bf16 else 'float32'}"
            rows[name] = functools.partial(function, arguments, bf16)
    # An epoch is the first half of the steps, so the embeddings are known in the measured second half.
    images = arguments.steps * arguments.batch_size
    options = {"views_per_image": 1, "train_split": f"train[:{images}]"}
    rows["known embeddings"] = functools.partial(bootstrap_command, arguments, bfloat16_is_fast(), **options)
    measured = {name: [] for name in rows}
    for _ in range(arguments.rounds):
        for name, function in rows.items():
            measured[name].append(in_process(function))
    table = []
    for name, results in measured.items():
        speed = statistics.median(speed for speed, _ in results)
        first = table[0]["images_per_second"] if table else speed
        peak = statistics.median(peak for _, peak in results)
        table.append({"row": name, "images_per_second": speed, "times_first": speed / first, "peak_memory_mb": peak})
    settings = {name: getattr(arguments, name) for name in ("batch_size", "steps", "rounds")}
    write_table(arguments.results_dir / "bootstrap_speed.json", settings, table)


def measure_parts(arguments):
    rows = []
    for bf16 in (False, True) if bfloat16_is_fast() else (False,):
        runs = [in_process(functools.partial(step_parts, arguments, bf16))[0] for _ in range(arguments.rounds)]
        # The last row is the whole step.
        for run in runs:
            for seconds in run.values():
                seconds["step"] = sum(seconds.values())
        total = statistics.median(run["loop"]["step"] for run in runs)
        for part in runs[0]["loop"]:
            seconds = statistics.median(run["loop"][part] for run in runs)
            products = statistics.median(run["products"].get(part, 0.0) for run in runs)
            row = {"precision": "bfloat16" if bf16 else "float32", "part": part, "seconds": seconds / arguments.steps}
            rows.append(row | {"share": seconds / total, "products_share": products / seconds})
    settings = {name: getattr(arguments, name) for name in ("batch_size", "steps", "rounds")}
    write_table(arguments.results_dir / "bootstrap_parts.json", settings, rows)


def compare_accuracies(arguments):
    device = choose_device()
    images = load_images(arguments.test)
    kind = "views" if arguments.views else "precision"
    rows = []
    for name, options in trainings(arguments).items():
        accuracies = {}
        for seed in arguments.seeds:
            folder = arguments.runs_dir / f"{name}-seed{seed}"
            argv = [
                *("--teacher", arguments.teacher, "--dataset", arguments.dataset, "--eval_split", "none"),
                *("--num_tokens", *map(str, COUNTS), "--seed", str(seed), "--max_steps", str(arguments.steps)),
                *("--per_device_train_batch_size", str(arguments.batch_size)),
                *("--use_cpu", str(device.type == "cpu"), *options),
            ]
            run_training(training, folder, argv)
            for count in TESTED:
                classifier = Classifier(str(folder), num_tokens=count)
                logits = torch.stack([torch.from_numpy(each) for each in classifier(images["image"])])
                right = logits.argmax(1) == torch.from_numpy(label_numbers(images))
                accuracies.setdefault(count, []).append(right.float().mean().item())
        for count, values in accuracies.items():
            about = {kind: name, "tokens": count, "accuracy": statistics.mean(values)}
            rows.append(about | {"spread": spread(values), "accuracies": values})
    settings = {name: getattr(arguments, name) for name in ("batch_size", "steps", "seeds")}
    settings |= {"epochs": EPOCHS} if arguments.views else {}
    write_table(arguments.results_dir / f"bootstrap_{kind}.json", settings, rows)


def trainings(arguments) -> dict[str, list[str]]:
    """Return the options of the trainings whose accuracies are compared, by name."""
    if not arguments.views:
        return {"float32": ["--bf16", "False"], "bfloat16": ["--bf16", "True"]}
    images = arguments.steps * arguments.batch_size // EPOCHS
    options = ["--train_split", f"train[:{images}]", "--bf16", str(bfloat16_is_fast())]
    repeated = {f"{views} repeated": [*options, "--views_per_image", str(views)] for views in (2, 1)}
    return {"new views": options} | repeated


def in_process(function) -> tuple[object, float]:
    """Run a function in a new process. Return its result and the peak memory in MB."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(with_peak, function).result()


def with_peak(function) -> tuple[object, float]:
    result = function()
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bootstrap_command(arguments, bf16: bool, **options) -> float:
    """Run `frugalvit bootstrap`. Return the images per second during the second half of the steps."""
    with tempfile.TemporaryDirectory() as output:
        bootstrap(
            arguments.teacher,
            arguments.dataset,
            COUNTS,
            output,
            eval_split="none",
            per_device_train_batch_size=arguments.batch_size,
            bf16=bf16,
            use_cpu=choose_device().type == "cpu",
            max_steps=2 * arguments.steps,
            logging_steps=arguments.steps,
            load_best_model_at_end=False,
            save_strategy="no",
            **options,
        )
        log = json.loads(Path(output, "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    [speed] = [record["images_per_second"] for record in log if "images_per_second" in record]
    return speed


def plain_loop(arguments, bf16: bool) -> float:
    """Run the plain training loop. Return the images per second during the second half of the steps."""
    seconds = sum(step_parts(arguments, bf16, products=False)["loop"].values())
    return arguments.steps * arguments.batch_size / seconds


class Clock:
    """Sum the seconds of the parts of a loop."""

    def __init__(self):
        self.seconds = {}
        self.start = time.perf_counter()

    def stop(self, part: str):
        """Add the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.start
        self.start = now


def step_parts(arguments, bf16: bool, products: bool = True) -> dict[str, dict[str, float]]:
    """Run the plain training loop. Return the seconds of each part of the loop during the second half of the steps
    (`"loop"`) and, on request, those of the matrix products alone (`"products"`)."""
    device = choose_device()
    teacher, processor = load_teacher(arguments.teacher, str(device))
    student = PatchSparseFormerForImageClassification.from_teacher(
        teacher,
        COUNTS[-1],
        elastic_token_counts=COUNTS,
        image_processor=processor,
    )
    model = student.base_model.train().to(device)
    model.set_attn_implementation("eager")
    teacher.source.eval().requires_grad_(False)
    if bf16:
        teacher.source.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    images = Views(load_images(arguments.dataset), cropped(ImageFormat.from_processor(processor), (0.5, 1.0)))
    # If the steps need more images than there are, the sampler repeats the images.
    sampler = RandomSampler(images, num_samples=2 * arguments.steps * arguments.batch_size)
    clock = Clock()
    for step, batch in enumerate(DataLoader(images, arguments.batch_size, sampler=sampler)):
        pixel_values = batch["pixel_values"].to(device)
        clock.stop("images")
        losses = []
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                target = teacher.embed(pixel_values).float()
            clock.stop("teacher")
            for count in token_counts_to_train(student.config, str(step)):
                embedding = model(pixel_values, num_tokens=count, output_tokens=False).pooler_output.float()
                losses.append(1 - F.cosine_similarity(embedding, target).mean())
        clock.stop("forward")
        torch.stack(losses).mean().backward()
        clock.stop("backward")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.stop("optimizer")
        if step + 1 == arguments.steps:
            clock = Clock()
    parts = {"loop": clock.seconds}
    if products:
        steps = range(arguments.steps, 2 * arguments.steps)
        counts = [count for step in steps for count in token_counts_to_train(student.config, str(step))]
        pixel_values = pixel_values.to(torch.bfloat16 if bf16 else torch.float32)
        parts["products"] = time_products(teacher.source, model.to(pixel_values.dtype), pixel_values, counts)
        parts["products"]["teacher"] *= arguments.steps
    return parts


def time_products(teacher: nn.Module, model: nn.Module, pixel_values: torch.Tensor, counts: list[int]) -> dict:
    """Return the seconds that the matrix products take in one pass of the teacher, and in forward and backward passes
    of a student with each of `counts` tokens."""
    products = MatrixProducts(teacher, pixel_values)
    with torch.no_grad():
        products(None)  # warm-up
        clock = Clock()
        products(None)
        clock.stop("teacher")
    seconds = clock.seconds
    for count in counts:
        products = MatrixProducts(WithTokens(model, count, output_tokens=False), pixel_values)
        # The first layer's input is the pixels, which need no gradient.
        variables = [layer.weight for layer, _ in products.calls]
        variables += [given.requires_grad_() for _, given in products.calls[1:]]
        # The first of two passes is a warm-up.
        for _ in range(2):
            clock = Clock()
            outputs = products(None)
            clock.stop("forward")
            gradients = [torch.ones_like(output) for output in outputs]
            clock.stop("gradients")
            torch.autograd.grad(outputs, variables, gradients)
            clock.stop("backward")
        for part in ("forward", "backward"):
            seconds[part] = seconds.get(part, 0.0) + clock.seconds[part]
    return seconds


if __name__ == "__main__":
    main()
