"""`frugalvit demo`: a page that labels your images and shows where the tokens look."""

import functools
import os
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from .architectures import has_rois
from .command_line import CommandParser, add_device_argument, add_trust_argument
from .exported import load_classifier
from .predict import draw_predictions, format_labels, predict
from .training.data import load_images
from .training.decoding import decode_image, read_image
from .training.files import checkpoint_path, shipped_checkpoints, shipped_images


MAX_PIXELS = 50_000_000
CACHE_SECONDS = 3_600


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit demo",
        description="Serve a page: choose a model, an image and a number of tokens, see labels and where tokens look.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="classifiers (default: those that ship)")
    parser.add_argument("--host", help="address to serve on (default: this machine alone)")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    shipped = map(checkpoint_path, shipped_checkpoints())
    models = arguments.models or [
        folder for folder in shipped if "ForImageClassification" in (folder / "config.json").read_text("utf-8")
    ]
    folders = {Path(model).name: model for model in models}
    if len(folders) < len(models):
        raise ValueError("Two of the models have the same name; rename a folder.")
    # Refuse a model that cannot be loaded before the page is there.
    for model in arguments.models:
        load_classifier(model, arguments.device, arguments.trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="frugalvit-demo-") as folder:
        # gradio reads it when it is imported.
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            import gradio
        except ImportError:
            raise ValueError("The page needs gradio: pip install 'frugalvit[demo]'.") from None
        page = build_page(folders, arguments.device, arguments.trust_remote_code, write_examples(Path(folder)))
        page.launch(
            # The default theme loads its fonts from Google.
            theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            max_file_size="20mb",
            show_error=True,
            server_name=arguments.host,
            server_port=arguments.port,
        )


def write_examples(folder: Path) -> list[str]:
    paths = [str(folder / f"{index}.png") for index in range(8)]
    images = str(shipped_images("cifar10") / "test.parquet")
    for index, record in enumerate(load_images(images, f"train[:{len(paths)}]")):
        decode_image(record["image"], index).save(paths[index])
    return paths


def build_page(folders: dict[str, str | Path], device: str | None, trust_remote_code: bool, examples: list[str]):
    """Build a `gradio.Interface` for models by their names, with images to try."""
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
        # Decoders of broken files raise more than OSError.
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise gr.Error(f"Cannot show the image: {error}") from error

    inputs = [
        # As a file, so that its size is checked before it is decoded.
        gr.Image(type="filepath", image_mode=None, label="Image", height=300),
        gr.Dropdown(list(folders), value=next(iter(folders)), label="Model"),
        gr.Slider(1, 256, 256, step=1, label="Tokens, the nearest number that the model is made for"),
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
    """List the numbers of tokens that a model is made for; empty if there is no choice, as in an exported program."""
    counts = getattr(model.config, "elastic_token_counts", None) or ()
    return list(counts) if hasattr(model, "set_num_tokens") else []


def look(
    model: PreTrainedModel, image_processor, image: Image.Image, num_tokens: int | None = None
) -> tuple[dict[str, float] | str, Figure | None]:
    """Return the scores of an image's best labels, or a regression's numbers as a text, and a picture of the token
    RoIs if the model has them."""
    if num_tokens is not None:
        model.set_num_tokens(num_tokens)
    [prediction] = predict(model, image_processor, [image], output_rois=has_rois(model))
    figure = draw_predictions([prediction], all_steps=True) if has_rois(model) else None
    # The page shows scores in percent.
    return format_labels(prediction) if prediction.regression else dict(prediction.labels), figure
