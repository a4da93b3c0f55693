"""Feature maps of road scenes: a frozen SparseFormer backbone beside its teacher at several resolutions.

    python benchmarks/dense_camvid.py --teacher VIT --train CAMVID_TRAIN --test CAMVID_TEST --bootstrap trees grid \\
        --tome CHECKOUT

Each backbone's map of the last layer is frozen, and a linear layer learns which classes each cell shows (their shares
of its pixels), from all training images. Its scores of a test image are interpolated to the mask's size. The teacher
sees images of 336 x 448 pixels, and smaller ones, and 336 x 448 with some of its patches, chosen at random, and merged
by ToMe (github.com/facebookresearch/ToMe, not tuned). Students look at 336 x 448 with fewer tokens, before training
and, of --bootstrap, bootstrapped on the training images, without their masks, for embeddings and maps; then with an
upsampler, which the same images train while all else is frozen. Cells without a token of their own take that of the
patch that was merged with theirs, or of the nearest. Cosines are those with the teacher's map on the test images, maps
of fewer cells interpolated. Milliseconds are those of one image in float32, all backbones in turns. Runs are kept
under --runs-dir and found again. Writes dense_camvid.json. CamVid (Brostow et al.) is for research and stays out of
the repository.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from segmentation_table import CLASSES, VOID
from torch import nn
from tqdm import tqdm
from transformers import ViTImageProcessor

from frugalvit import BootstrapArguments, BootstrapTrainer, MapAlignmentLoss, SparseFormerBackbone, SparseFormerModel
from frugalvit.common.command_line import CommandParser
from frugalvit.common.contender import Vision
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import whole_folder
from frugalvit.common.loading import choose_device, load_vision_model
from frugalvit.common.macs import macs_of
from frugalvit.common.masks import MaskReader, load_masked_images
from frugalvit.common.metrics import SegmentationScores
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from frugalvit.common.views import ImageFormat
from frugalvit.contenders import RandomPatches
from frugalvit.modeling.dense import spread as spread_over_cells
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.modeling.segmentation import geometric_bias
from shared import add_results_argument, spread, write_table
from token_merging import PooledViT, apply_tome, as_timm


SIZE = (336, 448)
# The teacher's images, as shares of `SIZE`: 768, 432, 336 and 192 patches of 14 pixels.
SIZES = [SIZE, (252, 336), (224, 294), (168, 224)]
TOKENS = [432, 255, 192]
# Tokens that ToMe merges in each block.
MERGED = [40, 56, 80]
# Thin things, which low resolution loses first.
THIN = ("pole", "sign", "pedestrian", "cyclist")
# Of a tree in such images: cells of 3 x 4 are halved to patches of 14 pixels.
TREE = {"placement": "content", "placement_grid": [3, 4], "num_placement_levels": 4}
STUDENTS = {"trees": TREE | {"placement_random_share": 0.25}, "grid": {}}
# Of grids of such images; trees have three tokens more or fewer.
GRIDS = [432, 252, 192]
UPSAMPLER_HIDDEN_SIZE, UPSAMPLER_EPOCHS = 64, 3


@dataclass
class Backbone:
    """A model that gives feature maps.

    Args:
        name (`str`): Name of its row.
        tokens (`int`): Patches or latent tokens.
        size (pair of `int`): Height and width of its images.
        macs (`int`): Multiply-accumulates of an image, with attention.
        maps (`Callable`): Normalized images to `(batch, channels, rows, columns)`.
    """

    name: str
    tokens: int
    size: tuple[int, int]
    macs: int
    maps: Callable[[torch.Tensor], torch.Tensor]


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a pretrained ViT with patches of 14 pixels")
    parser.add_argument("--bootstrap", nargs="*", default=[], choices=STUDENTS, help="students to bootstrap")
    parser.add_argument(
        "--bootstrap-epochs", type=int, default=10, help="of the training images (default: %(default)s)"
    )
    parser.add_argument("--tome", help="checkout of ToMe")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/dense_camvid"), help="default: %(default)s")
    parser.add_argument("--train", required=True, help="CamVid to train on, as in `frugalvit segment`")
    parser.add_argument("--test", required=True, help="CamVid to test on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the linear layer (default: 0 1 2)")
    parser.add_argument("--epochs", type=int, default=20, help="of the linear layer (default: %(default)s)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16", help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()
    train, test = (load_masked_images([data], "train") for data in (arguments.train, arguments.test))
    masks = [read_masks(images) for images in (train, test)]
    model, processor = load_vision_model(arguments.teacher, str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    found, rows, maps_of_teacher = list(backbones(arguments, model, image_format)), [], None
    speeds = images_per_second(
        {index: backbone.maps for index, backbone in enumerate(found)},
        {index: torch.randn(1, 3, *backbone.size, device=choose_device()) for index, backbone in enumerate(found)},
    )
    for backbone, speed in zip(found, speeds.values(), strict=True):
        maps = [embed(arguments, image_format, backbone, images) for images in (train, test)]
        # The teacher comes first.
        maps_of_teacher = maps[1] if maps_of_teacher is None else maps_of_teacher
        scores = [score(arguments, *maps, *masks, seed) for seed in arguments.seeds]
        row = {"backbone": backbone.name, "pixels": "x".join(map(str, backbone.size)), "tokens": backbone.tokens}
        row |= {"macs": backbone.macs, "milliseconds": 1000 / speed}
        row |= {"mean_iou": statistics.mean(each["mean_iou"] for each in scores)}
        row |= {"spread": spread([each["mean_iou"] for each in scores])}
        row |= {"thin_iou": statistics.mean(each["thin_iou"] for each in scores)}
        rows.append(row | {"cosine": mean_cosine(maps[1], maps_of_teacher)})
        print(format_table(rows), flush=True)
    settings = {"teacher": Path(arguments.teacher).name, "epochs": arguments.epochs, "seeds": arguments.seeds}
    if arguments.bootstrap:
        settings |= {"bootstrap_epochs": arguments.bootstrap_epochs, "upsampler_epochs": UPSAMPLER_EPOCHS}
    data = f"CamVid, {len(train)} training and {len(test)} test images, 11 classes, scored at 360 x 480 pixels"
    write_table(
        arguments.results_dir / "dense_camvid.json", settings, rows, data=data, threads=torch.get_num_threads()
    )


def backbones(arguments, model: nn.Module, image_format: ImageFormat):
    """The rows' backbones, of a teacher, peers and students of it."""
    device = choose_device()
    normalize = {"image_mean": image_format.mean, "image_std": image_format.std}
    yield from teachers(model, SIZES)
    whole = read_anatomy(model, SIZE)
    for count in TOKENS:
        maps = functools.partial(map_of_random_patches, RandomPatches(whole, count, seed=0))
        yield Backbone("teacher with random patches", count, SIZE, macs_of(Vision(model, maps), SIZE), maps)
    for merged in MERGED if arguments.tome else []:
        vit = as_timm(whole)
        apply_tome(vit, arguments.tome, merged, trace_source=True)
        # It gives its tokens.
        vit.forward_head = lambda tokens: tokens
        maps = functools.partial(map_of_merged, vit, whole.grid)
        tokens = whole.num_patches
        for _ in whole.blocks:
            tokens -= min(merged, tokens // 2)
        yield Backbone(f"ToMe, {merged} a block, unmerged", tokens, SIZE, macs_of(Vision(vit, maps), SIZE), maps)
    fields = {"focusing": "inherited", "image_size": list(SIZE), **TREE, **normalize}
    student = SparseFormerBackbone.from_teacher(whole, TOKENS[0], **fields).to(device).eval()
    yield from students("trees, before training", student, TOKENS)
    for kind in arguments.bootstrap:
        folder = bootstrap_student(arguments, kind, image_format)
        student = SparseFormerBackbone.from_pretrained(folder).to(device).eval()
        counts = student.config.trained_token_counts[::-1]
        yield from students(f"{kind}, bootstrapped", student, counts)
        yield from students(f"{kind}, bootstrapped, Gaussian readout", student, counts[1:2], map_by_gaussians)
        student = SparseFormerBackbone.from_pretrained(train_upsampler(arguments, folder, whole, image_format))
        yield from students(f"{kind}, bootstrapped, upsampler", student.to(device).eval(), counts)


def teachers(model: nn.Module, sizes: Sequence[tuple[int, int]]) -> Iterator[Backbone]:
    """The teacher with images of several heights and widths."""
    for size in sizes:
        anatomy = read_anatomy(model, size)
        name = "teacher" if size == SIZE else "teacher at lower resolution"
        maps = functools.partial(map_of_teacher, anatomy)
        yield Backbone(name, anatomy.num_patches, size, macs_of(Vision(model, maps), size), maps)


def bootstrap_student(arguments, kind: str, image_format: ImageFormat) -> Path:
    """The folder of a student for several counts of tokens, bootstrapped now or before."""
    folder = arguments.runs_dir / f"{kind}-{arguments.bootstrap_epochs}epochs"
    if (folder / "model.safetensors").is_file():
        return folder
    teacher, _ = load_vision_model(arguments.teacher, "cpu")
    # As large as its images are here.
    size = {"height": SIZE[0], "width": SIZE[1]}
    normalize = {"image_mean": image_format.mean, "image_std": image_format.std}
    processor = ViTImageProcessor(size=size, resample=image_format.resample, **normalize)
    counts = TOKENS if kind == "trees" else GRIDS
    fields = {
        "focusing": "inherited",
        "image_size": list(SIZE),
        "elastic_token_counts": sorted(counts),
        **STUDENTS[kind],
    }
    student = SparseFormerModel.from_teacher(read_anatomy(teacher, SIZE), counts[0], **fields, **normalize)
    options = BootstrapArguments(
        **{"output_dir": str(folder), "num_train_epochs": arguments.bootstrap_epochs, "dense_loss_weight": 1.0},
        **{
            "per_device_train_batch_size": 16,
            "crop_scale": [0.5, 1.0],
            "bf16": arguments.mixed_precision == "bf16",
            "use_cpu": choose_device().type == "cpu",
        },
        **{"learning_rate": 2e-3, "inherited_learning_rate": 0.04, "crop_ratio": [1.2, 1.5]},
    )
    images = load_masked_images([arguments.train], "train").select_columns(["image"])
    BootstrapTrainer(teacher, student, options, images, processing_class=processor).train()
    return folder


def train_upsampler(arguments, folder: Path, teacher: Anatomy, image_format: ImageFormat) -> Path:
    """The folder of a bootstrapped student with an upsampler, trained now or before, without labels, while all else is
    frozen."""
    output, device = folder.with_name(f"{folder.name}-upsampler"), choose_device()
    if (output / "model.safetensors").is_file():
        return output
    torch.manual_seed(0)
    student = SparseFormerBackbone.from_pretrained(folder, upsampler_hidden_size=UPSAMPLER_HIDDEN_SIZE)
    student.requires_grad_(False).to(device).eval()
    weights = [*student.feature_maps.requires_grad_(True).parameters()]
    images, distance, batch_size = load_masked_images([arguments.train], "train"), MapAlignmentLoss(), 8
    optimizer, steps = torch.optim.AdamW(weights, lr=1e-3), UPSAMPLER_EPOCHS * (len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
    order = torch.cat([torch.randperm(len(images)) for _ in range(UPSAMPLER_EPOCHS)])
    for step in tqdm(range(steps), desc="upsampler", leave=False):
        chosen = order[step * batch_size :][:batch_size].tolist()
        batch = read_pixels(image_format, images, chosen, SIZE).to(device)
        batch = batch.flip(-1) if step % 2 else batch
        student.set_num_tokens(student.config.trained_token_counts[step % len(student.config.trained_token_counts)])
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            with torch.no_grad():
                target = map_of_teacher(teacher, batch)
            loss = distance(student(batch).feature_maps, [target])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    student.set_num_tokens(None)
    with whole_folder(output, overwrite=True) as written:
        student.save_pretrained(written)
    return output


def students(name: str, student: SparseFormerBackbone, counts, readout: Callable | None = None):
    for count in counts:
        maps = functools.partial(readout or map_of_student, student, count)
        yield Backbone(name, count, SIZE, macs_of(Vision(student, maps), SIZE), maps)


def read_masks(images) -> torch.Tensor:
    """Class numbers of all images, `(images, height, width)` uint8."""
    reader, found = MaskReader(len(CLASSES), [VOID]), []
    for index in range(len(images)):
        record = images[index]
        found.append(reader(record["mask"], index, decode_image(record["image"], index).size))
    return torch.stack(found)


def map_of_teacher(anatomy: Anatomy, pixel_values: torch.Tensor) -> torch.Tensor:
    return anatomy.feature_maps(pixel_values)[0]


def map_of_student(student: SparseFormerBackbone, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    return student(pixel_values, num_tokens=num_tokens).feature_maps[-1]


def map_by_gaussians(student: SparseFormerBackbone, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    """Tokens spread as the paper's segmentation head spreads their scores where all are alike (equation 7)."""
    base = student.sparseformer
    outputs = base(pixel_values, num_tokens=num_tokens, output_hidden_states=True, output_rois=True)
    tokens = base.layernorm(outputs.hidden_states[-1])[:, student.config.num_prefix_tokens :]
    grid = student.feature_maps.size_of(pixel_values)
    return spread_over_cells(tokens, geometric_bias(outputs.rois[-1], *grid).softmax(1))


def map_of_random_patches(some: RandomPatches, pixel_values: torch.Tensor) -> torch.Tensor:
    """Each cell has the state of the nearest patch that was kept."""
    tokens, kept = some.states(pixel_values)
    anatomy = some.anatomy
    tokens, (rows, columns) = anatomy.normalize(tokens)[:, anatomy.num_prefix_tokens :], anatomy.grid
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float().to(tokens.device)
    nearest = torch.cdist(cells.expand(len(kept), -1, -1), cells[kept]).argmin(-1)
    return tokens.gather(1, nearest[..., None].expand(-1, -1, tokens.shape[-1])).mT.unflatten(-1, anatomy.grid)


def map_of_merged(vit: PooledViT, grid: tuple[int, int], pixel_values: torch.Tensor) -> torch.Tensor:
    """Each cell has the state of the token that its patch was merged into."""
    tokens = vit(pixel_values)
    # `(batch, tokens, [CLS] and patches)`, 1 where a token has a patch; [CLS] is merged with none.
    source = vit._tome_info["source"][..., 1:].to(tokens.dtype)
    return spread_over_cells(tokens, source.unflatten(-1, grid))


def mean_cosine(maps: torch.Tensor, target: torch.Tensor) -> float:
    """Mean cosine of maps with those of the teacher, over cells and images."""
    found = []
    for one, other in zip(maps.split(10), target.split(10), strict=True):
        one = F.interpolate(one.float(), other.shape[-2:], mode="bilinear")
        found.append(F.cosine_similarity(one, other.float()).mean((1, 2)))
    return torch.cat(found).mean().item()


@torch.inference_mode()
def embed(arguments, image_format: ImageFormat, backbone: Backbone, images) -> torch.Tensor:
    """A backbone's maps of all images, `(images, channels, rows, columns)` bfloat16."""
    device, found = choose_device(), []
    for start in tqdm(range(0, len(images), 8), desc=f"{backbone.name}, {backbone.tokens}", leave=False):
        chosen = range(start, min(start + 8, len(images)))
        batch = read_pixels(image_format, images, chosen, backbone.size).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            found.append(backbone.maps(batch).bfloat16().cpu())
    return torch.cat(found)


def read_pixels(image_format: ImageFormat, images, chosen, size: tuple[int, int]) -> torch.Tensor:
    """Chosen images, resized and normalized, `(batch, 3, height, width)`."""
    found = [
        decode_image(images[index]["image"], index).resize(size[::-1], Image.Resampling.BICUBIC) for index in chosen
    ]
    return image_format.normalize(
        torch.stack([torch.from_numpy(np.array(each)) for each in found]).permute(0, 3, 1, 2)
    )


def score(arguments, train: torch.Tensor, test: torch.Tensor, train_masks, test_masks, seed: int) -> dict[str, float]:
    """Mean intersection over union of a linear layer on frozen maps."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    grid = train.shape[-2:]
    shares = torch.cat([shares_of_classes(part, grid) for part in train_masks.split(20)]).flatten(0, 2)
    cells = train.permute(0, 2, 3, 1).flatten(0, 2)
    mean, std = cells.float().mean(0), cells.float().std(0)
    classify = nn.Linear(train.shape[1], len(CLASSES))
    optimizer = torch.optim.AdamW(classify.parameters(), lr=2e-3, weight_decay=1e-4)
    batch_size = 1_024
    steps = arguments.epochs * (len(cells) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for _ in range(arguments.epochs):
        order = torch.randperm(len(cells), generator=generator)
        for chosen in order.split(batch_size)[: len(cells) // batch_size]:
            scores = classify((cells[chosen].float() - mean) / std)
            # Cells of pixels that do not count weigh less.
            loss = -(shares[chosen] * scores.log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    measured = SegmentationScores(len(CLASSES))
    with torch.inference_mode():
        for maps, masks in zip(test.split(10), test_masks.split(10), strict=True):
            scores = classify((maps.float().permute(0, 2, 3, 1) - mean) / std).permute(0, 3, 1, 2)
            guessed = F.interpolate(scores, masks.shape[1:], mode="bilinear").argmax(1)
            measured.add_batch(predictions=guessed, references=masks)
    found = measured.compute()
    thin = statistics.mean(found["iou"][CLASSES.index(name)] for name in THIN)
    return {"mean_iou": found["mean_iou"], "thin_iou": thin}


def shares_of_classes(masks: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The share of each cell that each class covers, `(images, rows, columns, classes)`."""
    layers = torch.stack([(masks == number).float() for number in range(len(CLASSES))], dim=1)
    return F.adaptive_avg_pool2d(layers, grid).permute(0, 2, 3, 1)


if __name__ == "__main__":
    main()
