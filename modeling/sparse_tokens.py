"""How many tokens a SparseFormer computes with, where these come from, and how many an image needs: methods of all
SparseFormers, and of their classifiers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from .hub import import_from_package


logger = logging.get_logger(__name__)


@dataclass
class SparseFormerAdaptiveOutput(ModelOutput):
    """Scores of images that were each classified with as many tokens as they needed.

    Args:
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Scores, from the last count that was tried.
        num_tokens (`torch.LongTensor` of shape `(batch,)`): That count.
        confidence (`float`): Probability of the likeliest class from which on an image was done, 0 to 1.
    """

    logits: torch.FloatTensor | None = None
    num_tokens: torch.LongTensor | None = None
    confidence: float | None = None


def place_among(counts: Sequence[int], number: torch.Tensor) -> torch.Tensor:
    """The place, `()`, of the largest of increasing counts that is not above a number, `()`, else of the smallest."""
    return (torch.tensor(counts, device=number.device) <= number).sum().sub(1).clamp(min=0)


def read_at(place: torch.Tensor, values: Sequence[int]) -> int:
    """The value at a place, `()`, which is not known while a program is exported; its bounds are."""
    value = torch.tensor(values, device=place.device)[place].item()
    torch._check(value >= min(values))
    torch._check(value <= max(values))
    return value


class TokensMixin:
    """Methods of a `SparseFormerPreTrainedModel` that choose, resize and inherit its tokens."""

    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens in place, as continued bootstrapping needs; kept tokens stay as they are.
        Those that embed patches are interpolated between the cells of a new grid.

        Args:
            num_latent_tokens (`int`): New count, [CLS] not counted (80 tokens in the papers are 79 here).

        Raises:
            ValueError: if the count is below 1, or of tokens that embed patches makes no grid.
        """
        if num_latent_tokens < 1:
            raise ValueError(f"`num_latent_tokens` is {num_latent_tokens}, expected at least 1.")
        config = self.config
        num_latent_tokens = config.round_tokens(num_latent_tokens)
        smaller = [count for count in config.trained_token_counts if count < num_latent_tokens]
        if not self.base_model.resize_latents(num_latent_tokens):
            smaller = []
        config.elastic_token_counts = (
            [*smaller, num_latent_tokens] if config.elastic_token_counts and smaller else None
        )
        config.num_latent_tokens = num_latent_tokens
        config.num_tokens = None

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the number of latent tokens for all calls that choose none.

        The model keeps the choice when it is saved, exported or given to a pipeline. Unlike `resize_tokens`, this
        changes no weights.

        Args:
            num_tokens (`int`, *optional*): Count, [CLS] not counted; `None` for all tokens.

        Raises:
            ValueError: if it is below 1, above `num_latent_tokens`, or of tokens that embed patches makes no grid.
        """
        self.config.num_tokens = None if num_tokens is None else self.check_num_tokens(num_tokens)

    def check_num_tokens(self, num_tokens: int) -> int:
        """Return the count that the model computes with when `num_tokens` latent tokens are asked for. Warn once if
        the model was not made for it.

        Raises:
            ValueError: as `set_num_tokens`.
        """
        config = self.config
        num_tokens = config.round_tokens(num_tokens)
        if not 1 <= num_tokens <= config.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {num_tokens}, expected 1 to {config.num_latent_tokens}, the latent tokens that this "
                "model has; `resize_tokens` adds more, which then have to be trained."
            )
        if config.embeds_patches and config.placement == "grid":
            config.grid_of(num_tokens)
        if num_tokens not in config.trained_token_counts and not torch.compiler.is_compiling():
            trained = ", ".join(map(str, config.trained_token_counts))
            logger.warning_once(
                f"This model was trained with {trained} latent tokens and is asked for {num_tokens}, with which it may"
                " be much worse. Bootstrapping it with `elastic_token_counts` teaches it others."
            )
        return num_tokens

    @classmethod
    @torch.no_grad()
    def from_teacher(
        cls,
        teacher: nn.Module,
        num_latent_tokens: int | None = None,
        truncate: float | int | None = None,
        inherit_blocks: bool = True,
        focusing: str | None = None,
        check: bool = True,
        break_ties: bool = True,
        **fields,
    ):
        """Return a SparseFormer that inherits a teacher's blocks, final LayerNorm and classifier or projection.

        The paper's student (section 3.2) leaves out leading blocks and has a new focusing stage, which has to be
        bootstrapped. With `focusing="inherited"`, the student is the teacher at a lower resolution before any
        training: it inherits the patch embedding and all blocks, and its tokens' RoIs are the cells of a grid.

        Args:
            teacher (`nn.Module`):
                A plain pre-norm vision transformer of Transformers, timm or open_clip, see docs/models.md, or what
                `read_anatomy` read of it. The student pools as it does, and has its registers, gates, norms and rotary
                positions.
            num_latent_tokens (`int`, *optional*):
                Latent tokens. By default, as many as are a quarter of the teacher's image tokens when [CLS] is
                counted. For a teacher of 384 or more pixels, it is a quarter of the tokens that it would have at 224:
                49 for ViT-L/16-384, as in the paper.
            truncate (`float` or `int`, *optional*):
                Leading blocks left out: below 1 a fraction, from 1 on a count (1.0 is one block); 1/3 if the focusing
                stage is new, else none.
            inherit_blocks (`bool`, *optional*, defaults to `True`):
                With `False`, only the classifier's weights are inherited (an ablation of table 3).
            focusing (`str`, *optional*):
                `"paper"`, a stage that is learned from random weights, the default, or `"inherited"`, which gives a
                model of `modeling_patch_sparseformer.py`, the default of its classes.
            check (`bool`, *optional*, defaults to `True`):
                Whether to compare the two on two images of noise: the inherited blocks, given the teacher's tokens at
                RoIs that are its patches, have to compute what the teacher does.
            break_ties (`bool`, *optional*, defaults to `True`):
                With a new focusing stage, whether equal initial RoIs are moved apart, by N(0, 0.05) of the image: 12
                of the paper's 48 tokens start alike, and would stay alike. Neither paper nor reference does so
                (`results/bootstrap_choices.json` has the gain).
            fields: Fields of the configuration to set differently, for example `stem_channels=32`.

        Returns:
            The model, in evaluation mode.

        Raises:
            ValueError: if the teacher is no such transformer, has no classifier where one is needed, or the numbers
                do not fit.
            ImportError: in a model's own code, where frugalvit is not installed.
        """
        # The code that reads teachers is not saved with a model.
        inheritance = import_from_package("inheritance", "Inheriting from a teacher")
        return inheritance.inherit(
            *(cls, teacher, num_latent_tokens, truncate, inherit_blocks, focusing or cls.focusing_of_students),
            *(check, break_ties),
            **fields,
        )


class AdaptiveClassificationMixin:
    """Methods of a classifier that looks at each image with as few tokens as it needs."""

    @torch.no_grad()
    def classify_adaptively(
        self,
        pixel_values: torch.Tensor,
        confidence: float = 0.9,
        token_counts: Sequence[int] | None = None,
    ) -> SparseFormerAdaptiveOutput:
        """Classify images with few tokens, and those whose class is not sure enough again with more.

        Stem features are computed once. By default, an image is looked at twice at most: counts between the fewest and
        the most would save less than another look costs (`docs/elastic.md`).

        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            confidence (`float`, *optional*, defaults to 0.9):
                Probability of the likeliest class, 0 to 1, from which on an image is done.
            token_counts (sequence of `int`, *optional*):
                Counts to try, in this order; by default the smallest of `config.elastic_token_counts`, then
                `config.num_tokens` or all.

        Raises:
            ValueError: if `confidence` is no probability, or the model has not so many tokens.
        """
        config, base = self.config, self.base_model
        if not 0 <= confidence <= 1:
            raise ValueError(f"`confidence` is {confidence}, expected a probability from 0 to 1.")
        if token_counts is None:
            most = config.default_num_tokens
            token_counts = sorted({min(config.trained_token_counts[0], most), most})
        features = base.shared_features(pixel_values)
        logits, num_tokens, left = None, None, torch.arange(len(pixel_values), device=pixel_values.device)
        for count in token_counts:
            known = {} if features is None else {"features": features[left]}
            found = self(pixel_values[left], num_tokens=count, return_dict=True, **known).logits
            if logits is None:
                logits, num_tokens = found, torch.full_like(left, count)
            else:
                logits, num_tokens = logits.index_copy(0, left, found), num_tokens.index_fill(0, left, count)
            left = left[found.float().softmax(dim=-1).amax(dim=-1) < confidence]
            if not len(left):
                break
        return SparseFormerAdaptiveOutput(logits=logits, num_tokens=num_tokens, confidence=confidence)
