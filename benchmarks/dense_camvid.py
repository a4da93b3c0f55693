"""Compare feature maps of frozen SparseFormer backbones with feature maps of their teacher, on road scenes.

    python benchmarks/dense_camvid.py --teacher VIT --train CAMVID_TRAIN --test CAMVID_TEST --bootstrap content grid \\
        --tome CHECKOUT

A linear layer predicts the shares of classes in each grid cell of a feature map. All training images are used. The
scores of the linear layer for a test image are interpolated to the mask's size.

- The teacher runs on images of 336 x 448 pixels and on smaller images. At 336 x 448 pixels, it also runs on random
  patches, and with ToMe (github.com/facebookresearch/ToMe, not tuned). A grid cell without a patch gets the features
  of the nearest kept patch. Grid cells of merged patches get the features of the merged token.
- Students run on images of 336 x 448 pixels with fewer tokens. They are measured before training. Students named by
  --bootstrap are then trained to match the teacher's embeddings and feature maps, and are measured again. The training
  uses no masks. In the student with "alone" in its name, only the upsampler is trained.
- Cosines compare feature maps with those of the teacher on test images. Milliseconds are the time for one image on the
  CPU in float32. Backbones are timed in turns.

`grid-upsampler` is trained with each seed of --seeds, and other students with the first seed. Finished runs under
--runs-dir are reused. The output is dense_camvid.json and .webp. CamVid (Brostow et al.) is a data set for research.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from segmentation_table import CLASSES, VOID
from torch import nn
from tqdm import tqdm
from transformers import ViTImageProcessor

from frugalvit import BootstrapArguments, BootstrapTrainer, PatchSparseFormerBackbone, SparseFormerBackbone
from frugalvit.baselines import Vision
from frugalvit.compare import draw_comparison
from frugalvit.macs import count_macs
from frugalvit.modeling.dense import spread as spread_over_cells
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.modeling.hosts.running import compute_feature_maps, normalize
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.pictures import save_figure
from frugalvit.speed import images_per_second
from frugalvit.training.loading import choose_device, load_model
from frugalvit.training.masks import MaskReader, load_masked_images
from frugalvit.training.preprocessing import decode_image
from linear_probe import LinearProbe
from shared import add_precision_argument, add_run_arguments, folder_name, make_parser, spread, write_table
from token_merging import PooledViT, RandomPatches, tome


SIZE = (336, 448)
# Sizes of the teacher's images in pixels. The images have 768, 432, 336, 285 and 192 patches of 14 x 14 pixels.
SIZES = [SIZE, (252, 336), (224, 294), (210, 266), (168, 224)]
TOKENS = [432, 285, 192]
# Numbers of tokens that ToMe merges in each block.
MERGED = [40, 56, 80]
# Classes of thin objects. Their scores are the first to fall at low resolution.
THIN = ("pole", "sign", "pedestrian", "cyclist")
STUDENTS = {"content": {"placement": "content"}, "grid": {}}
UPSAMPLER = {"upsampler_hidden_size": 128}
STUDENTS |= {f"{name}-upsampler": fields | UPSAMPLER for name, fields in STUDENTS.items()}
# Name of the student in which only the upsampler is trained.
ALONE = "grid-upsampler-alone"
STUDENTS[ALONE] = UPSAMPLER
# Name of the student that is bootstrapped with each seed. Other students are bootstrapped with the first seed.
HEADLINE = "grid-upsampler"


@dataclass
class Backbone:
    """A model that computes feature maps. Each backbone has one row in the table.

    Args:
        name (`str`): Name of the row.
        tokens (`int`): Number of patches or latent tokens.
        size (pair of `int`): Height and width of the images in pixels.
        model (`nn.Module`): Model whose multiply-accumulates are counted.
        maps (`Callable`): Maps normalized images to feature maps `(batch, channels, rows, columns)`.
        others (`list[Callable]`): Functions like `maps`, for models that were trained with other seeds.
    """

    name: str
    tokens: int
    size: tuple[int, int]
    model: nn.Module
    maps: Callable[[torch.Tensor], torch.Tensor]
    others: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)

    @property
    def macs(self) -> int:
        return count_macs(Vision(self.model, self.maps), self.size).macs_with_attention


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--teacher", required=True, help="folder of a pretrained ViT with patches of 14 pixels")
    parser.add_argument("--bootstrap", nargs="*", default=[], choices=STUDENTS, help="students to bootstrap")
    parser.add_argument("--bootstrap-epochs", type=int, default=64, help="of the training images (default: 64)")
    parser.add_argument("--train", required=True, help="CamVid to train on, as in `frugalvit segment`")
    parser.add_argument("--test", required=True, help="CamVid to test on")
    parser.add_argument("--tome", help="checkout of ToMe")
    add_precision_argument(parser, "bf16")
    add_run_arguments(parser, "runs/dense_camvid")
    arguments = parser.parse_args()
    model, processor = load_model(arguments.teacher, "image-feature-extraction", "cpu")
    image_format = ImageFormat.from_processor(processor)
    train, test = (load_masked_images([data], "train") for data in (arguments.train, arguments.test))
    settings = {"teacher": Path(arguments.teacher).name, "seeds": arguments.seeds}
    settings |= {"bootstrap_epochs": arguments.bootstrap_epochs} if arguments.bootstrap else {}
    data = f"CamVid, {len(train)} training and {len(test)} test images, 11 classes, scored at 360 x 480 pixels"
    masks = [read_masks(images).to(choose_device()) for images in (train, test)]
    # Speed is measured on the CPU. Feature maps are computed on a GPU if there is one.
    found = dict(enumerate(backbones(arguments, model, image_format, torch.device("cpu"))))
    speeds = images_per_second(
        {index: backbone.maps for index, backbone in found.items()},
        {index: torch.randn(1, 3, *backbone.size) for index, backbone in found.items()},
        rounds=10,
    )
    costs = [{"macs": backbone.macs, "milliseconds": 1000 / speeds[index]} for index, backbone in found.items()]
    rows, maps_of_teacher, scores_of_teacher = [], None, None
    found = backbones(arguments, model, image_format, choose_device())
    for backbone, cost in zip(found, costs, strict=True):
        row = {"backbone": backbone.name, "pixels": "x".join(map(str, backbone.size)), "tokens": backbone.tokens}
        row |= cost
        scores, cosines = [], []
        for maps_of in (backbone.maps, *backbone.others):
            each = dataclasses.replace(backbone, maps=maps_of)
            maps = [embed(arguments, image_format, each, images) for images in (train, test)]
            scores.append(score(*maps, *masks))
            if not rows:
                # The first backbone is the teacher.
                maps_of_teacher, [scores_of_teacher] = maps[1], scores
            cosines.append(mean_cosine(maps[1], maps_of_teacher))
        for name, error, classes in (("mean_iou", "spread", CLASSES), ("thin_iou", "thin_spread", THIN)):
            values = [mean_iou(counts.sum(0), classes).item() for counts in scores]
            row |= {name: statistics.mean(values), error: spread(values)}
        row |= behind(scores, scores_of_teacher) if rows else {}
        rows.append(row | {"cosine": statistics.mean(cosines)})
        write_table(arguments.results_dir / "dense_camvid.json", settings, rows, data=data)
    save_figure(draw(rows), arguments.results_dir / "dense_camvid.webp")


def draw(rows: list[dict]) -> Figure:
    points = []
    for row in rows:
        name = "ToMe, unmerged" if row["backbone"].startswith("ToMe") else row["backbone"]
        speed, score = {"float32": {1: 1000 / row["milliseconds"]}}, {"mean_iou": row["mean_iou"]}
        error = {"mean_iou_error": row.get("behind_error")}
        points.append({"model": "336 x 448 pixels", "method": name, "images_per_second": speed, **score, **error})
    return draw_comparison(points, size=(6.0, 4.6))


def backbones(arguments, model: nn.Module, image_format: ImageFormat, device: torch.device) -> Iterator[Backbone]:
    """Yield the backbones of all rows: the teacher, the teacher with fewer tokens, and the students."""
    model.to(device)
    for size in SIZES:
        anatomy = read_anatomy(model, size)
        name = "teacher" if size == SIZE else "teacher at lower resolution"
        maps = functools.partial(map_of_teacher, anatomy)
        yield Backbone(name, anatomy.num_patches, size, model, maps)
    whole = read_anatomy(model, SIZE)
    for count in TOKENS:
        maps = functools.partial(map_of_random_patches, RandomPatches(whole, count, seed=0))
        yield Backbone("teacher with random patches", count, SIZE, model, maps)
    for merged in MERGED if arguments.tome else []:
        vit = tome(whole, arguments.tome, merged, trace_source=True).vit
        # Replace the head by an identity, so that the ViT returns tokens.
        vit.forward_head = lambda tokens: tokens
        maps = functools.partial(map_of_merged, vit, whole.grid)
        tokens = whole.num_patches
        for _ in whole.blocks:
            tokens -= min(merged, tokens // 2)
        yield Backbone(f"ToMe, {merged} a block, unmerged", tokens, SIZE, vit, maps)
    # Before training, an upsampler does not change a feature map, so untrained students are measured without one.
    for kind in dict.fromkeys(kind.partition("-")[0] for kind in arguments.bootstrap or ["content"]):
        student = new_student(whole, kind, image_format).to(device).eval()
        yield from students(f"{kind}, before training", [student], TOKENS)
    for kind in arguments.bootstrap:
        folders = bootstrap_students(arguments, kind, image_format)
        found = [PatchSparseFormerBackbone.from_pretrained(folder).to(device).eval() for folder in folders]
        name = f"{kind.replace('-', ' with ', 1).replace('-', ' ')}, bootstrapped"
        yield from students(name, found, TOKENS)


def new_student(teacher: Anatomy, kind: str, image_format: ImageFormat) -> PatchSparseFormerBackbone:
    fields = {"image_size": list(SIZE), "elastic_token_counts": sorted(TOKENS)}
    fields |= {"image_mean": image_format.mean, "image_std": image_format.std, **STUDENTS[kind]}
    return PatchSparseFormerBackbone.from_teacher(teacher, TOKENS[0], **fields)


def bootstrap_students(arguments, kind: str, image_format: ImageFormat) -> list[Path]:
    folders, size = [], {"height": SIZE[0], "width": SIZE[1]}
    fields = image_format.config_fields()
    # Training images have the size of the test images.
    processor = ViTImageProcessor(
        size=size, **{name: fields[name] for name in ("image_mean", "image_std", "resample")}
    )
    for seed in arguments.seeds if kind == HEADLINE else arguments.seeds[:1]:
        name = folder_name(f"{kind} {arguments.bootstrap_epochs} epochs", seed)
        folders.append(folder := arguments.runs_dir / name)
        if (folder / "README.md").is_file():
            continue
        teacher, _ = load_model(arguments.teacher, "image-feature-extraction", "cpu")
        torch.manual_seed(seed)
        student = new_student(read_anatomy(teacher, SIZE), kind, image_format)
        options = BootstrapArguments(
            output_dir=str(folder),
            seed=seed,
            num_train_epochs=arguments.bootstrap_epochs,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            inherited_lr_factor=0.0 if kind == ALONE else 0.05,
            warmup_steps=0.05,
            dense_loss_weight=1.0,
            crop_scale=[0.4, 1.0],
            crop_ratio=[1.2, 1.5],
            bf16=arguments.mixed_precision == "bf16",
            use_cpu=choose_device().type == "cpu",
        )
        images = load_masked_images([arguments.train], "train").select_columns(["image"])
        BootstrapTrainer(teacher, student, options, images, processing_class=processor).run()
    return folders


def students(name: str, found: Sequence[SparseFormerBackbone], counts: Sequence[int]) -> Iterator[Backbone]:
    """Yield a backbone for each number of tokens. `found` has one student for each seed."""
    for count in counts:
        maps, *others = (functools.partial(map_of_student, each, count) for each in found)
        yield Backbone(name, count, SIZE, found[0], maps, others)


def read_masks(images) -> torch.Tensor:
    """Return the class number of each pixel, `(images, height, width)` uint8."""
    reader, found = MaskReader(len(CLASSES), [VOID]), []
    for index in range(len(images)):
        record = images[index]
        found.append(reader(record["mask"], index, decode_image(record["image"], index).size))
    return torch.stack(found)


def map_of_teacher(anatomy: Anatomy, pixel_values: torch.Tensor) -> torch.Tensor:
    return compute_feature_maps(anatomy, pixel_values)[0]


def map_of_student(student: SparseFormerBackbone, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    return student(pixel_values, num_tokens=num_tokens).feature_maps[-1]


def map_of_random_patches(some: RandomPatches, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return a feature map in which each grid cell has the features of the nearest kept patch."""
    tokens, kept = some.states(pixel_values)
    anatomy = some.anatomy
    tokens = normalize(anatomy, tokens)[:, anatomy.num_prefix_tokens :]
    rows, columns = anatomy.grid
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float().to(tokens.device)
    nearest = torch.cdist(cells.expand(len(kept), -1, -1), cells[kept]).argmin(-1)
    return tokens.gather(1, nearest[..., None].expand(-1, -1, tokens.shape[-1])).mT.unflatten(-1, anatomy.grid)


