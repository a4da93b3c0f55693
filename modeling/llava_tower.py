"""SparseFormer as the vision tower of the original LLaVA code (github.com/haotian-liu/LLaVA).

In LLaVA's `build_vision_tower`, return `SparseFormerVisionTower(name, args)` instead of a `CLIPVisionTower`. `name` is
a folder or hub id of a SparseFormer. This module does not import LLaVA's code.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedConfig

from ..configuration.configuration_base import pair


class SparseFormerVisionTower(nn.Module):
    """SparseFormer with the interface of LLaVA's `CLIPVisionTower`.

    Args:
        vision_tower (`str`): Folder or hub id of a SparseFormer that was bootstrapped from a CLIP.
        args: LLaVA's model arguments: `mm_vision_select_layer`, and optionally `unfreeze_mm_vision_tower` and
            `mm_vision_select_feature` ("patch", the default, or "cls_patch").
        delay_load (`bool`, *optional*, defaults to `False`): Load only the configuration until `load_model` is called.
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
        """Load and freeze the weights, and load the image processor. Do nothing if they are loaded already."""
        if self.is_loaded:
            return
        self.image_processor = AutoImageProcessor.from_pretrained(self.vision_tower_name)
        # LLaVA reads `crop_size` of every image processor, even if the processor does not crop.
        height, width = pair(self.cfg_only.image_size)
        self.image_processor.crop_size = {"height": height, "width": width}
        self.vision_tower = AutoModel.from_pretrained(self.vision_tower_name, device_map=device_map).base_model
        self.vision_tower.requires_grad_(False)
        self.is_loaded = True

    @torch.no_grad()
    def forward(self, images: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Return the tokens of the selected layer, `(batch, tokens, hidden_size)`. By default, [CLS] is left out.

        Args:
            images (`torch.Tensor` or list of `torch.Tensor`): A batch, `(batch, 3, height, width)`, or a list of
                images, `(3, height, width)` each. For a list, a list of tokens is returned.
        """
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
        """Number of tokens of an image, without [CLS]. `vision_tower.set_num_tokens` changes this number."""
        return self.config.default_num_tokens
