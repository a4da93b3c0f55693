"""Small objects: a detector on frozen maps of SparseFormer backbones, beside their teacher at several resolutions.

    python benchmarks/detection.py --teacher VIT --train CALTECH_TRAIN --train-backgrounds CAMVID_TRAIN \\
        --test CALTECH_TEST --test-backgrounds CAMVID_TEST --student FOLDER

Photographs of ten classes of Caltech-101, cut to ellipses of 12 to 192 pixels, lie on road scenes of CamVid, where
chance put them, so that boxes and classes are known. Each backbone's map of the last layer is computed once and
frozen. Transformers' RT-DETR v2 learns from it, with equal heads: coarser maps are interpolated to the grid of the
finest. Rows are the teacher at 336 x 448 pixels, for each of --tokens the teacher at the resolution that costs as
much, students before training, and --student, folders that load as `PatchSparseFormerBackbone`. Runs are kept under
--runs-dir and found again, so that a killed command goes on, and seeds can be run side by side. Writes detection.json
and detection.webp, test images with the boxes that were found. Objects below 32 x 32 pixels are small, those above
96 x 96 large, as COCO has it, though its images are larger. Needs frugalvit[detection].
"""

import argparse
import functools
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from dense_camvid import SIZE, TREE, Backbone, embed, students, teachers
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_convert
from tqdm import tqdm
from transformers import (
    AutoBackbone,
    PreTrainedConfig,
    PreTrainedModel,
    RTDetrImageProcessor,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
)
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.modeling_outputs import BackboneOutput

from frugalvit import PatchSparseFormerBackbone, SparseFormerBackbone
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import write_json
from frugalvit.common.loading import choose_device, load_vision_model
from frugalvit.common.masks import load_masked_images
from frugalvit.common.tables import format_table
from frugalvit.common.views import ImageFormat, seeded
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.pictures import save_figure
from shared import add_results_argument, folder_name, spread, write_table


