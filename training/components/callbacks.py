"""Callbacks for Transformers' `Trainer`."""

import torch
from transformers import TrainerCallback


class HintDecayCallback(TrainerCallback):
    """Lets the hints of a `BootstrappedViTForImageClassification` fade as `frugalvit joint` does.

    Their weight falls linearly to 0 (Zhang et al., arXiv 2112.03552), step by step; in the reference implementation it
    falls with every epoch. The callback sets the model's `hint_share`, from 1 to 0, while the model trains, also for
    evaluations in between. Afterwards it is 1 again.

    Example:
        `Trainer(model, arguments, train_dataset=images, callbacks=[HintDecayCallback()])`

    Raises:
        ValueError: when training begins, if the model has no hints.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Within what others, such as PEFT, may have wrapped around it.
        self.pairs = [module for module in model.modules() if "hint_share" in vars(module)]
        if not self.pairs:
            raise ValueError(
                f"A {type(model).__name__} has no hints to decay; expected a BootstrappedViTForImageClassification."
            )
        # A tensor, as a compiled model would be compiled anew for each number.
        share = torch.ones((), device=args.device)
        for pair in self.pairs:
            pair.hint_share = share

    def on_step_begin(self, args, state, control, **kwargs):
        self.pairs[0].hint_share.fill_(1 - state.global_step / state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        for pair in self.pairs:
            pair.hint_share = 1.0


__all__ = ["HintDecayCallback"]