def map_of_merged(vit: PooledViT, grid: tuple[int, int], pixel_values: torch.Tensor) -> torch.Tensor:
    """Return a feature map in which each grid cell has the features of the token that contains the cell's patch."""
    tokens = vit(pixel_values)
    # `source`, `(batch, tokens, [CLS] + patches)`, is 1 where a token contains a patch. The [CLS] column is dropped.
    source = vit._tome_info["source"][..., 1:].to(tokens.dtype)
    return spread_over_cells(tokens, source.unflatten(-1, grid))


def mean_cosine(maps: torch.Tensor, target: torch.Tensor) -> float:
    found = []
    for one, other in zip(maps.split(10), target.split(10), strict=True):
        one = F.interpolate(one.float(), other.shape[-2:], mode="bilinear")
        found.append(F.cosine_similarity(one, other.float()).mean((1, 2)))
    return torch.cat(found).mean().item()


@torch.inference_mode()
def embed(arguments, image_format: ImageFormat, backbone: Backbone, images) -> torch.Tensor:
    """Return a backbone's feature maps of all images, `(images, channels, rows, columns)` bfloat16."""
    device, found = choose_device(), []
    for start in tqdm(range(0, len(images), 8), desc=f"{backbone.name}, {backbone.tokens}", leave=False):
        chosen = range(start, min(start + 8, len(images)))
        batch = read_pixels(image_format, images, chosen, backbone.size).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            found.append(backbone.maps(batch).bfloat16())
    return torch.cat(found)


