"""Configuration of a vision transformer that is trained together with an agent CNN."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import ViTConfig
from transformers.configuration_utils import SubConfigSpec

from .configuration_agent_cnn import VARIANTS as AGENTS
from .configuration_agent_cnn import AgentCNNConfig
from .configuration_base import Ints, at_least, pair, positive, rate
from .configuration_vit import AttentionStartConfig, Initialization


# Weights of the classification, divergence and hint losses in the reference implementation, for each `sharing`.
WEIGHTS = {"none": (1.0, 1.0, 10.0), "weights": (0.5, 0.5, 5.0)}

VIT_SMALL = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "intermediate_size": 1152,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-5,
    "num_labels": 10,
}
VIT_BASE = {
    **VIT_SMALL,
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-6,
}
# A variant name contains the kind of training, the model size, and "res" if the agent has a ResNet stem.
VARIANTS = {
    f"{name}-{size}{'-res' if res else ''}": {
        "vit_config": vit,
        # In the reference implementation, an agent with shared weights has the transformer's dropout rate in its MLPs
        # and at the end of the two residual branches of each block.
        "agent_config": AGENTS[f"agent-{size}{'-res' if res else ''}"]
        | (dict.fromkeys(("dropout", "branch_dropout"), vit["hidden_dropout_prob"]) if sharing == "weights" else {}),
        "sharing": sharing,
        "embedding_dropout": 0.0,
        "mlp_dropout": vit["hidden_dropout_prob"],
        "initialization": "reference",
    }
    for name, sharing in (("joint", "none"), ("shared", "weights"))
    for size, vit in (("small", VIT_SMALL), ("base", VIT_BASE))
    for res in (False, True)
}


@strict
class BootstrappedViTConfig(AttentionStartConfig):
    r"""
    Configuration of a vision transformer that `frugalvit joint` trains together with an agent CNN (Zhang et al.,
    *Bootstrapping ViTs*, arXiv 2112.03552). By default, the transformer is ViT-S and the agent is Agent-S.
    `from_variant` returns the configurations of the paper's models. `VisionConfig` documents `image_mean`,
    `image_std`, `resize_size` and `resample`.

    Args:
        vit_config (`ViTConfig` or `dict`, *optional*): Configuration of the vision transformer.
        agent_config (`AgentCNNConfig` or `dict`, *optional*):
            Configuration of the agent CNN. It must have the same number of blocks and the same width as `vit_config`.
        sharing (`str`, *optional*, defaults to `"none"`):
            With `"none"` ("Joint" in the paper), the agent has its own weights. With `"weights"` ("Shared" in the
            paper), the agent uses the weights of the transformer's attention and MLPs. The agent's convolutions then
            have one kernel position for each attention head. The weight of a kernel position is the product of the
            head's output and value weights.
        classification_weight, divergence_weight, hint_weight (`float`, *optional*):
            Weights of the classification, divergence and hint losses. The default weights are 1, 1 and 10 for
            `sharing="none"`, and 0.5, 0.5 and 5 for `sharing="weights"`, as in the reference implementation.
        temperature (`float`, *optional*, defaults to 4.0): Softmax temperature in the divergence losses.
        hint_layers (sequence of `int`, *optional*):
            Indices of the blocks after which the hint loss compares transformer and agent; all blocks by default.
        embedding_dropout (`float`, *optional*):
            Dropout rate of the transformer's embeddings; `vit_config.hidden_dropout_prob` by default. The rate is 0 in
            the reference implementation and in all variants.
        mlp_dropout (`float`, *optional*, defaults to 0.0):
            Dropout rate after the activation function in the transformer's MLPs. The reference implementation has this
            dropout; Transformers' `ViTModel` does not have it.
        initialization (`str`, *optional*, defaults to `"default"`):
            Initialization of new weights. `"default"` initializes the transformer as Transformers does, and the agent
            as PyTorch does. `"reference"` initializes both as the reference implementation does. All variants have
            `"reference"`. `AttentionStartConfig` documents the other values, which apply to the transformer only.
        initialization_options (`dict`, *optional*): See `AttentionStartConfig`.
    """

    model_type = "bootstrapped_vit"
    _variants = VARIANTS
    sub_configs_defaults = {
        "vit_config": SubConfigSpec(ViTConfig, init_kwargs=VIT_SMALL),
        "agent_config": SubConfigSpec(AgentCNNConfig, init_kwargs=AGENTS["agent-small"]),
    }
    keys_to_ignore_at_inference = ["agent_logits", "losses"]

    vit_config: dict | ViTConfig | None = None
    agent_config: dict | AgentCNNConfig | None = None
    sharing: Literal["none", "weights"] = "none"
    classification_weight: float | int | None = None
    divergence_weight: float | int | None = None
    hint_weight: float | int | None = None
    temperature: float | int = positive(default=4.0)
    hint_layers: Ints | None = None
    embedding_dropout: float | int | None = at_least(0)(default=None)
    mlp_dropout: float | int = rate(default=0.0)
    initialization: Literal["default", "reference", Initialization] = "default"

    def __post_init__(self, **kwargs):
        names = ("classification_weight", "divergence_weight", "hint_weight")
        for name, weight in zip(names, WEIGHTS.get(self.sharing, WEIGHTS["none"]), strict=True):
            if getattr(self, name) is None:
                setattr(self, name, weight)
        has_labels = self.id2label is not None or "num_labels" in kwargs
        super().__post_init__(**kwargs)
        if not has_labels:
            self.id2label = self.vit_config.id2label
            self.label2id = self.vit_config.label2id
        self.agree()

    def agree(self):
        """Copy this configuration's labels to `vit_config` and `agent_config`. Copy this configuration's image size,
        preprocessing and initialization to `agent_config`."""
        for config in (self.vit_config, self.agent_config):
            config.id2label = self.id2label
            config.label2id = self.label2id
        for name in ("image_size", "image_mean", "image_std", "resize_size", "resample"):
            setattr(self.agent_config, name, getattr(self, name))
        self.agent_config.initialization = "reference" if self.initialization == "reference" else "default"

    @property
    def image_size(self) -> int | list[int] | tuple[int, int]:
        """Size of images in pixels: one number, or height and width."""
        return self.vit_config.image_size

    @image_size.setter
    def image_size(self, image_size: int | list[int] | tuple[int, int]):
        self.vit_config.image_size = image_size
        self.agent_config.image_size = image_size

    @property
    def num_channels(self) -> int:
        return self.vit_config.num_channels

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of rows and number of columns of patches."""
        sizes = zip(pair(self.vit_config.image_size), pair(self.vit_config.patch_size), strict=True)
        return tuple(image // patch for image, patch in sizes)

    def validate_twins(self):
        """Check that sizes agree in `vit_config` and `agent_config`, and that the blocks in `hint_layers` exist."""
        vit = self.vit_config
        agent = self.agent_config
        same = {"num_hidden_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_channels": "num_channels"}
        if self.sharing == "weights":
            same |= {"intermediate_size": "intermediate_size", "num_attention_heads": "num_positions"}
        for vit_name, agent_name in same.items():
            ours = getattr(vit, vit_name)
            theirs = getattr(agent, agent_name)
            if ours != theirs:
                raise ValueError(
                    f"`vit_config` has `{vit_name}`={ours}, `agent_config` `{agent_name}`={theirs}; expected the same."
                )
        if not {*(self.hint_layers or ())} <= {*range(vit.num_hidden_layers)}:
            raise ValueError(
                f"`hint_layers` is {self.hint_layers}, expected blocks from 0 to {vit.num_hidden_layers - 1}."
            )


__all__ = ["BootstrappedViTConfig"]
