"""Sharpness-aware minimization (Foret et al., *Sharpness-Aware Minimization for Efficiently Improving Generalization*,
ICLR 2021) in a `Trainer`."""

import torch

from .trainer import ImageTrainer


class SharpnessAwareTrainer(ImageTrainer):
    """`ImageTrainer` whose steps, if `args.sam_rho` is above 0, follow the gradient at the highest loss nearby."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None) -> tuple[type, dict]:
        """Return Transformers' optimizer class and options, wrapped by pytorch_optimizer's SAM if `sam_rho` is set."""
        optimizer_class, options = ImageTrainer.get_optimizer_cls_and_kwargs(args, model)
        if not args.sam_rho:
            return optimizer_class, options
        try:
            import pytorch_optimizer
        except ImportError:
            raise ValueError("sam_rho needs pytorch_optimizer: pip install 'frugalvit[sam]'.") from None

        class SAM(pytorch_optimizer.SAM):
            """SAM whose `step` is only its second step: `training_step` calls the first one."""

            def step(self, closure=None):
                self.second_step()

        return SAM, {"base_optimizer": optimizer_class, "rho": args.sam_rho, **options}

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Compute the gradient. With SAM, move along it and compute the gradient there. Return the first loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.sam_rho:
            if self.args.max_grad_norm:
                self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.optimizer.first_step(zero_grad=True)
            super().training_step(model, inputs, num_items_in_batch)
        return loss