# The cache keeps all images, because all rows use the same images.
@functools.lru_cache(None)
def read_image(images, index: int, size: tuple[int, int]) -> torch.Tensor:
    """Read and resize an image, `(3, height, width)` uint8."""
    image = decode_image(images[index]["image"], index).resize(size[::-1], Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def read_pixels(image_format: ImageFormat, images, chosen, size: tuple[int, int]) -> torch.Tensor:
    """Return the images with the indices `chosen`, resized and normalized, `(batch, 3, height, width)`."""
    return image_format.normalize(torch.stack([read_image(images, index, size) for index in chosen]))


def score(train: torch.Tensor, test: torch.Tensor, train_masks: torch.Tensor, test_masks: torch.Tensor):
    """Train a linear layer that predicts the shares of classes in each grid cell of the feature maps `train`. Then
    predict the masks of the test images from `test`. Return the number of pixels in the intersection and in the union
    of predicted and true mask, for each test image and class, `(images, 2, classes)`."""
    grid, device = train.shape[-2:], train.device
    shares = torch.cat([shares_of_classes(part, grid) for part in train_masks.split(20)]).flatten(0, 2)
    cells = train.permute(0, 2, 3, 1).flatten(0, 2).float()
    # Void pixels belong to no class. Grid cells with void pixels have less weight, as their shares sum to less than 1.
    probe = LinearProbe(cells, shares, len(CLASSES), penalty=0.0, max_iter=100)
    counts, numbers = [], torch.arange(len(CLASSES), device=device).view(-1, 1, 1, 1)
    with torch.inference_mode():
        for maps, masks in zip(test.split(10), test_masks.split(10), strict=True):
            scores = probe(maps.permute(0, 2, 3, 1).float()).permute(0, 3, 1, 2)
            guessed = F.interpolate(scores, masks.shape[1:], mode="bilinear").argmax(1)
            said, true = (guessed == numbers) & (masks < len(CLASSES)), masks == numbers
            counts.append(torch.stack([(said & true).sum((2, 3)), (said | true).sum((2, 3))]).permute(2, 0, 1))
    return torch.cat(counts).double().cpu()


def mean_iou(counts: torch.Tensor, classes: Sequence[str] = CLASSES) -> torch.Tensor:
    """Compute the mean intersection over union of `classes` from numbers of pixels `(…, 2, classes)`."""
    right, union = counts[..., [CLASSES.index(name) for name in classes]].unbind(-2)
    return (right / union).nanmean(-1)


def behind(scores: list[torch.Tensor], teacher: torch.Tensor) -> dict[str, float]:
    """Return the teacher's mean IoU minus the students' mean IoU, averaged over seeds. Also return the standard
    error of this difference, from resampled test images."""
    chosen = torch.randint(len(teacher), (2_000, len(teacher)), generator=torch.Generator().manual_seed(0))
    weights = F.one_hot(chosen, len(teacher)).sum(1).double()

    def resampled(counts: torch.Tensor) -> torch.Tensor:
        return mean_iou((weights @ counts.flatten(1)).unflatten(1, counts.shape[1:]))

    whole = [mean_iou(counts.sum(0)).item() for counts in (teacher, *scores)]
    differences = resampled(teacher) - torch.stack([resampled(counts) for counts in scores]).mean(0)
    return {"behind": whole[0] - statistics.mean(whole[1:]), "behind_error": differences.std().item()}


def shares_of_classes(masks: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return the share of each class in the pixels of each grid cell, `(images, rows, columns, classes)`."""
    layers = torch.stack([(masks == number).float() for number in range(len(CLASSES))], dim=1)
    return F.adaptive_avg_pool2d(layers, grid).permute(0, 2, 3, 1)


if __name__ == "__main__":
    main()
