"""A tiny random model of every kind that counts on a grid of patches, with its processor."""

from dataclasses import dataclass
from functools import cached_property

import torch
import transformers
from transformers import PreTrainedModel, ProcessorMixin

from frugalvit import SparseFormerVisionModel
from tiny import SMALL, randomize, word_tokenizer


# What processors and language models want of a tokenizer, under the names that they ask for.
SPECIAL = {
    "image_token": "<image>",
    "context_image_token": "<image>",
    "video_token": "<video>",
    "boi_token": "<start>",
    "start_image_token": "<start>",
    "eoi_token": "<end>",
    "end_image_token": "<end>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
WORDS = ["[PAD]", "[UNK]", "what", "is", "this", "?", *dict.fromkeys(SPECIAL.values()), *TILES]
IMAGE = WORDS.index("<image>")
# A tile of 8 x 8 patches.
SIZE, ROWS = 32, 8
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
LANGUAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SQUARE = {"height": SIZE, "width": SIZE}
LONGEST = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
NORMALIZATION = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
PINPOINTS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]


@dataclass(frozen=True)
class VLM:
    """A kind of model that reads images and texts.

    Args:
        name (`str`): Of Transformers' classes, without `ForConditionalGeneration`.
        vision (`str`): Its tower's configuration, without `Config`.
        fields (`dict`): Of its configuration.
        processor (`dict`): Arguments of its processor's class.
        images (`str`), pixels (`dict`): Its image processor's class, and arguments of that.
        videos (`str`, *optional*): Its video processor's class.
        prompt (`str`): What stands for an image in a prompt.
        cells (`int`): Rows, and columns, of cells that become one token.
    """

    name: str
    vision: str
    fields: dict
    processor: dict
    images: str
    pixels: dict
    videos: str | None = None
    prompt: str = "<image>"
    cells: int = 1

    def make(self) -> PreTrainedModel:
        """A model; the weights are the same each time."""
        torch.manual_seed(0)
        vision = getattr(transformers, f"{self.vision}Config")(image_size=SIZE, patch_size=SIZE // ROWS, **VISION)
        text = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": None, **LANGUAGE}
        gemma = {"head_dim": 8, "num_key_value_heads": 2} if self.name == "Gemma3" else {}
        text_class = transformers.Gemma3TextConfig if self.name == "Gemma3" else transformers.LlamaConfig
        config = getattr(transformers, f"{self.name}Config")(
            vision_config=vision, text_config=text_class(**text, **gemma), **self.fields
        )
        return randomize(getattr(transformers, f"{self.name}ForConditionalGeneration")(config))

    @cached_property
    def model(self) -> PreTrainedModel:
        """One for tests that leave it as it is."""
        return self.make()

    @property
    def tower(self) -> torch.nn.Module:
        parts = self.model.model
        return parts.vision_model if hasattr(parts, "vision_model") else parts.vision_tower

    def make_processor(self) -> ProcessorMixin:
        fields = dict(self.processor)
        if self.videos:
            fields["video_processor"] = getattr(transformers, self.videos)(size=SQUARE)
        image_processor = getattr(transformers, self.images)(**self.pixels, **NORMALIZATION)
        tokenizer = word_tokenizer(WORDS, padding_side="left", extra_special_tokens=SPECIAL)
        return getattr(transformers, f"{self.name}Processor")(
            image_processor=image_processor, tokenizer=tokenizer, **fields
        )

    def make_tower(self, num_tokens: int = 7, **fields) -> SparseFormerVisionModel:
        """A student of its tower, with weights of its own, the same each time."""
        return randomize(self.inherit(num_tokens, **SMALL, **fields))

    def inherit(self, num_tokens: int = ROWS**2, **fields) -> SparseFormerVisionModel:
        """A student of its tower as `from_teacher` makes it."""
        tower = self.tower
        torch.manual_seed(0)
        return SparseFormerVisionModel.from_teacher(tower, num_tokens, **NORMALIZATION, **fields)


TILED = {"image_token_index": IMAGE, "image_grid_pinpoints": PINPOINTS}
VLMS: dict[str, VLM] = {
    "LLaVA-NeXT": VLM(
        *("LlavaNext", "CLIPVision", TILED),
        {"patch_size": SIZE // ROWS, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": SIZE}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS},
    ),
    "LLaVA-OneVision": VLM(
        *("LlavaOnevision", "SiglipVision", TILED | {"video_token_index": WORDS.index("<video>")}),
        {"num_image_tokens": ROWS**2, "vision_feature_select_strategy": "full"},
        "LlavaOnevisionImageProcessor",
        {"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        "LlavaOnevisionVideoProcessor",
    ),
    "Idefics3": VLM(
        *("Idefics3", "Idefics3Vision", {"image_token_id": IMAGE, "scale_factor": 2}),
        {"image_seq_len": 16},
        *("Idefics3ImageProcessor", LONGEST),
        cells=2,
    ),
    "SmolVLM": VLM(
        *("SmolVLM", "SmolVLMVision", {"image_token_id": IMAGE, "scale_factor": 2}),
        {"image_seq_len": 16},
        *("SmolVLMImageProcessor", LONGEST, "SmolVLMVideoProcessor"),
        cells=2,
    ),
    "Gemma 3": VLM(
        *("Gemma3", "SiglipVision", {"image_token_index": IMAGE, "mm_tokens_per_image": 16}),
        {"image_seq_length": 16},
        *("Gemma3ImageProcessor", {"size": SQUARE}),
        prompt="<start>",
        cells=2,
    ),
    "InternVL": VLM(
        *("InternVL", "InternVLVision", {"image_token_id": IMAGE, "image_seq_length": 16}),
        {"image_seq_length": 16},
        "GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
        "InternVLVideoProcessor",
        cells=2,
    ),
}
