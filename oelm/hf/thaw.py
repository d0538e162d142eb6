"""Late thawing and training every N steps under Hugging Face's `Trainer`, which knows nothing of them."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oelm.freezing import Gates


class Thaw(TrainerCallback):
    """`Trainer(..., callbacks=[oelm.hf.Thaw()])` opens and closes parameters as the method says."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer holds every parameter by now, as it must from the start."""
        self.gates = Gates(kwargs["model"], state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set what trains in this step."""
        self.gates.apply(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave everything open that has thawed."""
        self.gates.apply(state.max_steps, keep_every=True)
