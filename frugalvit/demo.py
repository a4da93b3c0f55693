"""`frugalvit demo`: serve a web page that labels images and draws the RoIs of tokens."""

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from .architectures import has_rois
from .command_line import DeviceOptions, argument, read_options
from .exported import load_classifier
from .predict import draw_predictions, format_labels, predict
from .training.data import load_images
from .training.decoding import decode_image, read_image
from .training.files import checkpoint_path, shipped_checkpoints, shipped_images


PROG = "frugalvit demo"
MAX_PIXELS = 50_000_000
CACHE_SECONDS = 3_600


@dataclass(kw_only=True)
class DemoOptions(DeviceOptions):
    """Serve a web page that shows labels and token RoIs for a chosen model, image and number of tokens."""

    models: list[str] = argument([], "Classifiers. Default: those that ship.", positional=True)
    host: str | None = argument(None, "Address to serve on. Default: this machine alone.")
    port: int | None = argument(None, "Default: the first free one from 7860.")


def main(argv: list[str] | None = None) -> None:
    options = read_options(DemoOptions, PROG, argv)
    models = options.models
    if not models:
        shipped = map(checkpoint_path, shipped_checkpoints())
        models = [path for path in shipped if "ForImageClassification" in (path / "config.json").read_text("utf-8")]
    folders = {Path(model).name: model for model in models}
    if len(folders) < len(models):
        raise ValueError("Two of the models have the same name; rename a folder.")
    # Load the models once before the page is served, so that errors are raised early.
    for model in options.models:
        load_classifier(model, options.device, options.trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="frugalvit-demo-") as folder:
        # gradio reads `GRADIO_TEMP_DIR` at import, so the variable is set before the import.
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            import gradio
        except ImportError:
            raise ValueError("The page needs gradio: pip install 'frugalvit[demo]'.") from None
        page = build_page(folders, options.device, options.trust_remote_code, write_examples(Path(folder)))
        page.launch(
            # Use the system's fonts. By default, a gradio page loads fonts from Google.
            theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            max_file_size="20mb",
            show_error=True,
            server_name=options.host,
            server_port=options.port,
        )


def write_examples(folder: Path) -> list[str]:
    """Write example images into a folder and return the images' paths."""
    paths = [str(folder / f"{index}.png") for index in range(8)]
    images = str(shipped_images("cifar10") / "test.parquet")
    for index, record in enumerate(load_images(images, f"train[:{len(paths)}]")):
        decode_image(record["image"], index).save(paths[index])
    return paths


def build_page(folders: dict[str, str | Path], device: str | None, trust_remote_code: bool, examples: list[str]):
    """Build a `gradio.Interface`. `folders` maps the displayed names of models to folders or hub ids. `examples` are
    paths of example images."""
    import gradio as gr

    @functools.lru_cache(maxsize=4)
    def load(name: str):
        return load_classifier(folders[name], device, trust_remote_code)

    def show(file: str | None, name: str, num_tokens: int):
        if file is None:
            return None, None
        model, image_processor = load(name)
        nearest = min(token_counts(model), key=lambda count: abs(count - num_tokens), default=None)
        try:
            return look(model, image_processor, read_image(file, MAX_PIXELS), nearest)
        # Decoders raise errors of several types for broken files.
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise gr.Error(f"Cannot show the image: {error}") from error

    inputs = [
        # With a path instead of pixels, `read_image` can check the image's size before decoding.
        gr.Image(type="filepath", image_mode=None, label="Image", height=300),
        gr.Dropdown(list(folders), value=next(iter(folders)), label="Model"),
        gr.Slider(1, 256, 256, step=1, label="Number of tokens (rounded to one that the model was trained for)"),
    ]
    return gr.Interface(
        show,
        inputs,
        [gr.Label(num_top_classes=5, label="Labels"), gr.Plot(label="Where the tokens look")],
        examples=[[path] for path in examples],
        title="frugalvit: vision transformers that need less",
        api_name="look",
        live=True,
        flagging_mode="never",
        cache_examples=False,
        analytics_enabled=False,
        delete_cache=(CACHE_SECONDS, CACHE_SECONDS),
    )


def token_counts(model: PreTrainedModel) -> list[int]:
    """Return the numbers of tokens that a model was trained for, or an empty list if the number is fixed."""
    counts = getattr(model.config, "elastic_token_counts", None) or ()
    return list(counts) if hasattr(model, "set_num_tokens") else []


def look(
    model: PreTrainedModel, image_processor, image: Image.Image, num_tokens: int | None = None
) -> tuple[dict[str, float] | str, Figure | None]:
    """Return the scores of an image's best labels and a picture of the tokens' RoIs. For a regression, return text
    instead of scores. For a model without RoIs, return `None` instead of the picture."""
    draws_rois = has_rois(model)
    [prediction] = predict(model, image_processor, [image], num_tokens=num_tokens, output_rois=draws_rois)
    figure = draw_predictions([prediction], all_steps=True) if draws_rois else None
    # `gradio.Label` shows numbers as percentages, so the numbers of a regression are passed as text.
    return format_labels(prediction) if prediction.is_regression else dict(prediction.labels), figure
