"""Train a small CLIP on labeled images. Captions are sentences about the class of an image.

In a batch, all images and sentences of one class are positive pairs (Yang et al. 2022, UniCL). The vocabulary of the
tokenizer consists of the words in the sentences.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torchvision.transforms import v2
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from frugalvit.training.data import class_names
from frugalvit.training.files import atomic_directory
from shared import Views


SENTENCES = [
    "a photo of a {} .",
    "a small photo of a {} .",
    "a blurry photo of the {} .",
    "a picture of one {} .",
    "this is a {} .",
    "there is a {} in this image .",
    "the {} .",
    "a {} .",
]
WIDTH = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
VISION = WIDTH | {"image_size": 32, "patch_size": 4, "num_hidden_layers": 6}
TEXT = WIDTH | {"num_hidden_layers": 2}


def with_crops(processor: CLIPImageProcessor) -> v2.Compose:
    size = [processor.size["height"], processor.size["width"]]
    return v2.Compose(
        [
            v2.Resize(size, v2.InterpolationMode.BICUBIC),
            v2.RandomCrop(size, padding=4, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(fill=[255 * mean for mean in processor.image_mean]),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(processor.image_mean, processor.image_std),
        ]
    )


class ContrastiveTrainer(Trainer):
    """Transformers' `Trainer` with the loss of UniCL. `tokens`, `(classes, sentences, length)`, has the tokenized
    sentences of each class. The caption of an image is a random sentence of its class."""

    def __init__(self, tokens: torch.Tensor, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens = tokens

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        chosen = torch.randint(self.tokens.shape[1], labels.shape)
        input_ids = self.tokens[labels.cpu(), chosen].to(labels.device)
        outputs = model(input_ids=input_ids, pixel_values=inputs["pixel_values"])
        targets = (labels[:, None] == labels).float()
        targets /= targets.sum(1, keepdim=True)
        logits = outputs.logits_per_image
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.mT, targets)) / 2
        return (loss, outputs) if return_outputs else loss


def train_clip(images: datasets.Dataset, folder: Path, epochs: int, seed: int, vision=VISION, text=TEXT):
    """Train a CLIP on labeled images, and save the model and its processor in a new folder."""
    set_seed(seed)
    names = class_names(images)
    texts = [sentence.format(name) for name in names for sentence in SENTENCES]
    tokenizer = word_tokenizer(texts)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"].unflatten(0, (len(names), -1))
    # Other programs may use sentences up to twice as long as the longest training sentence.
    tokenizer.model_max_length = 2 * tokens.shape[-1]
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = text | special | {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=text["hidden_size"]))
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    processor = CLIPProcessor(CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False), tokenizer)
    trainer = functools.partial(ContrastiveTrainer, tokens)
    views = Views(images, with_crops(processor.image_processor))
    budget = {"num_train_epochs": epochs, "per_device_train_batch_size": 128, "warmup_steps": 1 / epochs}
    train_and_save(trainer, model, processor, views, folder, seed=seed, weight_decay=0.05, **budget)


def train_and_save(trainer: Callable[..., Trainer], model, processor, data, folder: Path, **options):
    """Train a model with a cosine schedule, and save the model and its processor in a new folder."""
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainingArguments(
            scratch,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            **options,
        )
        trainer(model, options, train_dataset=data).train()
    with atomic_directory(folder) as aside:
        model.save_pretrained(aside)
        processor.save_pretrained(aside)


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the words of the texts. Like CLIP's tokenizer, it adds start and end tokens."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<start>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("<start>", "<end>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>", eos_token="<end>"
    )
