"""A LLaVA a part of which learns."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ...modeling.swap import check_projector_is_held


class Learner(nn.Module):
    """A LLaVA whose projector learns, as a copy in float32.

    Its state, and so a checkpoint, holds the parameters that learn and no others, which are loaded again from where
    they came from.

    Args:
        llava (`SparseFormerLlavaForConditionalGeneration` or `SparseFormerPaliGemmaForConditionalGeneration`):
            May share its language model with another one, and be shared out among devices.

    Raises:
        ValueError: if the projector is offloaded.
    """

    def __init__(self, llava: PreTrainedModel):
        super().__init__()
        check_projector_is_held(llava)
        self.dtype = llava.dtype
        llava.requires_grad_(False)
        llava.model.multi_modal_projector = copy.deepcopy(llava.model.multi_modal_projector).float().requires_grad_()
        self.llava = llava
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(_forgive_frozen)

    def train(self, mode: bool = True):
        """Stay in evaluation mode: no layer behaves otherwise in training."""
        return super().train(False)

    def forward(self, **inputs):
        return self.llava(**inputs)

    def add_lora(self, rank: int):
        """Let the language model learn, too, by matrices of a low rank that are added to its own.

        Raises:
            ValueError: if peft is not installed, or a part of the language model is offloaded.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise ValueError("--lora-rank is peft's: pip install 'frugalvit[finetune]'.") from None
        language_model = self.llava.model.language_model
        if any(parameter.is_meta for parameter in language_model.parameters()):
            raise ValueError(
                "Parts of the language model are offloaded, which --lora-rank cannot change; --dtype bfloat16 and "
                "--quantize 4bit need less memory."
            )
        linear = {name for name, module in language_model.named_modules() if isinstance(module, nn.Linear)}
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), language_model)
        for parameter in language_model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    @property
    def lora_layers(self) -> dict[str, nn.Module]:
        """The language model's layers that have LoRA, by their names in it."""
        modules = self.llava.model.language_model.named_modules()
        return {name: module for name, module in modules if hasattr(module, "lora_A")}

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Within it, the language model computes without what was learned of it."""
        layers = self.lora_layers.values()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def whole_state(self, language_model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The LLaVA's weights by name, in the precision that it had, with what LoRA learned added to them.

        Args:
            language_model (`nn.Module`, *optional*): The language model as it was, if this one's is quantized.
        """
        where, state = "model.language_model", {}
        for name, value in self.llava.state_dict().items():
            if not name.startswith(f"{where}."):
                state[name] = value.to(self.dtype) if "multi_modal_projector." in name else value
        layers = self.lora_layers
        for name, value in (language_model or self.llava.model.language_model).state_dict().items():
            owner, _, rest = name.replace(".base_layer.", ".").rpartition(".")
            if owner in layers and rest == "weight":
                value = (value.float() + layers[owner].get_delta_weight("default").to(value.device)).to(value.dtype)
            if ".lora_" not in name:
                state[f"{where}.{owner}.{rest}"] = value
        return state


def _drop_frozen(learner: Learner, state: dict, prefix: str, metadata):
    # A head that is its model's embeddings has two names.
    parameters = learner.named_parameters(remove_duplicate=False)
    frozen = {f"{prefix}{name}" for name, parameter in parameters if not parameter.requires_grad}
    buffers = {f"{prefix}{name}" for name, _ in learner.named_buffers()}
    for name in (frozen | buffers) & state.keys():
        del state[name]


def _forgive_frozen(learner: Learner, keys):
    learned = tuple(name for name, parameter in learner.named_parameters() if parameter.requires_grad)
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.endswith(learned)]
