"""`frugalvit demo`: a page to look with: labels, where tokens look, features, attention, for your own images too."""

import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from .architectures import has_rois
from .attention import measure_attention, patch_grid
from .common.choices import SUBSET
from .common.data import load_images
from .common.decoding import decode_image, read_image
from .common.exported import ExportedModule
from .common.loading import choose_device, load_image_classifier
from .common.num_tokens import using_tokens
from .common.resources import checkpoint_path, shipped_checkpoints
from .common.views import prepare_images, restore_images
from .dense import as_backbone, dense_features, draw_dense
from .features import draw_features, feature_maps, parts
from .modeling.modeling_sparseformer import SparseFormerBackbone
from .options.demo import parse
from .pictures import draw_cells, draw_maps
from .predict import Prediction, draw_predictions, predict


TITLE = "frugalvit: vision transformers that need less"
INTRODUCTION = (
    "Choose a model and an image, or drop in your own. SparseFormers show where their tokens look, step by step, and, "
    "if these embed patches, the map of features that they make; the other models what their layers make of the image."
)
SHIPPED = (
    "Models called cifar10 know ten classes alone: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, "
    "truck."
)
# Drawn examples: enough to choose from in one row.
EXAMPLES = 8
# What can be uploaded, and shown: the largest photographs of cameras; and how long gradio keeps it.
MAX_UPLOAD, MAX_PIXELS, CACHE_SECONDS = "20mb", 50_000_000, 3_600
# Range of the slider until the number of a model's tokens is known.
MAX_TOKENS = 1_024
# Numbers that the slider's label names one by one.
MOST_NAMED = 8
# The page asks no other machine for its fonts.
FONTS = ["system-ui", "sans-serif"]
# Small images are shown large.
CSS = """
.gradio-container {max-width: 1100px !important; margin: auto}
#image img {width: 100%; height: 100%; object-fit: contain}
"""


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    check_port(arguments.port)
    choose_device(arguments.device)
    folders = {Path(model).name: model for model in arguments.models}
    if len(folders) < len(arguments.models):
        raise ValueError("Two of the models have the same name; rename a folder.")
    for model in arguments.models:
        # What is wrong with one is known before a page is there.
        load_image_classifier(model, arguments.device, arguments.trust_remote_code, or_backbone=True)
    folders = folders or shipped_classifiers()
    # Ended by a signal, too, the process leaves nothing behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="frugalvit-demo-") as folder:
        # Where gradio keeps what is uploaded and drawn.
        os.environ["GRADIO_TEMP_DIR"] = folder
        examples = example_images(Path(folder) / "examples")
        page = build_page(folders, arguments.device, arguments.trust_remote_code, examples)
        serve(page, server_name=arguments.host, server_port=arguments.port, inbrowser=arguments.open)


def check_port(port: int | None):
    """Raise a ValueError if no page can be served there."""
    if port is not None and not 1 <= port <= 65_535:
        raise ValueError(f"--port is {port}, expected a number from 1 to 65535.")


def shipped_classifiers() -> dict[str, Path]:
    """Folders of the shipped models that label images, by name."""
    folders = {name: checkpoint_path(name) for name in shipped_checkpoints()}
    return {
        name: folder
        for name, folder in folders.items()
        if "ForImageClassification" in json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0]
    }


def gradio():
    """Import gradio.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        import gradio
    except ImportError:
        raise ValueError("The page needs gradio: pip install 'frugalvit[demo]'.") from None
    return gradio


def serve(page, **where):
    """Serve a page of `build_page`. `where` are options of gradio's `launch`, which a Space chooses itself."""
    theme = gradio().themes.Default(font=FONTS, font_mono=["monospace"])
    page.launch(theme=theme, css=CSS, max_file_size=MAX_UPLOAD, show_error=True, **where)


