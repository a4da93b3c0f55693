"""Image tokens of models that read images and texts: an error if a prompt has more or fewer places than there are
tokens, and the places of image tokens in the output."""

import torch
from transformers.utils import ModelOutput


class CheckedImageTokens:
    """Mixin of a `LlavaModel` or `PaliGemmaModel`, with a clear message if numbers of places and features differ."""

    def get_placeholder_mask(
        self, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor, image_features: torch.Tensor
    ) -> torch.Tensor:
        """The places where the features of images belong, `(batch, tokens, 1)` bool.

        Raises:
            ValueError: if there are more or fewer places than features.
        """
        try:
            return super().get_placeholder_mask(input_ids, inputs_embeds, image_features)
        except ValueError as error:
            if input_ids is None:
                raise
            inserted, given = int((input_ids == self.config.image_token_id).sum()), image_features.shape[:-1].numel()
            raise ValueError(
                f"The prompts have {inserted} image tokens (id {self.config.image_token_id}), the model makes {given} "
                "of their images. `matching_processor(processor, model)` makes a processor that fits; where its call "
                "chooses `num_image_tokens`, pass on to the model what it returns under that name."
            ) from error


def projected_tokens(outputs: ModelOutput) -> torch.Tensor:
    """Return the projected tokens that the language model has read of all images, one after the other, `(tokens,
    hidden_size)`, from the output of a `LlavaModel`, a `PaliGemmaModel` or one with a head. Versions of Transformers
    name them differently."""
    if getattr(outputs, "image_outputs", None) is not None:
        return torch.cat(list(outputs.image_outputs.pooler_output))
    features = outputs.image_hidden_states  # Before Transformers 5.24.
    return features.reshape(-1, features.shape[-1])
