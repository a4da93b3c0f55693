"""Tiny VLMs with random weights. These VLMs need a vision tower that returns a grid of features."""

from dataclasses import dataclass
from functools import cached_property

import torch
import transformers
from transformers import PreTrainedModel, ProcessorMixin

from frugalvit import PatchSparseFormerVisionModel, SparseFormerVisionModel
from tiny import SMALL, randomize, word_tokenizer


# Special tokens that processors read from a tokenizer.
SPECIAL = {"image_token": "<image>", "video_token": "<video>", "boi_token": "<start>", "eoi_token": "<end>"}
WORDS = ["[PAD]", "[UNK]", "what", "is", "this", "?", *SPECIAL.values()]
IMAGE = WORDS.index("<image>")
# Width and height of images in pixels, and number of patches in each direction.
SIZE, ROWS = 32, 8
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
LANGUAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE |= {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": None}
NORMALIZATION = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
SQUARE = {"height": SIZE, "width": SIZE}
PINPOINTS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]


@dataclass(frozen=True)
class VLM:
    """A tiny VLM of Transformers.

    Args:
        name (`str`): Prefix of the VLM's class names in Transformers.
        text (`PreTrainedConfig`): Configuration of the language model.
        fields (`dict`): Other fields of the VLM's configuration.
        processor (`dict`): Arguments of the processor.
        pixels (`dict`): Arguments of the image processor.
        prompt (`str`): Placeholder for an image in texts.
        cells (`int`): Each image token pools `cells` x `cells` cells of the grid.
    """

    name: str
    text: transformers.PreTrainedConfig
    fields: dict
    processor: dict
    pixels: dict
    prompt: str = "<image>"
    cells: int = 1

    def make(self) -> PreTrainedModel:
        """Build the model. All calls give the same weights."""
        torch.manual_seed(0)
        vision = transformers.SiglipVisionConfig(image_size=SIZE, patch_size=SIZE // ROWS, **VISION)
        config_class = getattr(transformers, f"{self.name}Config")
        config = config_class(vision_config=vision, text_config=self.text.to_dict(), **self.fields)
        return randomize(getattr(transformers, f"{self.name}ForConditionalGeneration")(config))

    @cached_property
    def model(self) -> PreTrainedModel:
        """Shared model for tests that do not modify it."""
        return self.make()

    def make_processor(self) -> ProcessorMixin:
        image_processor = getattr(transformers, f"{self.name}ImageProcessor")(**self.pixels, **NORMALIZATION)
        tokenizer = word_tokenizer(WORDS, padding_side="left", extra_special_tokens=SPECIAL)
        return getattr(transformers, f"{self.name}Processor")(
            image_processor=image_processor, tokenizer=tokenizer, **self.processor
        )

    def make_tower(self, num_tokens: int = 7, **fields) -> SparseFormerVisionModel:
        """Build a SparseFormer student of the vision tower. All calls give the same random weights."""
        torch.manual_seed(0)
        tower = self.model.model.vision_tower
        return randomize(SparseFormerVisionModel.from_teacher(tower, num_tokens, **NORMALIZATION, **SMALL, **fields))

    def inherit(self) -> PatchSparseFormerVisionModel:
        """Build a PatchSparseFormer student of the vision tower with one token per patch."""
        return PatchSparseFormerVisionModel.from_teacher(self.model.model.vision_tower, ROWS**2, **NORMALIZATION)


VLMS: dict[str, VLM] = {
    "LLaVA-OneVision": VLM(
        "LlavaOnevision",
        transformers.LlamaConfig(**LANGUAGE),
        {
            "image_token_index": IMAGE,
            "video_token_index": WORDS.index("<video>"),
            "image_grid_pinpoints": PINPOINTS,
        },
        {
            "num_image_tokens": ROWS**2,
            "vision_feature_select_strategy": "full",
            "video_processor": transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        },
        {"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
    ),
    "Gemma 3": VLM(
        "Gemma3",
        transformers.Gemma3TextConfig(**LANGUAGE, head_dim=8, num_key_value_heads=2),
        {"image_token_index": IMAGE, "mm_tokens_per_image": 16},
        {"image_seq_length": 16},
        {"size": SQUARE},
        prompt="<start>",
        cells=2,
    ),
}