def build_page(
    folders: dict[str, str | Path],
    device: str | None = None,
    trust_remote_code: bool = False,
    examples: Path | None = None,
):
    """Build the page, a `gradio.Blocks`, of models by their names, with the images to try in the folder `examples`."""
    gr = gradio()
    hidden = gr.update(visible=False)

    @functools.lru_cache(maxsize=4)
    def load(name: str):
        return load_image_classifier(folders[name], device, trust_remote_code, or_backbone=True)

    def offer(name: str):
        counts = token_counts(load(name)[0])
        if not counts:
            return hidden
        numbers = ", ".join(map(str, counts)) if len(counts) <= MOST_NAMED else f"{counts[0]} to {counts[-1]}"
        label = f"Tokens that look: {numbers}"
        return gr.update(value=counts[-1], minimum=counts[0], maximum=counts[-1], label=label, visible=True)

    def show(name: str, file: str | None, num_tokens: int | None = None):
        if file is None:
            return None, *[hidden] * 3
        model, image_processor = load(name)
        # The nearest that the model can have.
        nearest = num_tokens and min(token_counts(model), key=lambda count: abs(count - num_tokens), default=None)
        try:
            labels, *figures = look(model, image_processor, read_image(file, MAX_PIXELS), name, nearest)
        # Decoders raise whatever a broken file leads them to.
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            # Where the page keeps what it is given is nobody's concern.
            message = str(error).replace(str(Path(file).parent) + os.sep, "")
            raise gr.Error(f"Cannot show that: {message}") from error
        return labels, *(gr.update(value=figure, visible=figure is not None) for figure in figures)

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(CACHE_SECONDS, CACHE_SECONDS)) as page:
        shipped = not folders.keys().isdisjoint(shipped_checkpoints())
        gr.Markdown(f"# {TITLE}\n\n{INTRODUCTION}{f' {SHIPPED}' * shipped}")
        with gr.Row():
            with gr.Column():
                model = gr.Dropdown(list(folders), value=next(iter(folders)), label="Model")
                # Its file, so that nothing is decoded before its size is known.
                image = gr.Image(type="filepath", image_mode=None, label="Image", height=300, elem_id="image")
                # It would open the file once more, and say of a broken one where it lies.
                image.preprocess = lambda payload: payload and payload.path
                tokens = gr.Slider(1, MAX_TOKENS, MAX_TOKENS, step=1, visible=False)
            labels = gr.Label(num_top_classes=5, label="Labels")
        if examples:
            gr.Examples([[str(file)] for file in sorted(examples.iterdir())], image, label="Images to try")
        figures = [
            gr.Plot(label=label, visible=False)
            for label in ("Where the tokens look", "What the layers make of it", "Attention")
        ]
        gr.on([page.load, model.change], offer, model, tokens, api_visibility="private")
        # `release` is the user's own hand: a number that the page offers is drawn with its model.
        shown = [model.change, image.change, tokens.release]
        gr.on(shown, show, [model, image, tokens], [labels, *figures], api_name="look")
    return page


def token_counts(model: PreTrainedModel) -> list[int]:
    """Numbers of tokens to choose from: those that a model is made for and, of trees, which grow by three with each
    cell that is split, all between them."""
    if isinstance(model, ExportedModule):
        return model.token_counts
    counts = getattr(model.config, "elastic_token_counts", None)
    if counts and getattr(model.config, "placement", None) == "content":
        counts = range(counts[0], counts[-1] + 1, 3)
    return [*(counts or ())]


def look(
    model: PreTrainedModel, image_processor, image: Image.Image, name: str = "", num_tokens: int | None = None
) -> tuple[dict[str, float], Figure | None, Figure | None, Figure | None]:
    """Return the labels that a model gives an image, and pictures of how it sees it.

    Args:
        model (`PreTrainedModel`): An image classifier, or a `SparseFormerBackbone`, which has no labels.
        image_processor: Its image processor.
        image (`PIL.Image.Image`): An RGB image.
        name (`str`, *optional*): The model's, for captions.
        num_tokens (`int`, *optional*): Latent tokens of a SparseFormer; its own choice if not given.

    Returns:
        `tuple`: Scores of the best five labels; pictures of where tokens look, of the layers' features (of a
        SparseFormer, of its feature map) and of attention, each `None` where the model has no such thing.
    """
    if num_tokens is not None:
        with using_tokens(model, num_tokens):
            return look(model, image_processor, image, name)
    pixel_values = prepare_images(image_processor, [image]).to(model.device)
    seen = restore_images(image_processor, pixel_values)
    if isinstance(model, SparseFormerBackbone):
        prediction = look_around(model, pixel_values, seen[0])
    else:
        [prediction] = predict(model, image_processor, [image], output_rois=has_rois(model))
    rois = features = attention = None
    if has_rois(model):
        if getattr(model.config, "placement", None) == "content":
            rois = draw_cells(prediction.view, prediction.rois[-1])
        else:
            rois = draw_predictions([prediction], all_steps=True)
    if isinstance(model, ExportedModule):
        # A program tells nothing of what is inside.
        return dict(prediction.labels), rois, None, None
    if (backbone := as_backbone(model)) is not None:
        features = draw_dense(seen, maps_of(backbone, pixel_values, len(prediction.rois[-1])))
    elif not has_rois(model) and (patch_grid(model.config) or model.config.model_type == "bootstrapped_vit"):
        maps = {part: feature_maps(alone, pixel_values) for part, alone in parts(name, model).items()}
        features = draw_features(seen, maps)
    if received := attention_maps(model, pixel_values, prediction.rois):
        attention = draw_maps(
            seen,
            [received],
            headings=["Input", *(f"Layer {layer}" for layer in range(1, len(received) + 1))],
            captions=[name],
            legend="Attention that a place gets from all tokens and heads, in each panel from least (dark) to most.",
        )
    return dict(prediction.labels), rois, features, attention


