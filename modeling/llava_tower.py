"""A SparseFormer as a vision tower of the original LLaVA code base (github.com/haotian-liu/LLaVA).

Its `build_vision_tower` returns a `CLIPVisionTower`; return `SparseFormerVisionTower(name, args)` there instead, for a
folder or hub id of a SparseFormer. Nothing here imports that code base.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedConfig

from ..configuration.configuration_base import pair


class SparseFormerVisionTower(nn.Module):
    """The interface of LLaVA's `CLIPVisionTower`, over a SparseFormer.

    Args:
        vision_tower (`str`): Folder or hub id of a SparseFormer that was bootstrapped from a CLIP.
        args: LLaVA's model arguments: `mm_vision_select_layer`, and where they are given `mm_vision_select_feature`
            ("patch", the default, or "cls_patch") and `unfreeze_mm_vision_tower`.
        delay_load (`bool`, *optional*, defaults to `False`): Read the configuration alone until `load_model`.
    """

    def __init__(self, vision_tower: str, args, delay_load: bool = False):
        super().__init__()
        self.is_loaded = False
        self.vision_tower_name = vision_tower
        self.select_layer = args.mm_vision_select_layer
        self.select_feature = getattr(args, "mm_vision_select_feature", "patch")
        self.cfg_only = AutoConfig.from_pretrained(vision_tower)
        if self.select_feature not in ("patch", "cls_patch"):
            raise ValueError(f"mm_vision_select_feature is {self.select_feature!r}, expected 'patch' or 'cls_patch'.")
        if not delay_load or getattr(args, "unfreeze_mm_vision_tower", False):
            self.load_model()

    def load_model(self, device_map=None):
        """Load the weights, frozen, and the image processor; nothing happens the second time."""
        if self.is_loaded:
            return
        self.image_processor = AutoImageProcessor.from_pretrained(self.vision_tower_name)
        # LLaVA reads it, whether images are cropped or not.
        height, width = pair(self.cfg_only.image_size)
        self.image_processor.crop_size = {"height": height, "width": width}
        self.vision_tower = AutoModel.from_pretrained(self.vision_tower_name, device_map=device_map).base_model
        self.vision_tower.requires_grad_(False)
        self.is_loaded = True

    @torch.no_grad()
    def forward(self, images: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Images `(batch, 3, height, width)`, or a list of images `(3, height, width)`, to the tokens
        `(batch, tokens, hidden_size)` of the chosen layer, with or without [CLS]."""
        if isinstance(images, list):
            return [self(image.unsqueeze(0)) for image in images]
        outputs = self.vision_tower(images.to(self.device, self.dtype), output_hidden_states=True)
        states = outputs.hidden_states[self.select_layer].to(images.dtype)
        return states[:, self.config.num_prefix_tokens :] if self.select_feature == "patch" else states

    @property
    def dummy_feature(self) -> torch.Tensor:
        return torch.zeros(1, self.hidden_size, device=self.device, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.vision_tower.dtype

    @property
    def device(self) -> torch.device:
        return self.vision_tower.device

    @property
    def config(self) -> PreTrainedConfig:
        return self.vision_tower.config if self.is_loaded else self.cfg_only

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_patches(self) -> int:
        """Tokens of an image, [CLS] not counted; `vision_tower.set_num_tokens` chooses them."""
        return self.config.default_num_tokens
