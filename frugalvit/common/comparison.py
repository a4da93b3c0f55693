"""A SparseFormer beside its teacher: costs and speeds of both."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..modeling.hosts import Anatomy
from .macs import count_macs
from .speed import images_per_second


# Seconds after which a comparison of speeds begins no further round.
LIMIT = 3.0
_REGISTERING = threading.Lock()


class ImageSide(nn.Module):
    """A teacher from images to logits or, of a model without a classifier, to its embedding."""

    def __init__(self, teacher: Anatomy):
        super().__init__()
        run = teacher.run_classifier or teacher.run
        # Not a module of this one besides: it may be the model itself.
        self.source, self.run = teacher.source, lambda images: run(images)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.run(pixel_values)


@contextmanager
def using_tokens(student: nn.Module, num_tokens: int) -> Iterator[None]:
    """Within, a SparseFormer computes with so many latent tokens in calls of this thread that choose none. Calls of
    other threads and the model itself stay as they are."""
    thread = threading.get_ident()

    def choose(module, args, kwargs=None):
        # A hook that another thread removes just now is called without `kwargs`.
        if kwargs is None or threading.get_ident() != thread or kwargs.get("num_tokens") is not None:
            return None
        return args, kwargs | {"num_tokens": num_tokens}

    # Heads and towers around it pass the choice on.
    bases = [part for part in student.modules() if hasattr(part, "check_num_tokens") and part.base_model is part]
    # The last hook that was registered is asked first; numbers of hooks are not given atomically.
    with _REGISTERING:
        hooks = [base.register_forward_pre_hook(choose, prepend=True, with_kwargs=True) for base in bases]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def describe_pair(
    teacher: Anatomy, student: nn.Module, teacher_size: tuple[int, int], student_size: tuple[int, int]
) -> list[dict[str, object]]:
    """Rows of costs: the teacher's, then one for each count of tokens that the student is made for.

    A row has `model` (`"teacher"` or `"student"`), `num_tokens` (a teacher's patches, a student's latent tokens),
    `tokens` in the last block, [CLS] and registers counted, `parameters` of the image side, and `macs`, the
    multiply-accumulates of one image with attention's products, None where they cannot be counted.

    Args:
        teacher (`Anatomy`): The anatomy of the teacher, which is frozen.
        student (`nn.Module`): A SparseFormer.
        teacher_size, student_size (pairs of `int`): Height and width of their images in pixels.
    """
    patches = 1
    for pixels, native, count in zip(teacher_size, teacher.image_size, teacher.grid, strict=True):
        patches *= pixels * count // native
    rows = [
        {
            "model": "teacher",
            "num_tokens": patches,
            "tokens": teacher.num_prefix_tokens + patches,
            "parameters": count_parameters(teacher),
            "macs": macs_if_countable(ImageSide(teacher), teacher_size),
        }
    ]
    for count in student.config.trained_token_counts:
        with using_tokens(student, count):
            row = {
                "model": "student",
                "num_tokens": count,
                "tokens": student.config.num_prefix_tokens + count,
                "parameters": student.num_parameters(),
                "macs": macs_if_countable(student, student_size),
            }
        rows.append(row)
    return rows


def count_parameters(anatomy: Anatomy) -> int:
    """Number of parameters of a model's image side."""
    parts = [*anatomy.model.parameters()]
    parts += anatomy.classifier.parameters() if anatomy.classifier is not None else ()
    if anatomy.projection is not None:
        parts += [part for part in (anatomy.projection.weight, anatomy.projection.bias) if part is not None]
    return sum(part.numel() for part in set(parts))


def compare_speeds(
    teacher: Anatomy,
    student: nn.Module,
    teacher_size: tuple[int, int],
    student_size: tuple[int, int],
    batch_sizes: tuple[int, ...] = (1, 32),
) -> list[dict[str, float]]:
    """Images per second of teacher and student, in the order of `describe_pair`, by batch size as `images/s,
    BATCH_SIZE`.

    Measuring takes seconds; two passes of each batch where large models on a slow machine take longer.

    Args:
        teacher, student, teacher_size, student_size: As in `describe_pair`, on one device and in one dtype.
        batch_sizes (`tuple[int, ...]`, *optional*, defaults to `(1, 32)`): Images at a time.
    """
    weight = next(teacher.model.parameters())
    contenders = [(ImageSide(teacher).eval(), teacher_size)]
    for count in student.config.trained_token_counts:
        contenders.append((functools.partial(student.eval(), num_tokens=count), student_size))
    rows = [{} for _ in contenders]
    for batch_size in batch_sizes:
        calls = {}
        for number, (model, size) in enumerate(contenders):
            images = torch.randn(batch_size, 3, *size, dtype=weight.dtype, device=weight.device)
            calls[number] = functools.partial(_call, model, images)
        speeds = images_per_second(calls, images, limit=LIMIT)
        for number, row in enumerate(rows):
            row[f"images/s, {batch_size}"] = speeds[number]
    return rows


def macs_if_countable(model: nn.Module, size: tuple[int, int]) -> int | None:
    """Multiply-accumulates of one image, attention's products counted; `None` where they cannot be counted."""
    try:
        return count_macs(model, size).macs_with_attention
    except RuntimeError:
        # SigLIP 2 NaFlex reads the shapes of its images, and those that are counted with hold no numbers.
        return None


def _call(model: nn.Module, own_images: torch.Tensor, _):
    """Run a model on images of its own size, in the place of those that are timed."""
    return model(own_images)


def side_by_side(costs: list[dict], scores: list[dict], speeds: list[dict]) -> list[dict[str, object]]:
    """Rows of a table: the costs of `describe_pair`, the scores, and the speeds of `compare_speeds`."""
    rows = zip(costs, scores, speeds, strict=True)
    return [{"model": cost["model"], **score, **cost, **speed} for cost, score, speed in rows]


def slower_than_teacher(rows: list[dict[str, object]]) -> list[str]:
    """Sentences about the counts of tokens and batch sizes at which a student is not faster than its teacher."""
    teacher, *students = rows
    return [
        f"{student[name] / teacher[name]:.2f} times its images/s in batches of {name.removeprefix('images/s, ')}"
        + (f" with {student['num_tokens']} latent tokens" if len(students) > 1 else "")
        for student in students
        for name in student
        if name.startswith("images/s") and student[name] <= teacher[name]
    ]