@torch.no_grad()
def look_around(model: SparseFormerBackbone, pixel_values: torch.Tensor, view: torch.Tensor) -> Prediction:
    """Where the tokens of a backbone look, as `predict` tells it of a classifier, without labels.

    Args:
        model (`SparseFormerBackbone`): The backbone.
        pixel_values (`torch.Tensor`): `(1, channels, height, width)`.
        view (`torch.Tensor`): `(channels, height, width)`, 0 to 1: the image as the model sees it.
    """
    outputs = model(pixel_values, output_rois=True)
    rois, points = ([step[0].cpu() for step in steps] for steps in (outputs.rois, outputs.sampling_points))
    return Prediction([], view=view, rois=rois, sampling_points=points)


def maps_of(
    backbone: SparseFormerBackbone, pixel_values: torch.Tensor, num_tokens: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Feature maps for `draw_dense`, of so many tokens, and before them of the most that the model is made for, whose
    components color both."""
    counts = sorted({num_tokens, max(token_counts(backbone), default=num_tokens)}, reverse=True)
    return {f"{count} tokens": dense_features(backbone, pixel_values, count) for count in counts}


def attention_maps(
    model: PreTrainedModel, pixel_values: torch.Tensor, rois: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Return the attention to the places of an image, for each layer. A ViT attends to patches. A SparseFormer attends
    to tokens; the attention to each is spread evenly over its last RoI. `[CLS]` has no place.

    Args:
        model (`PreTrainedModel`): An image classifier.
        pixel_values (`torch.Tensor`): `(1, channels, height, width)`.
        rois (sequence of `torch.Tensor`, *optional*): `(tokens, 4)` after every adjustment, of a SparseFormer.

    Returns:
        `list[torch.Tensor]`: `(rows, columns)` for each layer; empty where tokens have no place.
    """
    alone = next(iter(parts("", model).values()))
    grid = patch_grid(alone.config)
    maps = [layer.maps for layer in measure_attention(alone, [pixel_values])]
    if maps[0] is None or not (grid or len(rois)):
        return []
    received = [heads.mean((0, 1)) for heads in maps]
    if not len(rois):
        return [values[-grid[0] * grid[1] :].unflatten(0, grid) for values in received]
    spread = _shares_of_rois(rois[-1])
    return [torch.einsum("t,tyx->yx", values[-len(spread) :], spread) for values in received]


def _shares_of_rois(rois: torch.Tensor, side: int = 64) -> torch.Tensor:
    """Turn RoIs `(tokens, 4)` into shares `(tokens, side, side)`: equal within a token's RoI, with the sum 1."""
    centers = (torch.arange(side) + 0.5) / side
    low, high = torch.minimum(rois[:, :2], rois[:, 2:]), torch.maximum(rois[:, :2], rois[:, 2:])
    columns, rows = ((centers >= low[:, axis, None]) & (centers <= high[:, axis, None]) for axis in (0, 1))
    inside = (rows[:, :, None] & columns[:, None, :]).float()
    return inside / inside.sum((1, 2), keepdim=True).clamp(min=1)


def example_images(folder: Path) -> Path:
    """Write embedded test images into a new folder and return it."""
    folder.mkdir()
    for index, record in enumerate(load_images(SUBSET, f"test[:{EXAMPLES}]")):
        decode_image(record["image"], index).save(folder / f"{index}.png")
    return folder