# Classes that road scenes do not show.
CLASSES = [
    *("Faces_easy", "Leopards", "Motorbikes", "airplanes", "bonsai"),
    *("chandelier", "grand_piano", "hawksbill", "ketch", "watch"),
]
# Roots of areas in pixels, by the names that COCO gives them.
SIDES = {"small": (12, 32), "medium": (32, 96), "large": (96, 192)}
MOST_OBJECTS, PLACES = 8, 20
# Rows and columns of patches of 14 pixels.
GRID = tuple(side // 14 for side in SIZE)
# A grid before training is the teacher at lower resolution.
STUDENTS = {"trees, before training": TREE}
METRICS = {"map": "ap", "map_50": "ap50", **{f"map_{side}": f"ap_{side}" for side in SIDES}}
# The same of boxes alone, whatever their class.
BOX_METRICS = {key: f"box_{name}" for key, name in METRICS.items()}
BATCH_SIZE = 8
# Test images of the picture, and the score of the boxes that it shows.
PICTURES, SHOWN = 4, 0.3


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a pretrained ViT with patches of 14 pixels")
    parser.add_argument("--student", nargs="*", default=[], help="folders of students of that teacher")
    for part, name in (("train", "training"), ("test", "test")):
        parser.add_argument(f"--{part}", required=True, help=f"Caltech-101's {name} images")
        parser.add_argument(f"--{part}-backgrounds", required=True, help=f"CamVid's {name} images")
    parser.add_argument("--tokens", type=int, nargs="+", default=[192], help="of students (default: 192)")
    parser.add_argument("--train-images", type=int, default=1_500, help="default: %(default)s")
    parser.add_argument("--test-images", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3_000, help=f"of {BATCH_SIZE} images (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: %(default)s")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the detector (default: 0 1)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/detection"), help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()
    if len({Path(folder).name for folder in arguments.student}) < len(arguments.student):
        parser.error("two of --student have the same name; rename a folder")
    train = Scenes(arguments.train, arguments.train_backgrounds, arguments.train_images, seed=0)
    test = Scenes(arguments.test, arguments.test_backgrounds, arguments.test_images, seed=1)
    model, processor = load_vision_model(arguments.teacher, str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    rows, found = [], {}
    for backbone in backbones(arguments, model, image_format):
        runs = measure(arguments, image_format, backbone, train, test)
        row = {"backbone": backbone.name, "pixels": "x".join(map(str, backbone.size)), "tokens": backbone.tokens}
        row |= {"macs": backbone.macs}
        for name in (*METRICS.values(), *BOX_METRICS.values()):
            values = [run[name] for run in runs]
            row |= {name: statistics.mean(values), f"{name}_spread": spread(values)}
        rows.append(row)
        found[f"{backbone.name}, {backbone.tokens} tokens"] = runs[0]["detections"]
        print(format_table([{k: v for k, v in row.items() if not k.endswith("spread")} for row in rows]), flush=True)
    settings = {"teacher": Path(arguments.teacher).name, "seeds": arguments.seeds, "steps": arguments.steps}
    settings |= {"batch_size": BATCH_SIZE, "learning_rate": arguments.learning_rate, "classes": CLASSES}
    settings |= {"train_objects": train.count(), "test_objects": test.count()}
    data = f"Objects of Caltech-101 on CamVid, {len(train)} training and {len(test)} test images, 336 x 448 pixels"
    write_table(arguments.results_dir / "detection.json", settings, rows, data=data)
    save_figure(draw(test, found), arguments.results_dir / "detection.webp")


class Scenes(Dataset):
    """Objects on photographs: a function of the seed and an image's number.

    Args:
        objects, backgrounds (`str`): Caltech-101, and CamVid, as files or folders.
        count (`int`): Number of images.
        seed (`int`): Chooses classes, objects, sizes and places.
    """

    def __init__(self, objects: str, backgrounds: str, count: int, seed: int):
        records = load_images([objects], "train")
        names = records.features["label"].names
        if missing := [name for name in CLASSES if name not in names]:
            raise ValueError(f"{objects!r} has no class {missing[0]!r}, expected those of Caltech-101.")
        self.records, self.count_, self.seed = records, count, seed
        labels = torch.tensor(records["label"])
        self.of_class = [(labels == names.index(name)).nonzero().flatten() for name in CLASSES]
        self.backgrounds = load_masked_images([backgrounds], "train")

    def __len__(self) -> int:
        return self.count_

    def __getitem__(self, index: int) -> dict:
        """`image`, a `PIL.Image`; `boxes`, `(objects, 4)` float32, left, top, right, bottom in pixels; `labels`,
        `(objects,)` int64."""
        with seeded(self.seed, index):
            number = int(torch.randint(len(self.backgrounds), ()))
            image = decode_image(self.backgrounds[number]["image"], number).resize(SIZE[::-1])
            boxes, labels = [], []
            sides = torch.rand(int(torch.randint(2, MOST_OBJECTS + 1, ())))
            kinds = torch.randint(len(SIDES), sides.shape)
            # The large ones come first, while there is room.
            for kind, share in sorted(zip(kinds.tolist(), sides.tolist(), strict=True), reverse=True):
                low, high = [*SIDES.values()][kind]
                label, chosen = self.draw_object()
                cut = decode_image(self.records[chosen]["image"], chosen)
                side = low * (high / low) ** share
                ratio = min(max(cut.width / cut.height, 0.5), 2) ** 0.5
                width, height = round(side * ratio), round(side / ratio)
                if (box := free_place(width, height, boxes)) is not None:
                    image.paste(cut.resize((width, height)), box[:2], ellipse(width, height))
                    boxes.append(box)
                    labels.append(label)
        return {"image": image, "boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}

    def draw_object(self) -> tuple[int, int]:
        """A class and the number of a photograph of it."""
        label = int(torch.randint(len(CLASSES), ()))
        return label, int(self.of_class[label][torch.randint(len(self.of_class[label]), ())])

    @functools.cached_property
    def truth(self) -> list[dict[str, torch.Tensor]]:
        """Boxes and labels of all images."""
        found = []
        for index in tqdm(range(len(self)), desc="scenes", leave=False):
            scene = self[index]
            found.append({"boxes": scene["boxes"], "labels": scene["labels"]})
        return found

    def count(self) -> dict[str, int]:
        """Number of objects of each size, as COCO's metrics have it."""
        areas = torch.cat([each["boxes"] for each in self.truth])
        areas = (areas[:, 2:] - areas[:, :2]).prod(1)
        small, large = (areas < 32**2).sum().item(), (areas > 96**2).sum().item()
        return {"small": small, "medium": len(areas) - small - large, "large": large}


def free_place(width: int, height: int, boxes: list[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """A box of that size that chance places where no other is; none where several tries found no room."""
    for _ in range(PLACES):
        left, top = (
            int(torch.randint(whole - part + 1, ())) for whole, part in zip(SIZE[::-1], (width, height), strict=True)
        )
        box = (left, top, left + width, top + height)
        if all(box[0] >= b[2] or b[0] >= box[2] or box[1] >= b[3] or b[1] >= box[3] for b in boxes):
            return box
    return None


def ellipse(width: int, height: int) -> Image.Image:
    """A mask of that size, which an ellipse fills."""
    mask = Image.new("L", (4 * width, 4 * height))
    ImageDraw.Draw(mask).ellipse((0, 0, 4 * width - 1, 4 * height - 1), fill=255)
    return mask.resize((width, height))


def backbones(arguments, model: nn.Module, image_format: ImageFormat):
    """The rows' backbones, one at a time."""
    device = choose_device()
    same_cost = [
        tuple(round(cells * (n / (GRID[0] * GRID[1])) ** 0.5) * 14 for cells in GRID) for n in arguments.tokens
    ]
    yield from teachers(model, (SIZE, *same_cost))
    normalize = {"image_mean": image_format.mean, "image_std": image_format.std}
    whole = read_anatomy(model, SIZE)
    for name, fields in STUDENTS.items():
        student = SparseFormerBackbone.from_teacher(
            *(whole, arguments.tokens[0]), focusing="inherited", image_size=list(SIZE), **fields, **normalize
        )
        yield from students(name, [student.to(device).eval()], arguments.tokens)
    for folder in arguments.student:
        student = PatchSparseFormerBackbone.from_pretrained(folder).to(device).eval()
        yield from students(Path(folder).name, [student], arguments.tokens)


def measure(arguments, image_format: ImageFormat, backbone: Backbone, train: Scenes, test: Scenes) -> list[dict]:
    """A run of each seed, trained now or found; maps are computed if one is trained."""
    budget = ("train_images", "test_images", "steps", "learning_rate", "mixed_precision")
    argv = [arguments.teacher, *(str(getattr(arguments, name)) for name in budget)]
    maps, runs = None, []
    for seed in arguments.seeds:
        file = arguments.runs_dir / f"{folder_name(f'{backbone.name} {backbone.tokens}', seed, argv)}.json"
        if not file.is_file():
            maps = maps or [embed(arguments, image_format, backbone, scenes) for scenes in (train, test)]
            head = train_head(arguments, maps[0], train.truth, seed, f"{backbone.name}, {backbone.tokens}")
            arguments.runs_dir.mkdir(parents=True, exist_ok=True)
            write_json(file, evaluate(head, maps[1], test.truth))
        runs.append(json.loads(file.read_text(encoding="utf-8")))
    return runs


class MapConfig(BackboneConfigMixin, PreTrainedConfig):
    """Configuration of a `MapBackbone`."""

    model_type = "map"
    hidden_size: int = 384

    def __post_init__(self, **kwargs):
        self.stage_names = ["stem", "stage1", "stage2", "stage3"]
        self.set_output_features_output_indices(None, [1, 2, 3])
        super().__post_init__(**kwargs)


class MapBackbone(BackboneMixin, PreTrainedModel):
    """Takes a map that is there already for the image, and gives it at the finest grid, at half of it and a quarter,
    as ViTDet makes its pyramid of the last map."""

    config_class = MapConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MapConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **kwargs) -> BackboneOutput:
        finest = pixel_values
        if finest.shape[-2:] != GRID:
            finest = F.interpolate(finest, GRID, mode="bilinear")
        return BackboneOutput(feature_maps=(finest, F.avg_pool2d(finest, 2), F.avg_pool2d(finest, 4)))


AutoBackbone.register(MapConfig, MapBackbone, exist_ok=True)


def make_head(hidden_size: int) -> RTDetrV2ForObjectDetection:
    """A detector of maps of so many channels, small enough to learn in minutes on a CPU."""
    width, heads = 64, 4
    config = RTDetrV2Config(
        backbone_config=MapConfig(hidden_size=hidden_size),
        encoder_in_channels=[hidden_size] * 3,
        encoder_hidden_dim=width,
        encoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        hidden_expansion=0.5,
        d_model=width,
        decoder_in_channels=[width] * 3,
        decoder_attention_heads=heads,
        decoder_ffn_dim=2 * width,
        decoder_layers=2,
        num_queries=40,
        num_denoising=48,
        num_labels=len(CLASSES),
    )
    return RTDetrV2ForObjectDetection(config).to(choose_device())


def targets_of(truth: list[dict]) -> list[dict[str, torch.Tensor]]:
    """Boxes and labels as the detector takes them: centers and sizes, x before y, 0 to 1 across the image."""
    found, scale = [], torch.tensor([*SIZE[::-1], *SIZE[::-1]])
    for each in truth:
        boxes = box_convert(each["boxes"] / scale, "xyxy", "cxcywh").to(choose_device())
        found.append({"class_labels": each["labels"].to(choose_device()), "boxes": boxes})
    return found


def train_head(arguments, maps: torch.Tensor, truth: list[dict], seed: int, name: str) -> RTDetrV2ForObjectDetection:
    """Train a detector on maps of all images, `(images, channels, rows, columns)`."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head, targets = make_head(maps.shape[1]).train(), targets_of(truth)
    optimizer = torch.optim.AdamW(head.parameters(), lr=arguments.learning_rate, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, arguments.steps, pct_start=0.1)
    order: list[int] = []
    for _ in (progress := tqdm(range(arguments.steps), desc=f"{name}, seed {seed}", leave=False)):
        if len(order) < BATCH_SIZE:
            order += torch.randperm(len(maps), generator=generator).tolist()
        chosen, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        loss = head(maps[chosen].float().to(head.device), labels=[targets[index] for index in chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=loss.item())
    return head.eval()


@torch.inference_mode()
def evaluate(head: RTDetrV2ForObjectDetection, maps: torch.Tensor, truth: list[dict]) -> dict:
    """Average precision, with classes and of boxes alone, and the boxes that were found in the first images."""
    processor, found, boxes = RTDetrImageProcessor(), [], []
    for batch in maps.split(BATCH_SIZE):
        outputs, sizes = head(batch.float().to(head.device)), [SIZE] * len(batch)
        found += processor.post_process_object_detection(outputs, threshold=0, target_sizes=sizes)
        # The likeliest class is the only one.
        outputs.logits = outputs.logits.amax(-1, keepdim=True)
        boxes += processor.post_process_object_detection(outputs, threshold=0, target_sizes=sizes)
    without_classes, measured = [each | {"labels": each["labels"] * 0} for each in truth], {}
    for names, guesses, expected in ((METRICS, found, truth), (BOX_METRICS, boxes, without_classes)):
        metric = MeanAveragePrecision()
        metric.update([{name: values.cpu() for name, values in each.items()} for each in guesses], expected)
        values = metric.compute()
        measured |= {name: values[key].item() for key, name in names.items()}
    shown = [
        [[round(value, 1) for value in box] for box in each["boxes"][each["scores"] > SHOWN].tolist()]
        for each in boxes[:PICTURES]
    ]
    return measured | {"detections": shown}


def draw(test: Scenes, found: dict[str, list[list[list[float]]]]) -> Figure:
    """Draw test images with the boxes that are true, a column, and those that each backbone's detector found."""
    columns = {"truth": [test.truth[index]["boxes"].tolist() for index in range(min(PICTURES, len(test)))], **found}
    rows = len(columns["truth"])
    figure = Figure(figsize=(2.6 * len(columns), 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for row in range(rows):
        for column, (name, boxes) in enumerate(columns.items()):
            axis = axes[row, column]
            axis.imshow(test[row]["image"])
            for left, top, right, bottom in boxes[row]:
                axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="yellow"))
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(name, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
