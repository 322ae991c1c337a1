"""Trains a tiny language model with Hugging Face's Trainer, on workers that come and go.

    python -m examples.hugging_face_lm
    elastane run --workers 1:4 -m examples.hugging_face_lm --max-steps 400

A GPT-2 of two layers learns Python's own documentation, byte by byte; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from elastane.trainers.hugging_face import ElasticTrainer, ElasticTrainingArguments

BASE_BATCH_SIZE = 8
CONTEXT = 64


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Text as bytes, cut into pieces of equal length."""

    def __init__(self, text: str) -> None:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self._pieces = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def build_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which transformers can't tell from GPT-2's class name
    return model


def main(callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train once; each worker that is there at the end writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--max-steps", type=int, default=1_000, help="base steps")
    parser.add_argument("--output-dir", default="runs/hugging-face-lm", help="for checkpoints")
    parser.add_argument("--result", type=Path, help="folder for each worker's last numbers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pages = list(topics.values())
    held_out = len(pages) // 10
    torch.manual_seed(options.seed)
    trainer = ElasticTrainer(
        model=build_model(),
        args=ElasticTrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=BASE_BATCH_SIZE // 2,
            gradient_accumulation_steps=2,
            max_steps=options.max_steps,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=options.max_steps // 20,
            logging_steps=max(1, options.max_steps // 20),
            eval_strategy="steps",
            eval_steps=max(1, options.max_steps // 4),
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
            seed=options.seed,
        ),
        train_dataset=Lines("\n".join(pages[held_out:])),
        eval_dataset=Lines("\n".join(pages[:held_out])),
        callbacks=list(callbacks),
        base_batch_size=BASE_BATCH_SIZE,  # for which all of the above was tuned
    )
    trainer.train()
    world = trainer.session.world
    row = {
        "eval_loss": trainer.evaluate()["eval_loss"],
        "steps": trainer.state.global_step,
        "progress": trainer.session.progress,
        "workers": world.world_size,
        "generation": world.generation,
    }
    if trainer.is_world_process_zero():
        print(row)
    if options.result is not None:
        options.result.mkdir(parents=True, exist_ok=True)
        (options.result / f"{world.rank}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
