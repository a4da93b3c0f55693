"""Tiny CLIPs and LLaVAs: weights that say something, and a tokenizer of a few words."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast


# Of a SparseFormer.
SMALL = {"stem_channels": 8, "num_sampling_points": 4, "num_mixed_points": 4, "num_focusing_iterations": 2}


def randomize(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Move every weight off its initial value, so that nothing is equal by being zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def word_tokenizer(words: list[str], **options) -> PreTrainedTokenizerFast:
    """Ids are places among `words`; texts stand between [BOS] and [EOS] where these are among them."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "[BOS]" in words:
        ends = [(token, words.index(token)) for token in ("[BOS]", "[EOS]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
        options |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", **options)
